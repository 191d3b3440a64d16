"""Terminals: pastes are text, and text from files and models is displayed, not obeyed."""

import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from textual import events
from textual._xterm_parser import XTermParser

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.cli import main
from akunu_py.models.store.names import NameEntry, save_entry
from akunu_py.text import displayable, on_one_line, typeable
from akunu_py.tui.terminal import ChatDriver, background
from akunu_py.tui.workers.chat_client import AnswerFailed, ModelLoaded
from akunu_py.workarounds.textual_driver import PasteParser
from tests.reliability.fuzz import explore, lengths
from tests.support.chats import exchange_of
from tests.support.command import pseudo_terminal
from tests.support.tui_chat import chat

CLEAR = "\x1b[2J"
CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
EVIL = f"a{CLEAR}b{CLIPBOARD}c\x9b31md\x7f\x08\r\u202e\u2066\udc80"


def is_safe(text: str) -> bool:
    """Whether a terminal shows the text in its order and obeys none of it."""
    return not any(
        (ord(letter) < 0x20 and letter not in "\n\t") or 0x7F <= ord(letter) < 0xA0
        or 0xD800 <= ord(letter) < 0xE000 or letter in "\u202a\u202b\u202c\u202d\u202e"
        or letter in "\u2066\u2067\u2068\u2069" for letter in text
    )  # fmt: skip


def test_displayed_text_is_safe_and_as_long() -> None:
    for code in (*range(0x2100), *range(0xD800, 0xE000)):
        text = f"a{chr(code)}b"
        assert is_safe(displayable(text))
        assert is_safe(typeable(text))
        assert len(displayable(text)) == len(on_one_line(text)) == len(text)
        assert displayable(displayable(text)) == displayable(text)
        assert len(on_one_line(text).splitlines()) == 1
        assert "\t" not in on_one_line(text)


@pytest.fixture
def hostile_home(own_directories: None, tmp_path: Path) -> None:
    """A store and conversations in which every text is EVIL."""
    home = tmp_path / "data" / "akunu"
    model = home / "models" / "good-name"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    evil = EVIL.encode("utf-8", "replace").decode()
    save_entry("good-name", NameEntry(source=evil, quantization=evil, license=evil))
    (home / "models" / f"bad{CLEAR}\udc80").mkdir()
    store = ConversationStore.open(home / "conversations.db")
    store.save_tree(exchange_of("evil", evil, evil, 1e9))
    store.close()


COMMANDS = [
    ["models", "list"], ["models", "show", "good-name"], ["models", "show", EVIL],
    ["models", "gc", "--dry-run"], ["models", "import", f"/nowhere/{EVIL}"],
    ["models", "pull", EVIL], ["chats", "list"], ["chats", "search", "a"],
    ["chats", "export", "evil"], ["chats", "rm", "--yes", "evil"], ["run", "--model", EVIL, "hi"],
    ["bench", "replay", f"/nowhere/{EVIL}"], ["info"],
]  # fmt: skip


@pytest.mark.usefixtures("hostile_home")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_commands_print_hostile_names_safely(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command) in (0, 1, 2)
    out, err = capfd.readouterr()
    assert is_safe(out)
    assert is_safe(err)
    assert out or err


@pytest.mark.long
async def test_the_chat_displays_control_characters() -> None:
    """Names, reasons and errors come from model directories; answers from the model."""
    evil = EVIL.replace("\udc80", "")
    async with chat(loaded=False, size=(100, 40)) as here:
        await here.post(ModelLoaded(evil, 8192, evil, evil))
        assert is_safe(here.screen)
        await here.send(f"Hello {evil}")
        await here.piece(evil)
        await here.finish()
        assert is_safe(here.screen)
        await here.send("More")
        await here.post(AnswerFailed(2, evil))
        screen = here.screen
        assert is_safe(screen)
        assert "␛[2J" in screen
        here.app.view.prompt.extend_history([evil])
        await here.press("ctrl+r")
        assert is_safe(here.screen)


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


@lengths(20)
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


@lengths(20)
def test_keys_outside_of_pastes_are_parsed_as_by_textual(examples: int) -> None:
    def check(drawn: tuple[str, list[int]]) -> None:
        sent, places = drawn
        plain = messages(XTermParser(), [sent])
        assert messages(PasteParser(), cut(sent, places)) == plain

    # Textual ignores Alt+Enter.
    sent = _text.filter(lambda text: "200~" not in text and "\x1b\r" not in text)
    explore(check, examples, st.tuples(sent, st.lists(st.integers(0, 10_000), max_size=6)))


@pytest.mark.long
def test_a_large_paste_takes_linear_time() -> None:
    """Character by character it would take minutes."""
    text = "x\x1b" * 500_000
    parser = PasteParser()
    chunks = [_START, *cut(text, range(0, len(text), 4096)), _END]
    assert messages(parser, chunks) == [("paste", "x" * 500_000)]


def test_keys_typed_while_the_terminal_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatDriver, "typed_ahead", b"")
    monkeypatch.setattr("akunu_py.tui.terminal._ANSWER_TIMEOUT_S", 60.0)
    reply = b"a\x1b]11;rgb:ffff/ffff/ffff\x1b\\b\x1b[?62;4c"
    with pseudo_terminal() as (leader, follower):
        monkeypatch.setattr(os, "open", lambda *_: os.dup(follower))
        answering = threading.Thread(target=lambda: os.read(leader, 99) and os.write(leader, reply))
        answering.start()
        assert background({"TERM": "xterm"}) == "light"
        answering.join()
    assert ChatDriver.typed_ahead == b"ab"


@pytest.mark.parametrize(
    "data", [b"a\xffb", b"\xed\xa0\x80", b"\x1b[200~\xff\xfe\x1b[31m\x1b[201~"]
)
def test_invalid_utf8_is_ignored(data: bytes) -> None:
    driver: Any = ChatDriver.__new__(ChatDriver)
    driver._debug, driver.exit_event = False, threading.Event()
    driver._app = None  # no error is reported to it
    got: list[object] = []

    def take(message: object) -> None:
        got.append(message)
        if getattr(message, "key", "") == "z":
            driver.exit_event.set()

    driver.process_message = take
    with pseudo_terminal() as (leader, driver.fileno):
        os.write(leader, data + b"z\r")
        driver._run_input_thread()
    assert len(got) >= 2
