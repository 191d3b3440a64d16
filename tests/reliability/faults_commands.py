"""Faults that strike commands: signals, altered files.

`strike` is the one driver. It runs a command under a fault, then checks what must still hold: the
exit code and last line, every byte of the store, no leftovers, and the same command undisturbed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from random import Random

from akunu_py.chats.conversation_store import ConversationStore
from tests.reliability.faults import (
    Command,
    Done,
    Home,
    Outcome,
    after,
    check_store,
    finished,
)
from tests.support.chats import exchange_of

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEADLY = {-int(number) for number in SIGNALS} | {0, 130}
_REPORTED = ("--max-tokens", "16", "--temperature", "0", "Tell me about walruses.")
RUN = Command("run", ("run", "--max-tokens", "4", "--temperature", "0", "Say hello."))
LIST = Command("models list", ("models", "list"), answers=lambda done: "starter" in done.out)
CHATS = Command("chats list", ("chats", "list"), answers=lambda done: "sky" in done.out)


def strike(
    home: Home,
    command: Command,
    kind: str,
    moment: str,
    codes: set[int],
    *,
    during: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
    around: AbstractContextManager[object] | None = None,
    judge: Callable[[Done, Outcome], bool] = lambda done, outcome: False,
    store: bool = False,
    restart: bool = True,
) -> Outcome:
    """Run `command` under a fault.

    codes: exit codes allowed. during: called after the start. around: the fault's duration.
    judge: more checks; True skips those of the output.
    store: verify the store and look for leftovers. restart: run the command again, undisturbed.
    """
    outcome = Outcome(kind, command.name, moment)
    with around or nullcontext():
        process = home.start(command)
        during(process)
        done = finished(process)
        if not judge(done, outcome):
            outcome.judge(done, *codes)
    if store:
        check_store(home, outcome)
    if command.undo and (done.code == 0 or store):
        home.akunu(*command.undo)
    if restart:
        check_restart(home, command, outcome)
    if store:
        left = leftovers(home)
        outcome.check(not left, f"left behind: {left}")
    return outcome


def check_restart(home: Home, command: Command, outcome: Outcome) -> None:
    """Check that the undisturbed command does all its work without a warning."""
    done = home.run(command)
    outcome.check(done.code == 0, f"restart: code {done.code}: {done.err[-800:]}")
    outcome.check(command.answers(done), f"restart: another answer: {done.out!r}")
    outcome.check("damaged" not in done.err, f"restart: {done.err[-800:]}")
    outcome.check_words(done, "restart: ")
    if command.undo:
        home.akunu(*command.undo)


def leftovers(home: Home) -> list[str]:
    """Return the unfinished files of commands."""
    unfinished = (".partial-*", ".memory-*", ".curve-*", "*.incomplete")
    return sorted(
        str(path.relative_to(home.directory))
        for root in (home.models, home.cache, home.directory / "hub")
        for pattern in unfinished
        for path in root.rglob(pattern)
    )


def commands(home: Home) -> dict[str, Command]:
    """Return the commands to strike."""

    def complete(done: Done) -> bool:
        replies = [json.loads(line) for line in done.out.splitlines()]
        return sorted(reply["id"] for reply in replies if "text" in reply) == [1, 2]

    requests = [{"id": n, "prefix": f"def area_{n}(width, height):\n    "} for n in (1, 2)]
    lines = "".join(json.dumps(request) + "\n" for request in requests).encode()
    cached = ("--prompt-cache", str(home.directory / "said.safetensors"))
    all_ = [
        Command("run", ("run", *_REPORTED), answers=lambda done: len(done.out.split()) > 3),
        Command("run --prompt-cache", ("run", *cached, *_REPORTED)),
        Command("complete", ("complete", "--max-tokens", "12"), lines, complete),
        Command("models verify", ("models", "verify"), answers=lambda d: "verified" in d.out),
        Command(
            "models import",
            ("models", "import", str(home.models / "starter"), "--name", "copy"),
            answers=lambda done: "copy is ready" in done.err,
            undo=("models", "rm", "copy", "--yes"),
        ),
    ]
    return {command.name: command for command in all_}


def duration(home: Home, command: Command) -> float:
    """Return the seconds that an undisturbed command takes."""
    started = time.monotonic()
    done = home.run(command)
    seconds = time.monotonic() - started
    if done.code or not command.answers(done):
        raise AssertionError(f"{command.name} fails undisturbed: {done}")
    if command.undo:
        home.akunu(*command.undo)
    return seconds


# Signals


def signalled(
    home: Home, command: Command, number: signal.Signals, seconds: float, *, restart: bool = True
) -> Outcome:
    """Send a signal `seconds` after the start."""

    def send(process: subprocess.Popen[bytes]) -> None:
        if after(process, seconds):
            process.send_signal(number)

    def judge(done: Done, outcome: Outcome) -> bool:
        # Python itself answers an early interrupt with a traceback, before a line of ours runs.
        early = number == signal.SIGINT and "/akunu_py/" not in done.err
        return early and "KeyboardInterrupt" in done.err

    return strike(
        home,
        command,
        number.name,
        f"after {seconds:.2f} s",
        _DEADLY,
        during=send,
        judge=judge,
        store=restart,
        restart=restart,
    )


# Altered files


def keep_conversations(home: Home, number: int = 40) -> None:
    """Fill the database with conversations."""
    store = ConversationStore.open(home.conversations)
    answer = "Light is scattered by the air. " * 30
    for n in range(number):
        store.save_tree(exchange_of(f"sky{n}", "Why is the sky blue?", answer, 1e9 + n))
    store.close()


def _flip(path: Path, random: Random) -> None:
    size = max(1, path.stat().st_size)
    with path.open("r+b") as file:
        for _ in range(random.randint(1, 20)):
            file.seek(random.randrange(min(size, 4096) if random.random() < 0.5 else size))
            file.write(bytes([random.randrange(256)]))


def _replace_by_directory(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, Callable[[Path, Random], object]] = {
    "cut off": lambda path, random: os.truncate(
        path, random.randrange(max(1, path.stat().st_size))
    ),
    "emptied": lambda path, random: os.truncate(path, 0),
    "bytes altered": _flip,
    "replaced by rubbish": lambda path, random: path.write_bytes(random.randbytes(4000)),
    "deleted": lambda path, random: path.unlink(),
    "replaced by a directory": _replace_by_directory,
}


def altered(home: Home, path: Path, harm: str, random: Random, command: Command) -> Outcome:
    """Alter a file. The command works or reports the problem; caches are repaired unaided."""
    in_store = home.models / "starter" in path.parents
    backup = home.directory / ".backup"
    shutil.copyfile(path, backup)
    if in_store:
        home.own_copy(path)
    HARMS[harm](path, random)
    is_altered = not path.is_file() or path.read_bytes() != backup.read_bytes()

    def judge(done: Done, outcome: Outcome) -> bool:
        if in_store:
            verified = home.akunu("models", "verify", "starter")
            outcome.check_words(verified, "verify: ")
            outcome.check((verified.code == 1) == is_altered, f"verify: {verified}")
        if path == home.conversations:  # set aside with all its bytes, never deleted
            aside = sorted(home.data.glob("conversations.db.damaged-?"))
            outcome.check(len(aside) == ("set aside" in done.err), f"{aside}: {done.err}")
        return False

    @contextmanager
    def restored() -> Iterator[None]:
        yield
        if path.is_dir():
            path.rmdir()
        if in_store or path.parent in (home.config, home.models) or path == home.conversations:
            shutil.copyfile(backup, path)
        for other in home.data.glob("conversations.db?*"):
            other.unlink()

    where = str(path.relative_to(home.directory))
    return strike(home, command, f"file {harm}", where, {0, 1, 2}, around=restored(), judge=judge)
