"""On a slow line, frames are dropped and not queued; and no frame is needlessly long."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.settings import Settings
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.status import StatusLine
from akunu_py.tui.styles_delta import shorten_styles
from akunu_py.tui.terminal import pin_columns
from akunu_py.tui.workers.chat_client import ModelLoaded, PieceArrived
from akunu_py.types import GenerateOptions
from akunu_py.workarounds import textual_frames
from akunu_py.workarounds.textual_driver import SteadyDriver
from tests.support.tui_chat import STATS, Chat, chat

PING, ANSWER = b"\x1b[?2026$p", b"\x1b[?2026;2$y"
MOST_WRITES = 16  # while a terminal takes nothing: the frames of the first moments


class SlowTerminal:
    """A pseudo-terminal that is read only when the test reads it."""

    def __init__(self) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._master, False)
        self.stream = os.fdopen(self._slave, "w+b", buffering=0)
        self.output = b""

    def read(self) -> bytes:
        """What was written since the last call."""
        new = b""
        while True:
            try:
                new += os.read(self._master, 1 << 16)
            except BlockingIOError:
                break
        self.output += new
        return new

    def fill(self) -> None:
        """Write until the terminal takes no more."""
        os.set_blocking(self._slave, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self._slave, b" " * 1024)
        os.set_blocking(self._slave, True)

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    async def wait_for(self, found: Callable[[], object], *, answer: bool = False) -> None:
        """Reads, and answers each ping if asked to, until `found`."""
        for _ in range(3000):
            new = self.read()
            if answer and new.count(PING):
                self.type(ANSWER * new.count(PING))
            if found():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.output[-2000:])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowTerminal:
    terminal = SlowTerminal()
    text = os.fdopen(os.dup(terminal.stream.fileno()), "w", encoding="utf-8")
    monkeypatch.setattr(textual_frames, "_ANSWER_TIMEOUT_S", 60.0)  # on a busy machine, too
    monkeypatch.setattr(sys, "__stdin__", terminal.stream)
    monkeypatch.setattr(sys, "__stderr__", text)
    for name, value in (("COLUMNS", "80"), ("LINES", "24"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    return terminal


async def run_chat(slow: SlowTerminal, *, pings: bool) -> None:
    """100 pieces of an answer arrive while the terminal takes nothing, or answers no ping; then
    Esc, and the terminal goes on."""
    app = ChatApp(ChatConfig("starter", GenerateOptions(), Settings(theme="dark")))
    running = asyncio.create_task(app.run_async(mouse=False))
    await slow.wait_for(lambda: b"Ask something" in slow.output)
    if pings:
        slow.type(ANSWER)
        app.post_message(ModelLoaded("starter", 8192))
        await slow.wait_for(lambda: PING in slow.output, answer=True)
        await slow.wait_for(lambda: not app._unanswered_pings, answer=True)
    app.post_message(ModelLoaded("starter", 8192))
    app.query_one(PromptBox).insert("go")
    slow.type(b"\r")
    await slow.wait_for(lambda: app.answering.active, answer=pings)
    driver = app._driver
    assert isinstance(driver, SteadyDriver)
    await slow.wait_for(lambda: not driver.is_behind, answer=pings)
    if not pings:
        slow.fill()
    before = driver._writes
    for number in range(100):
        app.post_message(PieceArrived(1, f"word{number}\n\n", (), STATS))
        await asyncio.sleep(0.005)
        if pings:
            slow.read()
    slow.type(b"\x1b")
    while app.query_one(StatusLine).phase != "stopped":
        await asyncio.sleep(0.01)
        if pings:
            slow.read()
    assert driver._writes - before <= MOST_WRITES
    slow.type(ANSWER * app._unanswered_pings)
    await slow.wait_for(
        lambda: b"stopped" in slow.output and b"word99" in slow.output, answer=pings
    )
    app.exit()
    await slow.wait_for(running.done, answer=pings)


async def test_frames_are_dropped_while_the_terminal_takes_nothing(slow: SlowTerminal) -> None:
    await run_chat(slow, pings=False)


async def test_frames_are_dropped_while_the_line_behind_the_terminal_is_slow(
    slow: SlowTerminal,
) -> None:
    await run_chat(slow, pings=True)


STYLES = [
    "", "0", "1", "2", "1;3", "4", "9;31", "38;5;114", "38;2;1;2;3;48;2;4;5;6", "4;38;2;1;2;3",
    "7;97;104", "39;49", "22", "53", "38;2;1;2;3;1",
]  # fmt: skip
PIECES = st.tuples(
    st.sampled_from(STYLES), st.sampled_from(["a", "bc", " ", "\n", "\x1b[3;4H", "é"])
)


def looks(data: str) -> list[tuple[str, tuple[str, ...]]]:
    """Each letter with the codes in force, where the last of each attribute counts."""
    found: list[tuple[str, tuple[str, ...]]] = []
    state: dict[str, str] = {}
    for part in re.split(r"(\x1b\[[\d;]*[mH])", data):
        if part.endswith("H") and part.startswith("\x1b"):
            found.append((part, ()))  # a move has no look
        elif not part.startswith("\x1b"):
            found += [(letter, tuple(sorted(state.values()))) for letter in part]
        else:
            codes = part[2:-1].split(";")
            while codes:
                set_style(state, codes)
    return found


def set_style(state: dict[str, str], codes: list[str]) -> None:
    code = codes.pop(0)
    resets = {"22": "12", "23": "3", "24": "4", "27": "7", "29": "9"}
    if code in ("", "0"):
        state.clear()
    elif code in ("38", "48"):
        count = 4 if codes[0] == "2" else 2
        state[code] = ";".join([code, *codes[:count]])
        del codes[:count]
    elif code in resets:
        for each in resets[code]:
            state.pop(each, None)
    elif len(code) > 1 and code != "53":
        name = "38" if code[0] in "39" else "48"
        state[name] = code
        if code in ("39", "49"):
            del state[name]
    else:
        state[code] = code


async def test_a_frame_that_waits_ends_with_the_app() -> None:
    app = textual_frames.PacedApp[None]()
    async with app.run_test():
        app._is_waiting = app._is_frame_lost = True
        app._begin_batch()
    app._resume()  # the writer's thread may schedule this before the end
    assert not app._is_waiting


@given(st.lists(PIECES, max_size=12))
def test_shorter_styles_look_the_same(pieces: list[tuple[str, str]]) -> None:
    data = "".join(f"\x1b[{style}m{text}\x1b[0m" if style else text for style, text in pieces)
    short = shorten_styles(data)
    assert looks(short) == looks(data)
    assert len(short) <= len(data)


@pytest.mark.parametrize("theme", ["dark", "light"])
async def test_a_frame_with_marks_costs_at_most_twice_a_plain_one(
    theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    words = "Here are some words of an answer that goes on and on, as answers do.\n\n"

    def bytes_of_a_frame(it: Chat) -> int:
        frame: Any = it.app.screen._compositor.render_update(full=True)
        return len(shorten_styles(pin_columns(frame.render_segments(it.app.console))).encode())

    async with chat(settings=Settings(theme=theme, reduced_motion=True)) as it:
        await it.send("go")
        for number in range(12):
            drafted = tuple((place, place + 4) for place in range(5, len(words) - 9, 9))
            rejected = ((20, " wrong"),) if number % 2 else ()
            it.app.post_message(PieceArrived(1, words, drafted, STATS, rejected=rejected))
        await it.post()
        plain = bytes_of_a_frame(it)
        await it.press("f2")
        marked = bytes_of_a_frame(it)
        assert marked <= 2 * plain
