"""The home in which faults strike real commands and chats, the faults, and the verdict on them.

A home has its own data, cache and settings directories, and hard links to the starter's files.
Nothing outside the home is touched.

Of a chat, the screen of a second before is compared with the database: prompts in the transcript
were shown as sent, and every letter of the answer that was on the screen must be saved.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.support.command import AKUNU, until
from tests.support.terminal import Terminal

PATIENCE_S = 120.0  # for a command that loads a model on a busy machine
PANIC = ("Traceback (most", "Segmentation fault", "terminate called", "Fatal Python error")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEADLY = {-int(number) for number in SIGNALS} | {0, 130}
_UNFINISHED = (".partial-*", ".memory-*", ".curve-*", "*.incomplete")


Done = subprocess.CompletedProcess[str]


@dataclass(slots=True)
class Outcome:
    """The outcome of one fault."""

    kind: str
    command: str
    moment: str
    word: str = ""  # the command's last line
    problems: list[str] = field(default_factory=list)  # broken promises

    def check(self, promise: bool, problem: str) -> None:
        if not promise:
            self.problems.append(problem)

    def check_no_panic(self, text: str) -> None:
        for panic in PANIC:
            self.check(panic not in text, f"{panic!r}: {text[-1500:]}")

    def judge(self, done: Done, codes: set[int], what: str = "") -> None:
        """Check a command that may end with one of `codes`: an error is one line of ours."""
        code, last = done.returncode, ["", *filter(str.strip, done.stderr.splitlines())][-1]
        self.word = self.word or last
        self.check_no_panic(done.stdout + done.stderr)
        self.check(code in codes, f"{what}code {code}: {done.stderr[-800:]}")
        if code in (1, 2):
            self.check(last.startswith("akunu: "), f"{what}says {done.stderr!r}")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of akunu."""

    name: str
    arguments: tuple[str, ...]
    stdin: str = ""
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

    def start(self, command: Command) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*AKUNU, *command.arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=os.environ | self.variables, cwd=self.directory,
            start_new_session=True, encoding="utf-8", errors="replace",
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


