"""/find in the open chat: every hit is reached and marked, wherever it is; and words and lines are
selected by clicks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from markdown_it.token import Token
from textual.widget import Widget

from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.tui import app
from akunu_py.tui.prompt.attachments import Attachment, join_files
from akunu_py.tui.transcript.find import ShownHit, hits_in, plain_text
from akunu_py.tui.transcript.markdown_parser import parse
from tests.support.tui_chat import Chat, at_rest, chat, until

ANSWER = """\
A **queue** is a *line*; see `Queue` and [the queue](http://q).

- first queue
- second

  ```py
  queue = []  # Queue
  ```

> a quoted queue

| queue | b |
|-------|---|
| 1     | queue |

# A QUEUE heading
"""
HITS = 10


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "clipboard_command", lambda: None)
    for limit in ("_SHORTEST_S", "_LONGEST_S"):  # A slow machine still sees the message.
        monkeypatch.setattr(f"akunu_py.tui.status.{limit}", 600.0)


def tree_of(pairs: list[tuple[str, str]]) -> ConversationTree:
    tree, parent = ConversationTree(), None
    for prompt_text, text in pairs:
        prompt = ChatMessage("user", prompt_text, parent)
        reply = ChatMessage("assistant", text, prompt.id, finish_reason="stop")
        tree.add(prompt)
        tree.add(reply)
        parent = reply.id
    return tree


@pytest.fixture(autouse=True)
def _sixteen_colors(_true_color: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colors have names in the terminal's own theme."""
    monkeypatch.setenv("COLORTERM", "")
    monkeypatch.setenv("TERM", "xterm")


def colored(it: Chat, color: str) -> list[str]:
    """The texts on the screen with a background color."""
    found = []
    for strip in it.app.screen._compositor.render_strips():
        for text, style, _ in strip:
            if style and style.bgcolor and style.bgcolor.name == color:
                found.append(text)
    return found


async def found(it: Chat, what: str) -> None:
    await until(it.pilot, lambda: it.notifications and what in it.notifications[0])
    await at_rest(it.pilot)


async def test_every_hit_is_marked_and_reached_in_order() -> None:
    assert plain_text(ANSWER).lower().count("queue") == HITS
    async with chat(size=(80, 60)) as it:
        await it.app.library.show(tree_of([("Which queue?", ANSWER), ("no", "nothing")]))
        await it.send("/find queue")
        await found(it, f"Found {HITS + 1} of {HITS + 1}: queue")
        assert colored(it, "bright_cyan") == ["QUEUE"]
        assert len(colored(it, "yellow")) == HITS
        for number in range(1, HITS + 2):
            await it.press("n")
            await found(it, f"Found {number} of")
            (current,) = colored(it, "bright_cyan")
            assert current.lower() == "queue"
        await it.press("N")
        await found(it, f"Found {HITS} of")
        assert colored(it, "bright_cyan") == ["queue"]
        await it.press("escape")
        await at_rest(it.pilot)
        assert not colored(it, "yellow")
        assert not colored(it, "bright_cyan")
        assert it.app.focused is it.box


async def test_a_hit_far_away_is_scrolled_to() -> None:
    """In turns and sections that are not mounted, in a folded prompt, across a line's end."""
    long = "\n\n".join(f"paragraph {number}" for number in range(100))
    pairs = [(f"prompt {number}", f"answer {number}") for number in range(20)]
    pairs[1] = ("x\n" * 200 + "a needle in the prompt", "yes")
    pairs[3] = ("where?", long.replace("paragraph 17\n", "another needle\n"))
    pairs[5] = ("and?", "word " * 14 + "this needle\nis " + "word " * 30)
    async with chat() as it:
        await it.app.library.show(tree_of(pairs))
        await it.send("/find NEEDLE")
        for number, text in ((3, "this needle"), (1, "a needle in"), (2, "another needle")):
            await found(it, f"Found {number} of 3")
            assert text in it.screen_text()
            assert colored(it, "bright_cyan") == ["needle"]
            await it.press("n")
        await it.press("escape")
        await it.send("/find needle is  word")
        await found(it, "Found 1 of 1")
        assert "".join(colored(it, "bright_cyan")).split() == ["needle", "is", "word"]


async def test_steps_parse_no_answer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def count(text: str) -> list[Token]:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr("akunu_py.tui.transcript.find.parse", count)
    answers = [(f"prompt {number}", f"needle {number}\n\nend") for number in range(3)]
    async with chat() as it:
        await it.app.library.show(tree_of(answers))
        await it.send("/find needle")
        for rounds in range(2):
            for number in (3, 1, 2):
                await found(it, f"Found {number} of 3")
                await it.press("n")
            assert parsed if rounds == 0 else not parsed
            parsed.clear()


@pytest.mark.parametrize("lines", [12, 400])
async def test_a_hit_in_a_pasted_text_is_reached(lines: int) -> None:
    text = "".join(f"line {number}\n" for number in range(lines)) + "the needle\n"
    label = f"[pasted {lines + 1} lines]"
    prompt = join_files(
        f"A needle? {label} A needle!", [Attachment(label, len(text), text, is_paste=True)]
    )
    async with chat() as it:
        await it.app.library.show(tree_of([(prompt, "yes")]))
        await it.send("/find needle")
        await found(it, "Found 3 of 3")
        for number, line in ((1, "A needle?"), (2, "the needle"), (3, "A needle!")):
            await it.press("n")
            await found(it, f"Found {number} of 3")
            (current,) = colored(it, "bright_cyan")
            shown = it.screen_text().splitlines()
            assert (current, any(line in each for each in shown)) == ("needle", True)
        await it.press("escape")
        await it.send("/find pasted")
        await found(it, "Not found in this chat: pasted")


async def test_escape_ends_a_search_that_still_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that is not laid out yet is not marked after the search ended."""
    looked: list[Widget] = []
    laid_out: list[bool] = []

    def late(view: Widget, pattern: re.Pattern[str]) -> Iterator[ShownHit]:
        looked.append(view)
        return hits_in(view, pattern) if laid_out else iter(())

    monkeypatch.setattr("akunu_py.tui.transcript.view.hits_in", late)
    async with chat() as it:
        await it.app.library.show(tree_of([("where is the needle?", "here")]))
        await it.send("/find needle")
        await until(it.pilot, lambda: looked)
        await it.press("escape")
        laid_out.append(True)
        await at_rest(it.pilot)
        assert not [each for each in it.app.workers if each.group == "find"]
        assert not colored(it, "bright_cyan")
        assert it.app.focused is it.box


async def test_what_is_not_found_says_so_and_dialogs_are_not_marked() -> None:
    async with chat() as it:
        await it.app.library.show(tree_of([("ready settings", "ready")]))
        await it.app.run_action("find_next(1)")
        await until(it.pilot, lambda: it.notifications)
        assert it.notifications == ["Nothing to find yet; /find TEXT looks in this chat."]
        await it.send("/find needle")
        await found(it, "Not found in this chat: needle")
        assert it.app.focused is it.box
        await it.send("/find ready")
        await found(it, "Found 2 of 2")
        assert colored(it, "yellow") == ["ready"], "not in the status line, nor in the message"
        await it.press("f1")
        await at_rest(it.pilot)
        assert not colored(it, "yellow")
        await it.press("escape", "slash")
        assert it.text() == "/find "


async def test_a_double_click_selects_a_word_and_a_triple_click_a_line() -> None:
    answer = "Der schöne Wörter-Salat (ja).\n\n```py\nfirst = 1\nsecond = first\n```\n"
    async with chat(size=(60, 24)) as it:
        await it.app.library.show(tree_of([("one two\nthree", answer + "\n- a list item\n")]))
        await at_rest(it.pilot)
        for at, times, selected in (
            ("schöne", 2, "schöne"),
            ("Salat", 2, "Salat"),
            ("Salat", 3, "Der schöne Wörter-Salat (ja)."),
            ("(ja", 2, "("),
            ("two", 2, "two"),
            ("three", 3, "three"),
            ("= first", 3, "second = first"),
            ("list", 2, "list"),
        ):
            lines = it.screen_text().splitlines()
            row = next(row for row, line in enumerate(lines) if at in line)
            offset = lines[row].index(at), row
            await it.pilot.click(offset=offset, times=times)
            await it.pilot.pause()
            assert it.app.screen.get_selected_text() == selected
            await it.press("ctrl+c")
            assert it.app.clipboard == selected
            it.app.screen.clear_selection()
