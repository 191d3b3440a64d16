"""Writing a prompt: names of files, pasted texts, queued prompts, the editor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.screen import Screen
from textual.widget import Widget

from akunu_py.tui import app
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.attachments import attach, join_files, split_files
from akunu_py.tui.prompt.box import MentionedFiles, PastedTexts
from akunu_py.tui.prompt.suggestions import Suggester, SuggestionPopup
from akunu_py.tui.screens.dialog import Dialog
from akunu_py.tui.screens.help import HelpScreen
from akunu_py.tui.screens.main import describe_privacy
from akunu_py.tui.screens.model_picker import ModelsScreen
from akunu_py.tui.terminal import edit_text, find_editor
from akunu_py.tui.workers.chat_client import AnswerFailed
from akunu_py.types import GenerateOptions
from akunu_py.workarounds.textual_driver import PasteParser
from tests.support.tui_chat import Chat, chat, until

LONG = "\n".join(f"line {number}" for number in range(5000))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "notes.md").write_text("word " * 800)
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    return tmp_path


def styles(it: Chat) -> dict[str, bool]:
    """What is marked in the first line of the box, and whether as found."""
    line = it.box.get_line(0)
    found = it.box.get_component_rich_style("prompt--file", partial=True)
    return {line.plain[span.start : span.end]: span.style == found for span in line.spans}


async def test_names_are_marked_counted_and_directories_listed(directory: Path) -> None:
    async with chat(directory=directory) as it:
        it.box.insert("see @notes.md, @none.txt and @src/ says @john")
        await until(it.pilot, lambda: it.box._files.tokens)
        assert styles(it) == {"@notes.md,": True, "@none.txt": False, "@src/": True}
        assert str(it.box.border_title) == "starter · 2 files, about 1,002 tokens"
        it.box.clear()
        await until(it.pilot, lambda: str(it.box.border_title) == "starter")
    (listing,) = attach("what is in @src?", directory, 8192)
    assert (listing.name, listing.text) == ("src/", "a.py  6 B\n")
    assert split_files(join_files("what?", [listing]))[1] == [listing]


@pytest.mark.long
async def test_a_long_paste_is_folded_and_sent_whole(directory: Path) -> None:
    async with chat(directory=directory) as it:
        it.app.post_message(events.Paste(LONG))
        await it.pilot.pause()
        assert it.text() == "[pasted 5,000 lines]"
        assert "pasted text, about 12,222 tokens" in str(it.box.border_title)
        kept = it.app.ui_state.unsent_text
        it.box.clear()
        it.box.write(it.box.prompt_of(kept))
        assert it.text() == "[pasted 5,000 lines]"
        await it.press("tab")
        assert it.text() == LONG, "Tab unfolds it"
        it.box.clear()
        it.box.insert("Look: ")
        it.app.post_message(events.Paste(LONG))
        await it.pilot.pause()
        await it.press("enter")
        size = len(LONG)
        assert it.history[-1].content == (
            f"Look: [pasted 5,000 lines]\n\nPasted text: [pasted 5,000 lines] ({size} bytes)\n"
            f"```\n{LONG}\n```"
        )


async def test_a_paste_stays_a_chip_beside_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the sent message, its title, when it is edited, taken back, recalled and copied."""
    monkeypatch.setattr(app, "clipboard_command", lambda: None)
    chip = "[pasted 5,000 lines]"
    async with chat() as it:
        it.app.post_message(events.Paste(LONG))
        await it.pilot.pause()
        await it.send(" Which line is odd?")
        (shown,) = it.prompts
        assert shown.startswith(f"{chip} Which line is odd?\n… {len(LONG) - len(chip):,} more")
        assert it.app.conversation.tree.title == "Which line is odd?"
        await it.post(AnswerFailed(1, "the prompt has 12,000 tokens; shorten the prompt"))
        assert it.text() == f"{chip} Which line is odd?"
        assert it.box.full_text == f"{LONG} Which line is odd?"
        await it.press("enter")
        await it.answer("None.", turn=2)
        await it.press("f6")
        assert it.text() == f"{chip} Which line is odd?"
        it.app.post_message(events.Paste(LONG.replace("line", "row")))
        await it.pilot.pause()
        assert it.text().endswith("[pasted 5,000 lines #2]")
        await it.press("escape", "tab", "up", "c")
        assert it.app.clipboard == f"{LONG} Which line is odd?"
        await it.press("enter")
        assert it.prompts[0].startswith("line 0\nline 1\n")
        await it.press("escape", "up")
        assert it.text() == f"{chip} Which line is odd?"


