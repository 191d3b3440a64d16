"""The home in which faults strike real commands, and the verdict on the commands.

A home has its own data, cache and settings directories, and hard links to the starter's files: copy
one before you alter it (`own_copy`). Nothing outside the home is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command import AKUNU

PATIENCE_S = 120.0  # for a command that loads a model on a busy machine
_PANIC = ("Traceback (most", "Segmentation fault", "terminate called", "Fatal Python error")


@dataclass(frozen=True, slots=True)
class Done:
    """An ended command. code: negative for the signal that ended it."""

    code: int
    out: str
    err: str

    @property
    def word(self) -> str:
        """The last line on stderr."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else ""


@dataclass(slots=True)
class Outcome:
    """The outcome of one fault."""

    kind: str
    command: str
    moment: str
    word: str = ""  # the command's last line
    lost: int = 0  # characters shown in the last second and not saved
    problems: list[str] = field(default_factory=list)  # broken promises

    def check(self, promise: bool, problem: str) -> None:
        if not promise:
            self.problems.append(problem)

    def judge(self, done: Done, *codes: int) -> None:
        """Check the output of a command that may end with one of `codes`."""
        self.word = done.word
        self.check_words(done)
        self.check(done.code in codes, f"code {done.code}: {done.err[-800:]}")

    def check_words(self, done: Done, what: str = "") -> None:
        """Check that an error is one line of ours, and no crash."""
        text = done.out + done.err
        for panic in _PANIC:
            self.check(panic not in text, f"{what}{panic!r}: {text[-1500:]}")
        if done.code in (1, 2):
            self.check(
                done.word.startswith("akunu: "), f"{what}code {done.code}, says {done.err!r}"
            )
        self.check(
            done.code in (0, 1, 2, 130) or done.code < 0, f"{what}code {done.code}: {done.err!r}"
        )


@dataclass(frozen=True, slots=True)
class Command:
    """A command of akunu."""

    name: str
    arguments: tuple[str, ...]
    stdin: bytes = b""
    answers: Callable[[Done], bool] = lambda done: True  # True for undisturbed output
    undo: tuple[str, ...] = ()  # a command that makes it repeatable


class Home:
    """Directories for everything that akunu keeps, below `directory`."""

    def __init__(self, directory: Path, starter: Path, *, link: bool = False) -> None:
        """link: make the starter a link, for a home without room for it."""
        self.directory = directory
        self.data = directory / "data" / "akunu"
        self.cache = directory / "cache" / "akunu"
        self.config = directory / "config" / "akunu"
        self.models = self.data / "models"
        self.conversations = self.data / "conversations.db"
        for path in (self.models, self.cache, self.config):
            path.mkdir(parents=True)
        if link:
            (self.models / "starter").symlink_to(starter)
        else:
            shutil.copytree(starter, self.models / "starter", copy_function=_link_or_copy)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of commands."""
        return {
            "XDG_DATA_HOME": str(self.directory / "data"),
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "XDG_CONFIG_HOME": str(self.directory / "config"),
            "HF_HOME": str(self.directory / "hub"),
            "HOME": str(self.directory),
        }

    def start(self, command: Command) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*AKUNU, *command.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | self.variables,
            cwd=self.directory,
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(command.stdin)
            process.stdin.close()
        process.stdin = None  # written
        return process

    def run(self, command: Command) -> Done:
        """Run a command to its end."""
        return finished(self.start(command))

    def akunu(self, *arguments: str) -> Done:
        return self.run(Command("", arguments))

    def own_copy(self, path: Path) -> None:
        """Replace a hard link by a copy, so that the starter is not altered."""
        copy = path.with_name(f".copy-{path.name}")
        shutil.copyfile(path, copy)
        os.replace(copy, path)


def finished(process: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> Done:
    """Wait for a process; kill it after `patience_s` seconds, with code 99."""
    try:
        out, err = process.communicate(timeout=patience_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = 99
    return Done(code, (out or b"").decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def after(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait; True if the process still runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return False
    return True


def check_store(home: Home, outcome: Outcome) -> None:
    """Verify every byte of every model."""
    done = home.akunu("models", "verify")
    outcome.check(done.code == 0, f"the store is damaged: {done.out} {done.err}")
    outcome.check_words(done, "verify: ")


@contextlib.contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small disk in memory on `directory`. Needs root."""
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={megabytes}m,mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def why_no_small_disk() -> str:
    """Return why no disk can be mounted here, "" if one can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs Linux and the administrator, who mounts a small disk"
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False)
    return "" if done.returncode == 0 else "mounting is not allowed here"


def fill(directory: Path) -> Path:
    """Fill the disk of `directory` with a file; return the file."""
    filler = directory / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return filler


def stop_and_go(process_id: int, seconds: float) -> None:
    os.kill(process_id, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process_id, signal.SIGCONT)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)