def finished(process: subprocess.Popen[str]) -> Done:
    """Wait for a process; kill it after PATIENCE_S seconds, with code 99."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = 99
    return Done(process.args, code, out or "", err)


def stop_and_go(process_id: int, seconds: float) -> None:
    os.kill(process_id, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process_id, signal.SIGCONT)


# Commands

_REPORTED = ("--max-tokens", "16", "--temperature", "0", "Tell me about walruses.")
RUN = Command("run", ("run", "--max-tokens", "4", "--temperature", "0", "Say hello."))
LIST = Command("models list", ("models", "list"), answers=lambda done: "starter" in done.stdout)


def commands(home: Home) -> list[Command]:
    """Return the commands to strike."""

    def complete(done: Done) -> bool:
        replies = [json.loads(line) for line in done.stdout.splitlines()]
        return sorted(reply["id"] for reply in replies if "text" in reply) == [1, 2]

    requests = [{"id": n, "prefix": f"def area_{n}(width, height):\n    "} for n in (1, 2)]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    cached = ("--prompt-cache", str(home.directory / "said.safetensors"))
    return [
        Command("run", ("run", *_REPORTED), answers=lambda done: len(done.stdout.split()) > 3),
        Command("run --prompt-cache", ("run", *cached, *_REPORTED)),
        Command("complete", ("complete", "--max-tokens", "12"), lines, complete),
        Command("models verify", ("models", "verify"), answers=lambda d: "verified" in d.stdout),
        Command(
            "models import",
            ("models", "import", str(home.models / "starter"), "--name", "copy"),
            answers=lambda done: "copy is ready" in done.stderr,
            undo=("models", "rm", "copy", "--yes"),
        ),
    ]


def check_restart(home: Home, command: Command, outcome: Outcome) -> None:
    """Check that the undisturbed command does all its work without a warning."""
    done = home.run(command)
    outcome.judge(done, {0}, "restart: ")
    outcome.check(command.answers(done), f"restart: another answer: {done.stdout!r}")
    outcome.check("damaged" not in done.stderr, f"restart: {done.stderr[-800:]}")
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
    early = number == signal.SIGINT and "/akunu_py/" not in done.stderr
    if not (early and "KeyboardInterrupt" in done.stderr):
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


# Faults of chats

KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP, SIGCONT", "terminal closed")
MOMENTS = ("while loading", "just after sending", "while answering", "at rest")
RAW = "the terminal is not as it was"
_SLOW_S = 180.0  # a model that is loaded on a busy machine


class Chat:
    """A chat in a terminal."""

    def __init__(
        self, variables: Mapping[str, str], terminal: Terminal, options: str = "", job: str = "+m"
    ) -> None:
        """variables: of the environment. job: "-m" to put the chat into its own process group."""
        self.terminal = terminal
        keep = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        # Greedy: the same answers every time. The shell prints the exit code, and without job
        # control leaves a suspended chat alone.
        command = f"{keep} {sys.executable} -m akunu_py chat --temperature 0 --max-tokens 150"
        after = f'C=$?; [ "$A" = "$(stty -g)" ] || echo "{RAW}"; echo "code=$C"'
        terminal.type(f"set {job}; clear; A=$(stty -g); {command} {options}; {after}", "Enter")
        terminal.wait_for(r"Ask something|code=\d", seconds=_SLOW_S)

    @property
    def process(self) -> int:
        shell = self.terminal.shell()
        found = subprocess.run(["pgrep", "-P", shell], check=True, capture_output=True, text=True)
        return int(found.stdout)

    def send(self, prompt: str) -> None:
        """Type a prompt and wait until it is shown as sent."""
        self.terminal.type(prompt, "Enter")
        until(lambda: prompt in shown(self.terminal.screen()))

    def shows_typed(self) -> bool:
        """Type an x, which is lost if the chat continues just then; return whether it is shown."""
        self.terminal.type("x")
        return "│ x" in self.terminal.screen()

    def quit(self) -> str:
        """Press Ctrl+Q; return what the terminal shows afterwards."""
        self.terminal.type("C-q")
        return self.terminal.wait_for(r"code=\d+", seconds=60)


def shown(screen: str) -> str:
    """Return the part of the screen above the prompt box."""
    return screen.rpartition("╭")[0]


def letters(text: str) -> str:
    """Return letters and digits alone, without the wraps and decorations of a screen."""
    return re.sub(r"[\W_]", "", text)


def shown_after(screen: str, prompt: str) -> str:
    """Return the letters of the answer to `prompt`, "" once the prompt has scrolled away."""
    _, found, after = shown(screen).rpartition(prompt)
    return letters(after.partition("…")[0]) if found else ""


@contextlib.contextmanager
def terminals() -> Iterator[Callable[[], Terminal]]:
    """Make terminals, and close all of them at the end."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:

        def make() -> Terminal:
            terminal = Terminal(Path(directory) / f"tmux{next(numbers)}")
            stack.callback(terminal.close)
            return terminal

        yield make


def saved(home: Home) -> dict[str, str]:
    """Return every prompt in the database with all its answers."""
    database = sqlite3.connect(f"file:{home.conversations}?mode=ro", uri=True, timeout=10)
    with contextlib.closing(database):
        rows = database.execute(
            "SELECT p.text, coalesce(group_concat(a.text, ' '), '') FROM messages p LEFT JOIN "
            "messages a ON a.parent = p.id AND a.conversation = p.conversation "
            "WHERE p.role = 'user' GROUP BY p.number"
        )
        return dict(rows.fetchall())


def hurt(home: Home, kind: str, moment: str, random: Random, number: int) -> Outcome:
    """Hurt one chat, and look for its messages in the next one."""
    outcome = Outcome(kind, "chat", moment)
    prompt = f"Tell me about walrus {number}."
    with terminals() as make:
        chat = Chat(home.variables, make())
        seen, early = _bring_to(chat, moment, prompt, random)
        screen = _hurt(chat, kind)
        outcome.check_no_panic(screen)
        # A killed chat, or one without its terminal, has no time to tidy up.
        is_restored = RAW not in screen or kind in ("SIGKILL", "SIGHUP")
        outcome.check(is_restored, f"{RAW}:\n{screen}")
        outcome.word = ["the terminal is gone", *re.findall(r"akunu: .*|code=\d+", screen)][-1]
        is_sent = prompt in shown(seen)
        if is_sent:
            _check_saved(home, prompt, early, outcome)
        _check_next(home, make(), prompt if is_sent else "", outcome)
    return outcome


