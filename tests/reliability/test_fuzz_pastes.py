"""What a terminal sends: all of a bracketed paste is text, however it is cut into reads."""

from __future__ import annotations

import itertools
import os
import pty
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from textual import events
from textual._xterm_parser import XTermParser

from akunu_py.text import typeable
from akunu_py.tui.terminal import ChatDriver, background
from akunu_py.workarounds.textual_driver import PasteParser
from tests.reliability.fuzz import explore, lengths

_START, _END = "\x1b[200~", "\x1b[201~"
_SEQUENCES = [
    *("\x1b", "\x1b\x1b", "\x1b[", "\x1b[A", "\x1b[2", "\x1b[20", "\x1b[200", "\x1b[200~"),
    *("\x1b[201", "\x1bOP", "\x1b[I", "\x1b[<0;1;1M", "\x1b]52;c;eA==\x07", "\x1b[1;5D"),
    *("\x1b[13u", "\r", "\n", "\t", "\x11", "\x03", "\x7f", "\x9b", "[201~", "200~", "é", "a\nb"),
]
_text = st.lists(st.sampled_from(_SEQUENCES) | st.text(max_size=6), max_size=8).map("".join)
_pasted = _text.filter(lambda text: _END not in text + _END[:-1])
_typed = st.lists(st.sampled_from(["a", "é", "\r", "\x1b[A", "\x11", "\x1bOP"]), max_size=4)


def messages(parser: XTermParser, chunks: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for chunk in chunks:
        for message in parser.feed(chunk):
            if isinstance(message, events.Paste):
                found.append(("paste", message.text))
            elif isinstance(message, events.Key):
                found.append(("key", message.key))
            else:
                found.append(("other", type(message).__name__))
    return found


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[one:two] for one, two in itertools.pairwise(ends)]


@lengths(200)
def test_a_paste_is_text_and_nothing_else(examples: int) -> None:
    def check(drawn: tuple[list[str], str, list[str], str, list[int]]) -> None:
        before, pasted, between, again, places = drawn
        sent = "".join([*before, _START, pasted, _END, *between, _START, again, _END, "z"])
        expected = messages(XTermParser(), before)
        expected += [("paste", typeable(pasted))]
        expected += messages(XTermParser(), between)
        expected += [("paste", typeable(again)), ("key", "z")]
        assert messages(PasteParser(), cut(sent, places)) == expected

    places = st.lists(st.integers(0, 10_000), max_size=12)
    explore(check, examples, st.tuples(_typed, _pasted, _typed, _pasted, places))


@lengths(100)
def test_outside_of_pastes_it_is_textuals_parser(examples: int) -> None:
    def check(drawn: tuple[str, list[int]]) -> None:
        sent, places = drawn
        plain = messages(XTermParser(), [sent])
        assert messages(PasteParser(), cut(sent, places)) == plain

    sent = _text.filter(lambda text: "200~" not in text)
    explore(check, examples, st.tuples(sent, st.lists(st.integers(0, 10_000), max_size=6)))


def test_a_large_paste_is_read_once() -> None:
    """Character by character it would take minutes."""
    text = "x\x1b" * 500_000
    parser = PasteParser()
    chunks = [_START, *cut(text, range(0, len(text), 4096)), _END]
    assert messages(parser, chunks) == [("paste", "x" * 500_000)]


def test_keys_typed_while_the_terminal_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    monkeypatch.setattr(ChatDriver, "typed_ahead", b"")
    monkeypatch.setattr(os, "open", lambda *_: os.dup(follower))
    reply = b"a\x1b]11;rgb:ffff/ffff/ffff\x1b\\b\x1b[?62;4c"
    answering = threading.Thread(target=lambda: os.read(leader, 99) and os.write(leader, reply))
    answering.start()
    assert background({"TERM": "xterm"}) == "light"
    answering.join()
    assert ChatDriver.typed_ahead == b"ab"
    os.close(leader)
    os.close(follower)


def read_with(process: Callable[[object], None], data: bytes) -> list[Exception]:
    """Read input in the chat's driver, until "z"; return what ended it."""
    leader, follower = pty.openpty()
    driver: Any = ChatDriver.__new__(ChatDriver)
    driver._debug, driver.fileno, driver.exit_event = False, follower, threading.Event()
    failed: list[Exception] = []
    driver._app = SimpleNamespace(
        call_later=lambda _, error: failed.append(error), _handle_exception=None
    )

    def take(message: object) -> None:
        if getattr(message, "key", "") == "z":
            driver.exit_event.set()
        process(message)

    driver.process_message = take
    os.write(leader, data + b"z\r")
    driver._run_input_thread()
    os.close(leader)
    os.close(follower)
    return failed


@pytest.mark.parametrize(
    "data", [b"a\xffb", b"\xed\xa0\x80", b"\x1b[200~\xff\xfe\x1b[31m\x1b[201~"]
)
def test_bytes_that_are_no_text_end_nothing(data: bytes) -> None:
    got: list[object] = []
    assert read_with(got.append, data) == []
    assert len(got) >= 2


def test_a_bug_in_the_input_thread_is_reported_as_any_other() -> None:
    error = ValueError("a bug")

    def fail(message: object) -> None:
        raise error

    assert read_with(fail, b"a") == [error]
