"""Files that are altered, disks that are full, permissions that are taken away."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from random import Random

from akunu_py.chats.conversation_store import ConversationStore
from tests.reliability.faults import (
    Command,
    Done,
    Home,
    Outcome,
    check_restart,
    check_store,
    fill,
    finished,
    small_disk,
)
from tests.support.chats import exchange_of

KEPT = ("Why is the sky blue?", "Light is scattered by the air.")
CHATS = Command("chats list", ("chats", "list"), answers=lambda done: "sky" in done.out)


def keep_conversations(home: Home, number: int = 40) -> None:
    """Fills the database with conversations, enough for some pages."""
    store = ConversationStore.open(home.conversations)
    for n in range(number):
        store.save_tree(exchange_of(f"sky{n}", KEPT[0], f"{KEPT[1]} " * 30, 1e9 + n))
    store.close()


# Files that are altered


def _cut(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(max(1, path.stat().st_size)))


def _empty(path: Path, random: Random) -> None:
    os.truncate(path, 0)


def _flip(path: Path, random: Random) -> None:
    size = max(1, path.stat().st_size)
    with path.open("r+b") as file:
        for _ in range(random.randint(1, 20)):
            at = random.randrange(min(size, 4096) if random.random() < 0.5 else size)
            file.seek(at)
            file.write(bytes([random.randrange(256)]))


def _rubbish(path: Path, random: Random) -> None:
    path.write_bytes(random.randbytes(random.randrange(1, 5000)))


def _gone(path: Path, random: Random) -> None:
    path.unlink()


def _directory(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, Callable[[Path, Random], None]] = {
    "cut off": _cut,
    "emptied": _empty,
    "bytes altered": _flip,
    "replaced by rubbish": _rubbish,
    "deleted": _gone,
    "replaced by a directory": _directory,
}


def altered(home: Home, path: Path, harm: str, random: Random, command: Command) -> Outcome:
    """Harms a file, runs the command, which does its work or says what is wrong; then puts the
    file back, or where it is only of the cache, lets the command help itself."""
    outcome = Outcome(f"file {harm}", command.name, str(path.relative_to(home.directory)))
    of_store = home.models / "starter" in path.parents
    backup = home.directory / ".backup"
    shutil.copyfile(path, backup)
    if of_store:
        home.own_copy(path)
    HARMS[harm](path, random)
    changed = not path.is_file() or path.read_bytes() != backup.read_bytes()
    done = home.run(command)
    outcome.judge(done, 0, 1, 2)
    if of_store:
        verified = home.akunu("models", "verify", "starter")
        outcome.check_words(verified, "verify: ")
        outcome.check((verified.code == 1) == changed, f"verify: {verified}")
        outcome.word = outcome.word or verified.word
    if of_store or path.parent == home.config:
        _put_back(backup, path)
    elif path.is_dir():  # which is nobody's to delete
        path.rmdir()
    if path == home.conversations:
        _check_set_aside(home, done, outcome)
        _put_back(backup, path)
        for part in ("-wal", "-shm"):
            Path(f"{path}{part}").unlink(missing_ok=True)
    if of_store:
        check_store(home, outcome)
    check_restart(home, command, outcome)
    return outcome


def _put_back(backup: Path, path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    shutil.copyfile(backup, path)


def _check_set_aside(home: Home, done: Done, outcome: Outcome) -> None:
    """A database is never thrown away: where its conversations are not shown, a word says that it
    was set aside, and all its bytes are under that name."""
    aside = sorted(home.data.glob("conversations.db.damaged-?"))
    outcome.check(len(aside) == ("set aside" in done.err), f"{aside}: {done.err}")
    if aside:
        outcome.word = next(line for line in done.err.splitlines() if "set aside" in line)
    for path in home.data.glob("conversations.db.damaged-*"):
        path.unlink()


def _judged(home: Home, command: Command, outcome: Outcome, done: Done, *codes: int) -> Outcome:
    """What came of a command that was disturbed, and may have ended with one of `codes`."""
    outcome.judge(done, *codes)
    if command.undo and done.code == 0:
        home.akunu(*command.undo)
    check_restart(home, command, outcome)
    return outcome


# Disks that are full


def disk_full(
    directory: Path, starter: Path, megabytes: int, random: Random
) -> Generator[Outcome, None, None]:
    """Commands on a disk that is full from the start, or fills up on the way, or takes only files
    of a size; afterwards there is room again."""
    options = ("--max-tokens", "16", "--temperature", "0", "Tell me about walruses.")
    cached = ("--prompt-cache", str(directory / "home" / "said.safetensors"))
    source = str(starter)
    wanted = [
        Command("run", ("run", *options), answers=lambda d: len(d.out.split()) > 3),
        Command("run --prompt-cache", ("run", *cached, *options)),
        Command(
            "models import",
            ("models", "import", source, "--name", "copy"),
            undo=("models", "rm", "copy", "--yes"),
        ),
        CHATS,
    ]
    with small_disk(directory, megabytes):
        home = Home(directory / "home", starter, link=True)
        keep_conversations(home, 3)
        while True:
            command = random.choice(wanted)
            left = random.choice([0, random.randrange(1, 200_000), random.randrange(1, 90 << 20)])
            outcome = Outcome("disk full", command.name, f"{left:,} bytes are left")
            filler = fill(directory)
            os.truncate(filler, max(0, filler.stat().st_size - left))
            done = home.run(command)
            filler.unlink()
            yield _judged(home, command, outcome, done, 0, 1)


def limited(home: Home, command: Command, most: int) -> Outcome:
    """No file may become longer than `most` bytes: a quota that needs no administrator."""
    outcome = Outcome("file size limit", command.name, f"{most:,} bytes")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    done = home.run(command, limit)
    outcome.judge(done, 0, 1)
    if command.undo and done.code == 0:
        home.akunu(*command.undo)
    check_store(home, outcome)
    check_restart(home, command, outcome)
    return outcome


def output_full(home: Home, command: Command) -> Outcome:
    """The disk that stdout goes to is full."""
    outcome = Outcome("disk of the output full", command.name, "from the start")
    done = home.run(command, out="/dev/full")
    outcome.judge(done, 1)
    return outcome


# Permissions that are taken away


def forbidden(home: Home, path: Path, mode: int, command: Command) -> Outcome:
    """Takes permissions from a file or a directory, runs the command, and gives them back."""
    where = str(path.relative_to(home.directory))
    outcome = Outcome("permissions revoked", command.name, f"{where} {mode:03o}")
    with _mode(path, mode):
        done = home.run(command)
    return _judged(home, command, outcome, done, 0, 1, 2)


def forbidden_meanwhile(home: Home, path: Path, command: Command, seconds: float) -> Outcome:
    """The same, while the command runs."""
    where = str(path.relative_to(home.directory))
    outcome = Outcome("permissions revoked", command.name, f"{where} 000 after {seconds:.1f} s")
    process = home.start(command)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with _mode(path, 0):
        done = finished(process)
    return _judged(home, command, outcome, done, 0, 1, 2)


@contextlib.contextmanager
def _mode(path: Path, mode: int) -> Iterator[None]:
    before = path.stat().st_mode & 0o777
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)