@given(st.lists(st.text("ab\n[]", max_size=6).map(lambda text: text * 9), max_size=6))
def test_what_is_folded_is_unfolded(texts: list[str]) -> None:
    """Whatever is pasted, however often, and whatever is around it."""
    pasted = PastedTexts()
    pasted.LINES, pasted.CHARACTERS = 2, 20
    shown = " and ".join(pasted.fold(text) for text in texts)
    assert pasted.unfold(shown) == " and ".join(texts)


async def test_escape_takes_back_queued_prompts_before_it_stops_the_answer() -> None:
    async with chat() as it:
        for prompt in ("one", "two", "three"):
            await it.send(prompt)
        await it.piece("1")
        await it.press("escape")
        assert (it.text(), it.prompts, it.phase()) == ("three", ["one", "two"], "answering")
        await it.press("escape")
        assert (it.text(), it.prompts) == ("two\n\nthree", ["one"])
        assert it.phase() == "answering"
        await it.press("escape")
        assert (it.phase(), it.markdown) == ("stopped", ["1"])


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("a\x1b\rb", "a\nb"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        (
            "\U0001f468\u200d\U0001f469\u200d\U0001f467",
            "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        ),
    ],
)
async def test_what_terminals_send_is_typed_as_it_is(typed: str, text: str) -> None:
    """Alt+Enter is a new line; joiners stay."""
    async with chat() as it:
        parser = PasteParser()
        for message in [*parser.feed(typed), *parser.tick()]:
            it.app.post_message(message)
        await it.pilot.pause()
        await until(it.pilot, lambda: not it.app.has_pending_input)
        await it.pilot.pause()
        assert it.text() == text


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("", "Everything stays on this machine."),
        ("http://127.0.0.1:8012", "Everything stays on this machine."),
        ("http://10.99.99.1:9001", "Prompts and attached files go to http://10.99.99.1:9001."),
    ],
)
def test_the_welcome_says_where_prompts_go(server: str, says: str) -> None:
    assert describe_privacy(server) == says
    session: Any = object()
    config = ChatConfig("starter", GenerateOptions(), session=session, server=server)
    offers_download = ChatApp(config).view._offer_better
    assert offers_download == (not server), "a server answers with its own models"


@pytest.mark.parametrize(("lines", "end"), [(13, ""), (13, "\n"), (5000, "\n")])
def test_a_folded_paste_counts_its_lines(lines: int, end: str) -> None:
    text = "\n".join(["word"] * lines) + end
    assert PastedTexts().fold(text) == f"[pasted {lines:,} lines]"


async def test_up_takes_back_what_waits(directory: Path) -> None:
    async with chat(directory=directory) as it:
        for prompt in ("one", "two", "three"):
            await it.send(prompt)
        await it.piece("1")
        await it.press("up")
        assert (it.text(), it.prompts) == ("three", ["one", "two"])
        it.box.clear()
        await it.press("up")
        assert (it.text(), it.prompts, it.phase()) == ("two", ["one"], "answering")
        it.box.clear()
        await it.press("up")
        assert it.text() == "three", "then the earlier prompts"


