"""The real chat in a real terminal: killed, suspended, closed, and without room to save.

What the screen showed a second before is held against the database: prompts in the transcript were
shown as sent, and of the answer every letter that was on the screen must be kept.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.reliability.faults import _PANIC, Home, Outcome, fill, small_disk, stop_and_go
from tests.support.command import until
from tests.support.terminal import Terminal

MOMENTS = ("while loading", "just after sending", "while answering", "at rest", "choosing a chat")
RAW = "the terminal is not as it was"
_SLOW_S = 180.0  # a model that is loaded on a busy machine


class Chat:
    """A chat in a terminal; `home` is where it keeps things."""

    def __init__(self, home: Home, terminal: Terminal, options: str = "") -> None:
        self.home, self.terminal = home, terminal
        keep = " ".join(f"{name}={shlex.quote(value)}" for name, value in home.variables.items())
        # Greedy: the same answers every time. The shell says how it ended, and without job control
        # leaves a chat that is stopped alone.
        command = f"{keep} {sys.executable} -m akunu_py chat --temperature 0 --max-tokens 150"
        after = f'C=$?; [ "$A" = "$(stty -g)" ] || echo "{RAW}"; echo "code=$C"'
        terminal.type(f"set +m; clear; A=$(stty -g); {command} {options}; {after}", "Enter")

    def ready(self) -> Chat:
        """Itself, when one can type into it, or when it has ended."""
        self.terminal.wait_for(r"Ask something|code=\d", seconds=_SLOW_S)
        return self

    @property
    def process(self) -> int:
        shell = self.terminal.shell()
        found = subprocess.run(["pgrep", "-P", shell], check=True, capture_output=True, text=True)
        return int(found.stdout)

    def send(self, prompt: str) -> None:
        """Types a prompt and waits until it is shown as sent."""
        self.terminal.type(prompt, "Enter")
        until(lambda: prompt in shown(self.terminal.screen()))

    def quit(self) -> str:
        """Ctrl+Q, and what the terminal shows afterwards."""
        self.terminal.type("C-q")
        return self.terminal.wait_for(r"code=\d+", seconds=60)


def shown(screen: str) -> str:
    """What is above the box that one types in."""
    return screen.rpartition("╭")[0]


def letters(text: str) -> str:
    """Letters and digits alone: how a screen wraps and decorates them is its own business."""
    return re.sub(r"[\W_]", "", text)


def shown_after(screen: str, prompt: str) -> str:
    """What the screen shows of the answer to `prompt`; empty once the prompt has scrolled away."""
    after = shown(screen).rpartition(prompt)[2] if prompt in shown(screen) else ""
    return letters(after.partition("…")[0])


@contextmanager
def terminals() -> Iterator[Callable[[], Terminal]]:
    """Makes terminals, and closes them all in the end."""
    made: list[Terminal] = []
    with tempfile.TemporaryDirectory() as directory:

        def make() -> Terminal:
            made.append(Terminal(Path(directory) / f"tmux{len(made)}"))
            return made[-1]

        try:
            yield make
        finally:
            for terminal in made:
                subprocess.run([*terminal._tmux, "kill-server"], check=False, capture_output=True)


def kept(home: Home) -> dict[str, str]:
    """Every prompt in the database, with all that was answered to it."""
    database = sqlite3.connect(f"file:{home.conversations}?mode=ro", uri=True, timeout=10)
    try:
        rows = database.execute(
            "SELECT p.text, coalesce(group_concat(a.text, ' '), '') FROM messages p LEFT JOIN "
            "messages a ON a.parent = p.id AND a.conversation = p.conversation "
            "WHERE p.role = 'user' GROUP BY p.number"
        )
        return dict(rows.fetchall())
    finally:
        database.close()


def hurt(home: Home, kind: str, moment: str, random: Random, number: int) -> Outcome:
    """One chat that is hurt, and one after it that shows what was said."""
    outcome = Outcome(kind, "chat", moment)
    prompt = f"Tell me about walrus {number}."
    with terminals() as make:
        chat = Chat(home, make()).ready()
        seen, early = _bring_to(chat, moment, prompt, random)
        screen = _hurt(chat, kind)
        # Killed, or with its terminal gone, it has no time to tidy up.
        for panic in (*_PANIC, *([] if kind in ("SIGKILL", "SIGHUP") else [RAW])):
            outcome.check(panic not in screen, f"{panic!r} on the screen:\n{screen}")
        outcome.word = ["the terminal is gone", *re.findall(r"akunu: .*|code=\d+", screen)][-1]
        if prompt in shown(seen):
            _check_kept(home, prompt, seen, early, outcome)
            _check_next(home, make(), prompt, outcome)
        else:
            _check_next(home, make(), "", outcome)
    return outcome


def disk_full(directory: Path, starter: Path, ending: str, number: int) -> Outcome:
    """The disk is full in the middle of an answer, and further prompts are sent. `ending`: there is
    room again, or a person quits, or the chat is killed before there is any."""
    outcome = Outcome("disk full", "chat", f"while answering, then {ending}")
    first, second = f"Tell me about walrus {number}.", f"Tell me about whale {number}."
    with small_disk(directory, 24) as disk, terminals() as make:
        home = Home(disk / "home", starter, link=True)
        chat = Chat(home, make(), "--no-answer-cache").ready()
        chat.send(first)
        chat.terminal.wait_for("answering", seconds=_SLOW_S)
        filler = fill(disk)
        screen = chat.terminal.wait_for("not saved for now", seconds=60)
        outcome.word = "not saved for now"
        chat.terminal.type("Escape")
        chat.terminal.wait_for("■ stopped", seconds=60)
        if "room" in ending:
            chat.terminal.type(second, "Enter")
            chat.terminal.wait_for("answering", seconds=_SLOW_S)
            filler.unlink()
            chat.terminal.wait_for("Everything is saved again", seconds=60)
            screen = chat.quit()
            outcome.check("code=0" in screen, f"ended with:\n{screen}")
            outcome.check(second in kept(home), "the second prompt is lost")
        elif "quits" in ending:
            screen = chat.quit()
            outcome.check("code=1" in screen, f"ended with:\n{screen}")
            outcome.check("some messages could not be saved" in screen, f"says:\n{screen}")
        else:
            os.kill(chat.process, signal.SIGKILL)
            chat.terminal.wait_for("code=137", seconds=60)
        outcome.check(first in kept(home), "the first prompt is lost")
        for panic in _PANIC:
            outcome.check(panic not in screen, f"{panic!r} on the screen:\n{screen}")
        filler.unlink(missing_ok=True)
        _check_next(home, make(), first, outcome)
    return outcome


def _bring_to(chat: Chat, moment: str, prompt: str, random: Random) -> tuple[str, str]:
    """The screen at that moment, and the one of more than a second before."""
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
    if moment == "choosing a chat":
        seen = terminal.screen()
        terminal.type("C-o")
        terminal.wait_for("Conversations")
        return seen, seen
    return terminal.screen(), terminal.screen()


def _hurt(chat: Chat, kind: str) -> str:
    """Does it; gives the screen when the chat has ended."""
    terminal, process = chat.terminal, chat.process
    if kind == "terminal closed":
        terminal.close()
        until(lambda: _is_gone(process))
        return ""
    if kind == "SIGSTOP, SIGCONT":
        stop_and_go(process, 1.5)
        if "Conversations" in terminal.screen():
            terminal.type("Escape")
        terminal.wait_for("answering|● ready", seconds=_SLOW_S)  # it may have been loading
        time.sleep(1)  # what is read together with Escape would be another key
        terminal.type("Escape")
        terminal.wait_for("■ stopped|● ready", seconds=60)
        time.sleep(1)
        screen = chat.quit()
        if "code=0" not in screen:
            raise AssertionError(f"ended with:\n{screen}")
        return screen
    os.kill(process, getattr(signal, kind))
    return terminal.wait_for(r"code=\d+", seconds=60)


def _is_gone(process: int) -> bool:
    command = ["ps", "-o", "stat=", "-p", str(process)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return not state or state.startswith("Z")


def _check_kept(home: Home, prompt: str, seen: str, early: str, outcome: Outcome) -> None:
    """Holds the screens against the database."""
    now = kept(home)
    if prompt not in now:
        outcome.check(False, f"the prompt is lost; kept: {[*now]}")
        return
    generated = letters(now[prompt])
    before = shown_after(early, prompt)
    outcome.check(before in generated, f"of the answer is lost: {before!r} is not in {generated!r}")
    latest = shown_after(seen, prompt)
    while latest and latest not in generated:
        latest = latest[:-1]
        outcome.lost += 1


def _check_next(home: Home, terminal: Terminal, prompt: str, outcome: Outcome) -> None:
    """A chat that starts anew finds the conversation."""
    chat = Chat(home, terminal).ready()
    screen = terminal.screen()
    outcome.check("Ask something" in screen, f"does not start again:\n{screen}")
    outcome.check("damaged" not in screen, f"starts with:\n{screen}")
    if prompt:
        terminal.type("C-o")
        terminal.wait_for("Conversations")
        terminal.wait_for(re.escape(prompt), seconds=60)
        terminal.type("Enter")
        terminal.wait_for(rf"▌ {re.escape(prompt)}", seconds=60)
    screen = chat.quit()
    outcome.check("code=0" in screen, f"ends with:\n{screen}")
