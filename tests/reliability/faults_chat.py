"""The real chat in a real terminal: killed, suspended, closed, and without room to save.

The screen of a second before is compared with the database: prompts in the transcript were shown as
sent, and every letter of the answer that was on the screen must be saved.
"""

import contextlib
import os
import re
import resource
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tests.reliability.faults import Home, Outcome, stop_and_go
from tests.support.command import until
from tests.support.terminal import Terminal

KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP, SIGCONT", "terminal closed")
MOMENTS = ("while loading", "just after sending", "while answering", "at rest")
RAW = "the terminal is not as it was"
_SLOW_S = 180.0  # a model that is loaded on a busy machine


class Chat:
    """A chat in a terminal that keeps its files in `home`."""

    def __init__(self, home: Home, terminal: Terminal, options: str = "") -> None:
        self.home, self.terminal = home, terminal
        keep = " ".join(f"{name}={shlex.quote(value)}" for name, value in home.variables.items())
        # Greedy: the same answers every time. The shell prints the exit code, and without job
        # control leaves a suspended chat alone.
        command = f"{keep} {sys.executable} -m akunu_py chat --temperature 0 --max-tokens 150"
        after = f'C=$?; [ "$A" = "$(stty -g)" ] || echo "{RAW}"; echo "code=$C"'
        terminal.type(f"set +m; clear; A=$(stty -g); {command} {options}; {after}", "Enter")
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
    made: list[Terminal] = []
    with tempfile.TemporaryDirectory() as directory:

        def make() -> Terminal:
            made.append(Terminal(Path(directory) / f"tmux{len(made)}"))
            return made[-1]

        try:
            yield make
        finally:
            for terminal in made:
                terminal.close()


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
        chat = Chat(home, make())
        seen, early = _bring_to(chat, moment, prompt, random)
        screen = _hurt(chat, kind)
        outcome.check_no_panic(screen)
        # A killed chat, or one without its terminal, has no time to tidy up.
        is_restored = RAW not in screen or kind in ("SIGKILL", "SIGHUP")
        outcome.check(is_restored, f"{RAW}:\n{screen}")
        outcome.word = ["the terminal is gone", *re.findall(r"akunu: .*|code=\d+", screen)][-1]
        is_sent = prompt in shown(seen)
        if is_sent:
            _check_saved(home, prompt, seen, early, outcome)
        _check_next(home, make(), prompt if is_sent else "", outcome)
    return outcome


def disk_full(home: Home, is_freed: bool, number: int) -> Outcome:
    """Let no file grow during an answer. The chat quits, or there is room again before."""
    outcome = Outcome("disk full", "chat", "then room again" if is_freed else "then quit")
    first, second = f"Tell me about walrus {number}.", f"Tell me about whale {number}."
    with terminals() as make:
        chat = Chat(home, make(), "--no-answer-cache")
        chat.send(first)
        chat.terminal.wait_for("answering", seconds=_SLOW_S)
        unlimited = resource.prlimit(chat.process, resource.RLIMIT_FSIZE)
        resource.prlimit(chat.process, resource.RLIMIT_FSIZE, (0, unlimited[1]))
        chat.terminal.wait_for("not saved for now", seconds=60)
        outcome.word = "not saved for now"
        chat.terminal.type("Escape")
        chat.terminal.wait_for("■ stopped", seconds=60)
        if is_freed:
            chat.terminal.type(second, "Enter")
            chat.terminal.wait_for("answering", seconds=_SLOW_S)
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
        terminal.type("Escape")
        terminal.wait_for("■ stopped|● ready", seconds=60)
        time.sleep(1)
        screen = chat.quit()
        assert "code=0" in screen, f"ended with:\n{screen}"
        return screen
    os.kill(process, getattr(signal, kind))
    return terminal.wait_for(r"code=\d+", seconds=60)


def _is_gone(process: int) -> bool:
    command = ["ps", "-o", "stat=", "-p", str(process)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return not state or state.startswith("Z")


def _check_saved(home: Home, prompt: str, seen: str, early: str, outcome: Outcome) -> None:
    """Compare the screens with the database."""
    now = saved(home)
    if prompt not in now:
        outcome.check(False, f"the prompt is lost; saved: {[*now]}")
        return
    answer, before = letters(now[prompt]), shown_after(early, prompt)
    outcome.check(before in answer, f"of the answer is lost: {before!r} is not in {answer!r}")
    latest = shown_after(seen, prompt)
    while latest and latest not in answer:
        latest = latest[:-1]
        outcome.lost += 1


def _check_next(home: Home, terminal: Terminal, prompt: str, outcome: Outcome) -> None:
    """Check that a new chat starts and finds the conversation."""
    chat = Chat(home, terminal)
    screen = terminal.screen()
    outcome.check("Ask something" in screen, f"does not start again:\n{screen}")
    outcome.check("damaged" not in screen, f"starts with:\n{screen}")
    if prompt:
        terminal.type("C-o")
        terminal.wait_for("Conversations")
        terminal.wait_for(re.escape(prompt.rstrip(".")), seconds=60)  # its title
        terminal.type("Enter")
        terminal.wait_for(rf"▌ {re.escape(prompt)}", seconds=60)
    screen = chat.quit()
    outcome.check("code=0" in screen, f"ends with:\n{screen}")