def disk_full(home: Home, is_freed: bool, number: int) -> Outcome:
    """Let no file grow during an answer. The chat quits, or there is room again before."""
    outcome = Outcome("disk full", "chat", "then room again" if is_freed else "then quit")
    first, second = f"Tell me about walrus {number}.", f"Tell me about whale {number}."
    with terminals() as make:
        chat = Chat(home.variables, make(), "--no-answer-cache")
        chat.send(first)
        chat.terminal.wait_for("answering", seconds=_SLOW_S)
        unlimited = resource.prlimit(chat.process, resource.RLIMIT_FSIZE)
        resource.prlimit(chat.process, resource.RLIMIT_FSIZE, (0, unlimited[1]))
        chat.terminal.wait_for("not saved for now", seconds=60)
        outcome.word = "not saved for now"
        chat.terminal.type("Escape", shows="■ stopped")
        if is_freed:
            chat.terminal.type(second, "Enter", shows="answering", seconds=_SLOW_S)
            resource.prlimit(chat.process, resource.RLIMIT_FSIZE, unlimited)
            chat.terminal.wait_for("Everything is saved again", seconds=60)
        screen = chat.quit()
        outcome.check_no_panic(screen)
        if is_freed:
            outcome.check("code=0" in screen, f"ended with:\n{screen}")
            outcome.check(second in saved(home), "the second prompt is lost")
        else:
            outcome.check("code=1" in screen, f"ended with:\n{screen}")
            outcome.check("some messages could not be saved" in screen, f"says:\n{screen}")
        outcome.check(first in saved(home), "the first prompt is lost")
        _check_next(home, make(), first, outcome)
    return outcome


def _bring_to(chat: Chat, moment: str, prompt: str, random: Random) -> tuple[str, str]:
    """Return the screen at that moment, and the one of more than a second before."""
    terminal = chat.terminal
    if moment == "while loading":
        time.sleep(random.uniform(0, 1.5))
        return terminal.screen(), ""
    chat.send(prompt)
    if moment == "just after sending":
        seen = terminal.screen()
        time.sleep(random.uniform(0, 0.2))
        return seen, ""
    terminal.wait_for(r"answering|● ready .* tokens/s", seconds=_SLOW_S)
    if moment == "while answering":
        time.sleep(random.uniform(0.2, 1.5))
        early = terminal.screen()
        time.sleep(1.3)  # an answer that grows is written once a second
        return terminal.screen(), early
    terminal.wait_for("● ready .* tokens/s", seconds=_SLOW_S)
    time.sleep(0.2)
    return terminal.screen(), terminal.screen()


def _hurt(chat: Chat, kind: str) -> str:
    """Hurt the chat; return the screen after its end."""
    terminal, process = chat.terminal, chat.process
    if kind == "terminal closed":
        terminal.close()
        until(lambda: _is_gone(process))
        return ""
    if kind == "SIGSTOP, SIGCONT":
        stop_and_go(process, 1.5)
        terminal.wait_for("answering|● ready", seconds=_SLOW_S)  # it may have been loading
        terminal.type("Escape", shows="■ stopped|● ready")
        time.sleep(1)
        screen = chat.quit()
        assert "code=0" in screen, f"ended with:\n{screen}"
        return screen
    os.kill(process, getattr(signal, kind))
    return terminal.wait_for(r"code=\d+", seconds=60)


def state_of(process: int) -> str:
    """Return a process's state as `ps` prints it: T is stopped, Z a zombie, "" no process."""
    command = ["ps", "-o", "stat=", "-p", str(process)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _is_gone(process: int) -> bool:
    return state_of(process)[:1] in ("", "Z")


def _check_saved(home: Home, prompt: str, early: str, outcome: Outcome) -> None:
    """Compare a screen with the database."""
    now = saved(home)
    if prompt not in now:
        outcome.check(False, f"the prompt is lost; saved: {[*now]}")
        return
    answer, before = letters(now[prompt]), shown_after(early, prompt)
    outcome.check(before in answer, f"of the answer is lost: {before!r} is not in {answer!r}")


def _check_next(home: Home, terminal: Terminal, prompt: str, outcome: Outcome) -> None:
    """Check that a new chat starts and finds the conversation."""
    chat = Chat(home.variables, terminal)
    screen = terminal.screen()
    outcome.check("Ask something" in screen, f"does not start again:\n{screen}")
    outcome.check("damaged" not in screen, f"starts with:\n{screen}")
    if prompt:
        terminal.type("C-o", shows="Conversations")
        terminal.type(f'"{prompt}"')  # a model may have given it another title
        terminal.type("Enter", shows=rf"[▌█] {re.escape(prompt)}")
    screen = chat.quit()
    outcome.check("code=0" in screen, f"ends with:\n{screen}")