async def test_commands_are_found_by_what_they_do(directory: Path) -> None:
    found = Suggester(directory).suggest("/color")
    assert found is not None
    assert [each.insert for each in found.suggestions] == ["/theme"]
    async with chat(directory=directory) as it:
        popup = it.app.query_one(SuggestionPopup)
        await it.press("slash", *"colo")
        assert str(popup.border_subtitle).startswith("Enter runs it · Tab inserts it")
        await it.press("backspace", "backspace", "backspace", "backspace", *"temp")
        assert str(popup.border_subtitle).startswith("Enter or Tab inserts it")


async def test_the_editor_gets_the_text() -> None:
    change = ["sh", "-c", 'printf "more\\r\\n\\033" >> "$0"']
    assert await edit_text("some ", change) == "some more\n"
    assert await edit_text("some ", ["sh", "-c", "exit 1"]) == "some "
    with pytest.raises(OSError, match="no-such-editor"):
        await edit_text("", ["no-such-editor"])
    for visual, plain, command in (("", "", ["vi"]), ("code -w", "ed", ["code", "-w"])):
        assert find_editor({"VISUAL": visual, "EDITOR": plain}) == command


def test_a_name_is_no_word_where_it_looks_like_a_file(directory: Path) -> None:
    named = MentionedFiles(directory, {}).look_up(["notes.md", "x"])
    assert dict(named.tokens) == {"notes.md": 1000}
    assert named.spans("@notes.md @x @y.z") == [(0, 9, True), (13, 17, False)]


@pytest.mark.long
async def test_what_the_keys_do_the_mouse_does_too(directory: Path) -> None:
    async with chat(directory=directory, size=(100, 30)) as it:

        async def click(widget: Widget, words: str) -> None:
            """On words in the lower border of a widget."""
            frame = widget.region
            strip = it.app.screen._compositor.render_strips()[frame.bottom - 1]
            line = "".join(segment.text for segment in strip)
            await it.pilot.click(offset=(line.index(words) + 1, frame.bottom - 1))
            await it.pilot.pause()

        for words, screen in (
            ("F1 keys", HelpScreen), ("F4 models", ModelsScreen),
        ):  # fmt: skip
            await click(it.box, words)
            assert isinstance(it.app.screen, screen)
            await click(it.app.screen.query_one("#dialog"), "Esc close")
            assert not isinstance(it.app.screen, screen)
            await click(it.box, words)
            await it.pilot.click("#dialog", offset=(9, 1))
            assert isinstance(it.app.screen, screen), "a click inside leaves it"
            await it.pilot.click(offset=(1, 1))
            await it.pilot.pause()
            assert not isinstance(it.app.screen, screen), "a click outside closes it"
        it.box.insert("hello")
        await click(it.box, "Enter send")
        assert it.prompts == ["hello"]
        await it.piece("1")
        await click(it.box, "Esc stop")
        assert it.phase() == "stopped"


@pytest.mark.long
async def test_a_dialog_is_never_seen_as_on_a_screen_of_another_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 80x24 it hides what is behind it, in its first picture too."""
    seen: list[frozenset[str]] = []
    display = ChatApp._display

    def note(app: ChatApp, screen: Screen[object], *shown: Any) -> None:
        if isinstance(screen, Dialog):
            seen.append(screen.classes & {"-low", "-high", "-narrow", "-normal"})
        display(app, screen, *shown)

    async with chat(size=(80, 24)) as it:
        monkeypatch.setattr(ChatApp, "_display", note)
        for key in ("f1", "f4", "ctrl+s"):
            await it.press(key)
            await until(it.pilot, lambda: seen)
            await it.press("escape")
    assert set(seen) == {frozenset({"-high", "-normal"})}


def test_a_paste_is_measured_once_and_not_after_each_key() -> None:
    pasted = PastedTexts()
    label = pasted.label("é\n" * 5000)
    (first,), (second,) = (pasted.in_prompt(f"{label} {word}") for word in ("a", "ab"))
    assert first is second
    assert first.size == 15_000
    assert pasted.unfold(label) == "é\n" * 5000
