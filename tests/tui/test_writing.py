"""Writing a prompt: keys in their order, pasted texts, the editor, and the mouse."""

from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.widgets import Input

from akunu_py.tui.prompt.box import PastedTexts
from akunu_py.tui.screens.help import HelpScreen
from akunu_py.tui.screens.lists import HistoryScreen
from akunu_py.tui.screens.main import describe_privacy
from akunu_py.tui.screens.model_picker import ModelsScreen
from akunu_py.tui.terminal import edit_text, find_editor
from akunu_py.tui.workers.chat_client import AnswerFailed
from akunu_py.workarounds.textual_driver import PasteParser
from tests.support.terminal import terminal as terminal  # a fixture
from tests.support.tui_chat import Chat, chat

LONG = "\n".join(f"line {number}" for number in range(5000))
CHIP = "[pasted 5,000 lines]"


async def paste(it: Chat, text: str) -> None:
    it.app.post_message(events.Paste(text))
    await it.pilot.pause()


# Keys


async def burst(it: Chat, data: str) -> None:
    """Receive bytes at once, as from a terminal; return when they have taken effect."""
    parser = PasteParser()
    for message in [*parser.feed(data), *parser.tick()]:
        it.app.post_message(message)
    await it.pilot.pause()
    await it.until(lambda: not it.app._waiting and it.app._settling is None)
    await it.pilot.pause()


@pytest.mark.long
async def test_keys_after_a_change_of_focus_reach_the_new_widget(it: Chat) -> None:
    late = "\x1b]11;rgb:1c1c/1c1c/1c1c\x1b\\\x1b[?62;22c"  # an answer of a slow terminal
    await burst(it, f"o{late}nf\x7fe\rwo\x01t\r\x12on")
    assert isinstance(it.app.screen, HistoryScreen)
    assert (it.app.screen.query_one(Input).value, it.text()) == ("on", "")
    await burst(it, "\x1b[B\r more")
    assert it.text() == "one more"
    it.box.clear()
    await burst(it, "\x1bOP\x1b[27uhello\x1b[27u\r")  # the second Esc takes "two" back
    assert [turn.prompt.text for turn in it.app.conversation.turns] == ["one", "two\n\nhello"]


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
PERSIAN = "می\u200cخواهم"


async def test_enter_sends_other_keys_break_the_line_and_joiners_stay(it: Chat) -> None:
    for typed, text in (("a\x1b\rb", "a\nb"), *((each, each) for each in (PERSIAN, FAMILY))):
        await burst(it, typed)
        assert it.text() == text
        it.box.clear()
    await it.press("a", "ctrl+j", "b", "shift+enter", "c")
    assert it.text() == "a\nb\nc"
    await it.press("enter", "enter", "space", "enter")
    assert it.prompts == ["a\nb\nc"], "an empty prompt is not sent"


@pytest.mark.long
async def test_earlier_prompts_are_browsed_and_searched(it: Chat) -> None:
    await it.press("ctrl+r")
    assert "no earlier" in it.notifications[-1]
    await it.talk("first", "1", "second", "2")
    for key, text in (
        ("up", "second"), ("up", "first"), ("up", "first"), ("down", "second"), ("down", ""),
    ):  # fmt: skip
        await it.press(key)
        assert it.text() == text
    await it.press(*"mine", "up")
    assert it.text() == "mine", "typed text is not lost"
    it.box.extend_history(["a red fox", "a blue\nwhale"])
    for words in ("whale blue", "nothing"):
        await it.press("ctrl+r", *words, "enter")
        assert it.text() == "a blue\nwhale"


@pytest.mark.long
async def test_the_box_grows_to_eight_rows_and_shows_the_cursor_at_any_size() -> None:
    async with chat(size=(90, 30)) as it:
        for lines, height in ((1, 1), (3, 3), (100, 8)):
            it.box.text = "\n".join("x" * lines)
            await it.pilot.pause()
            assert it.box.size.height == height
        it.box.clear()
        await it.press(*"a", *["ctrl+j"] * 12, *"b")
        for rows in (30, 12, 8, 6, 5):
            await it.resize(20, rows)
            visible = it.box.content_region.intersection(it.app.screen.region)
            assert visible.contains_point(it.box.cursor_screen_offset)
            assert it.box.region.bottom == it.status.region.y == rows - 1
            assert str(it.box.border_title) == "starter", "there is no title row"


# Pasted texts


async def test_a_paste_has_no_control_characters_and_is_sent_whole_if_it_is_folded(
    it: Chat,
) -> None:
    await paste(it, "one\r\ntwo\x1b[2J\rthree\x07\ttab\x00")
    assert it.text() == "one\ntwo[2J\nthree\ttab"
    it.box.clear()
    await paste(it, LONG)
    assert it.text() == CHIP
    assert "pasted text, about 12,222 tokens" in str(it.box.border_title)
    unsent = it.app.turns.unsent_text
    it.box.clear()
    it.box.write(it.box.prompt_of(unsent))
    assert it.text() == CHIP
    it.box.count_tokens = AsyncMock(return_value=38_967)
    it.box.use_model(8192)
    await it.until_shown("pasted text, 38,967 tokens · too long for 8k of context")
    it.box.use_model(38_968)
    await it.until_shown("pasted text, 38,967 tokens ─")
    await it.press("tab")
    assert it.text() == LONG, "Tab unfolds it"
    it.box.clear()
    it.box.insert("Look: ")
    await paste(it, LONG)
    await it.press("enter")
    assert it.history[-1].content == (
        f"Look: {CHIP}\n\nPasted text: {CHIP} ({len(LONG)} bytes)\n```\n{LONG}\n```"
    )


