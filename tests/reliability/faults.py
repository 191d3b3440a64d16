"""The home in which faults strike real commands, the commands, and the verdict on them.

A home has its own data, cache and settings directories, and hard links to the starter's files.
Nothing outside the home is touched.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command import AKUNU

PATIENCE_S = 120.0  # for a command that loads a model on a busy machine
PANIC = ("Traceback (most", "Segmentation fault", "terminate called", "Fatal Python error")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEADLY = {-int(number) for number in SIGNALS} | {0, 130}
_UNFINISHED = (".partial-*", ".memory-*", ".curve-*", "*.incomplete")


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

    def check_no_panic(self, text: str) -> None:
        for panic in PANIC:
            self.check(panic not in text, f"{panic!r}: {text[-1500:]}")

    def judge(self, done: Done, codes: set[int], what: str = "") -> None:
        """Check a command that may end with one of `codes`: an error is one line of ours."""
        self.word = self.word or done.word
        self.check_no_panic(done.out + done.err)
        self.check(done.code in codes, f"{what}code {done.code}: {done.err[-800:]}")
        if done.code in (1, 2):
            self.check(done.word.startswith("akunu: "), f"{what}says {done.err!r}")


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

    def __init__(self, directory: Path, starter: Path) -> None:
        self.directory = directory
        self.cache = directory / "cache" / "akunu"
        self.config = directory / "config" / "akunu"
        self.models = directory / "data" / "akunu" / "models"
        self.conversations = directory / "data" / "akunu" / "conversations.db"
        for path in (self.models, self.cache, self.config):
            path.mkdir(parents=True)
        shutil.copytree(starter, self.models / "starter", copy_function=_link_or_copy)
        hashes = [
            f'"{path.name}" = "{hashlib.sha256(path.read_bytes()).hexdigest()}"\n'
            for path in sorted(starter.iterdir())
        ]
        entry = '[starter]\nsource = "a test"\n\n[starter.sha256]\n' + "".join(hashes)
        (self.models / "models.toml").write_text(entry, encoding="utf-8")
        self.variables = {
            "XDG_DATA_HOME": str(directory / "data"), "XDG_CACHE_HOME": str(directory / "cache"),
            "XDG_CONFIG_HOME": str(directory / "config"), "HF_HOME": str(directory / "hub"),
            "HOME": str(directory),
        }  # fmt: skip

    def start(self, command: Command) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*AKUNU, *command.arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=os.environ | self.variables, cwd=self.directory,
            start_new_session=True,
        )  # fmt: skip
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


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)


def finished(process: subprocess.Popen[bytes]) -> Done:
    """Wait for a process; kill it after PATIENCE_S seconds, with code 99."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = 99
    return Done(code, (out or b"").decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def stop_and_go(process_id: int, seconds: float) -> None:
    os.kill(process_id, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process_id, signal.SIGCONT)


# Commands

_REPORTED = ("--max-tokens", "16", "--temperature", "0", "Tell me about walruses.")
RUN = Command("run", ("run", "--max-tokens", "4", "--temperature", "0", "Say hello."))
LIST = Command("models list", ("models", "list"), answers=lambda done: "starter" in done.out)


def commands(home: Home) -> list[Command]:
    """Return the commands to strike."""

    def complete(done: Done) -> bool:
        replies = [json.loads(line) for line in done.out.splitlines()]
        return sorted(reply["id"] for reply in replies if "text" in reply) == [1, 2]

    requests = [{"id": n, "prefix": f"def area_{n}(width, height):\n    "} for n in (1, 2)]
    lines = "".join(json.dumps(request) + "\n" for request in requests).encode()
    cached = ("--prompt-cache", str(home.directory / "said.safetensors"))
    return [
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


def check_restart(home: Home, command: Command, outcome: Outcome) -> None:
    """Check that the undisturbed command does all its work without a warning."""
    done = home.run(command)
    outcome.judge(done, {0}, "restart: ")
    outcome.check(command.answers(done), f"restart: another answer: {done.out!r}")
    outcome.check("damaged" not in done.err, f"restart: {done.err[-800:]}")
    if command.undo:
        home.akunu(*command.undo)


def duration(home: Home, command: Command) -> float:
    """Return the seconds that an undisturbed command takes."""
    started, outcome = time.monotonic(), Outcome("none", command.name, "")
    check_restart(home, command, outcome)
    assert not outcome.problems, outcome
    return time.monotonic() - started


# Faults


def signalled(
    home: Home, command: Command, number: signal.Signals, seconds: float, *, restart: bool = True
) -> Outcome:
    """Send a signal `seconds` after the start. restart: verify the store and run it again."""
    outcome = Outcome(number.name, command.name, f"after {seconds:.2f} s")
    process = home.start(command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    done = finished(process)
    # Python itself answers an early interrupt with a traceback, before a line of ours runs.
    early = number == signal.SIGINT and "/akunu_py/" not in done.err
    if not (early and "KeyboardInterrupt" in done.err):
        outcome.judge(done, _DEADLY)
    if restart:
        outcome.judge(home.akunu("models", "verify"), {0}, "the store is damaged: ")
        if command.undo:
            home.akunu(*command.undo)
        check_restart(home, command, outcome)
        roots = (home.models, home.cache, home.directory / "hub")
        left = [path for root in roots for name in _UNFINISHED for path in root.rglob(name)]
        outcome.check(not left, f"left behind: {left}")
    return outcome