@pytest.mark.long
async def test_a_paste_stays_a_chip_when_it_is_edited_recalled_and_copied(it: Chat) -> None:
    await paste(it, LONG)
    await it.send(" Which line is odd?")
    (shown,) = it.prompts
    assert shown.startswith(f"{CHIP} Which line is odd?\n… {len(LONG) - len(CHIP):,} more")
    assert it.app.conversation.tree.title == "Which line is odd?"
    await it.post(AnswerFailed(1, "the prompt has 12,000 tokens; shorten the prompt"))
    assert it.text() == f"{CHIP} Which line is odd?"
    assert it.box.full_text == f"{LONG} Which line is odd?"
    await it.press("enter")
    await it.answer("None.")
    await it.press("f6")
    assert it.text() == f"{CHIP} Which line is odd?"
    await paste(it, LONG.replace("line", "row"))
    assert it.text().endswith("[pasted 5,000 lines #2]")
    await it.press("escape", "tab", "up", "c")
    assert it.app.clipboard == f"{LONG} Which line is odd?"
    await it.press("enter")
    assert it.prompts[0].startswith("line 0\nline 1\n")
    await it.press("escape", "up", "up")  # before it is the edited prompt
    assert it.text() == f"{CHIP} Which line is odd?"


@given(st.lists(st.text("ab\n[]", max_size=6).map(lambda text: text * 9), max_size=6))
def test_unfolding_restores_all_folded_texts(texts: list[str]) -> None:
    pasted = PastedTexts()
    pasted.LINES, pasted.CHARACTERS = 2, 20
    shown = " and ".join(pasted.fold(text) for text in texts)
    assert pasted.unfold(shown) == " and ".join(texts)


def test_a_folded_paste_counts_lines_and_is_measured_once() -> None:
    for lines, end in ((13, ""), (13, "\n"), (5000, "\n")):
        text = "\n".join(["word"] * lines) + end
        assert PastedTexts().fold(text) == f"[pasted {lines:,} lines]"
    pasted = PastedTexts()
    label = pasted.label("é\n" * 5000)
    (first,), (second,) = (pasted.in_prompt(f"{label} {word}") for word in ("a", "ab"))
    assert first is second, "not after each key"
    assert first.size == 15_000
    assert pasted.unfold(label) == "é\n" * 5000


# The editor, the mouse and the welcome


async def test_the_editor_gets_the_text() -> None:
    change = ["sh", "-c", 'printf "more\\r\\n\\033" >> "$0"']
    assert await edit_text("some ", change) == "some more\n"
    assert await edit_text("some ", ["sh", "-c", "exit 1"]) == "some "
    with pytest.raises(OSError, match="no-such-editor"):
        await edit_text("", ["no-such-editor"])
    for visual, plain, command in (("", "", ["vi"]), ("code -w", "ed", ["code", "-w"])):
        assert find_editor({"VISUAL": visual, "EDITOR": plain}) == command


def test_the_welcome_says_where_prompts_go() -> None:
    for server in ("", "http://127.0.0.1:8012"):
        assert describe_privacy(server) == "Everything stays on this machine."
    url = "http://10.99.99.1:9001"
    assert describe_privacy(url) == f"Prompts and attached files go to {url}."


@pytest.mark.long
async def test_the_hints_on_borders_can_be_clicked() -> None:
    async with chat(size=(100, 30)) as it:
        await it.click_on("F1 keys")
        assert isinstance(it.app.screen, HelpScreen)
        await it.click_on("Esc close")
        assert len(it.app.screen_stack) == 1
        await it.click_on("F4 models")
        await it.pilot.click("#dialog", offset=(9, 1))
        assert isinstance(it.app.screen, ModelsScreen), "a click inside keeps it open"
        await it.pilot.click(offset=(1, 1))
        await it.pilot.pause()
        assert len(it.app.screen_stack) == 1, "a click outside closes it"
        it.box.insert("hello")
        await it.click_on("Enter send")
        assert it.prompts == ["hello"]
        await it.piece("1")
        await it.click_on("Esc stop")
        assert it.phase() == "stopped"


async def test_tab_writes_a_question_to_try_into_an_empty_box(it: Chat) -> None:
    questions = []
    for _ in range(4):
        await it.press("tab")
        questions.append(it.text())
    assert len(set(questions)) == 3
    assert questions[3] == questions[0]
    await it.press("x", "tab")
    assert it.text() == f"{questions[0]}x"
