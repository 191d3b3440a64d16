"""Long answers and long conversations: what is far from the reader costs the layout nothing, and is
there again when the reader comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from textual.geometry import Offset
from textual.selection import SELECT_ALL, Selection
from textual.widgets import Markdown

from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.tui.transcript.blocks import BulletList
from akunu_py.tui.transcript.markdown import AnswerMarkdown, MarkdownSection, split_sections
from akunu_py.tui.transcript.view import Transcript
from akunu_py.tui.workers.chat_client import AnswerFinished, PieceArrived
from tests.support.slow import slow
from tests.support.tui_chat import STATS, Chat, chat, until


def conversation(turns: int, answer: Callable[[int], str] = "answer {}".format) -> ConversationTree:
    tree, parent = ConversationTree(), None
    for number in range(turns):
        prompt = ChatMessage("user", f"prompt {number}", parent, id=f"p{number}")
        reply = ChatMessage(
            "assistant", answer(number), prompt.id, finish_reason="stop", id=f"r{number}"
        )
        tree.add(prompt)
        tree.add(reply)
        parent = reply.id
    return tree


def paragraphs(count: int) -> str:
    return "".join(f"Word {number}.\n\n" for number in range(count))


def on_screen(it: Chat) -> str:
    return "\n".join(strip.text for strip in it.app.screen._compositor.render_strips())


def is_quiet(it: Chat) -> bool:
    """Nothing is about to be mounted or unmounted."""
    view = it.transcript
    return not (view._update_pending or view._adjusting or view._mounting.locked())


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        (paragraphs(40), 1),
        (paragraphs(300), 9),
        ("- item\n" * 300, 9),
        ("".join(f"{number}. item\n" for number in range(5, 305)), 9),
        ("1. item\n" * 300, 1),  # cut, the rest would count from 1 again
        ("> " + "quoted\n>\n> " * 300, 1),
        ("```\n" + "code\n\n- code\n" * 300 + "```\n", 1),
        ("| a |\n|---|\n" + "| b |\n" * 300, 1),
        ("- item\n\n  ```\n  - code\n  ```\n" * 100, 3),
    ],
    ids=["short", "paragraphs", "list", "numbers", "ones", "quote", "code", "table", "nested"],
)
def test_answers_are_cut_between_blocks(text: str, sections: int) -> None:
    parts = split_sections(text)
    assert "".join(parts) == text
    assert len(parts) == sections


def test_other_signs_of_a_lines_end_do_not_shift_the_cuts() -> None:
    text = "\n\n".join(f"Paragraph\x0b{number}\u2028of many." for number in range(300))
    parts = split_sections(text)
    assert "".join(parts) == text
    assert all(part.startswith("Paragraph") for part in parts)
    assert len(parts) == 9


@pytest.mark.long
async def test_a_long_answer_is_drawn_where_it_is_seen() -> None:
    async with chat() as it:
        await it.send("go")
        text = paragraphs(300)
        for start in range(0, len(text), 700):
            it.app.post_message(PieceArrived(1, text[start : start + 700], (), STATS))
            await it.pilot.pause()
        await it.post(AnswerFinished(1, "stop", STATS))
        sections = list(it.app.query(MarkdownSection))
        assert "".join(section.text for section in sections) == text
        await until(it.pilot, lambda: sum(each.is_unmounted for each in sections) > 4)
        await until(it.pilot, lambda: is_quiet(it))
        assert not sections[-1].is_unmounted
        assert len(it.app.query("*")) < 300
        assert "Word 299." in on_screen(it)
        heights = [section.size.height for section in sections]
        assert sum(heights) == 2 * 300
        await it.press("tab", "home")
        await until(it.pilot, lambda: "Word 0." in on_screen(it))
        await until(it.pilot, lambda: is_quiet(it) and sections[-1].is_unmounted)
        assert [section.size.height for section in sections] == heights
        await it.press("f7")
        assert it.app.clipboard == text.strip()


@pytest.mark.long
async def test_a_turn_costs_the_layout_the_same_however_long_the_chat_is() -> None:
    counts = []
    for turns in (25, 40):
        async with chat() as it:
            await it.app.library.show(conversation(turns))
            for number in range(2):
                await it.send(f"more {number}")
                await it.answer("yes\n\n" * 5, turn=number + 1)
            await until(it.pilot, lambda it=it: is_quiet(it))  # type: ignore[misc]
            counts.append(len(it.app.query("*")))
            assert len(it.app.conversation.turns) == turns + 2
    assert counts[0] == counts[1] < 250


@pytest.mark.long
async def test_reading_back_does_not_jump() -> None:
    """Every step up shows what stood above, whatever is mounted meanwhile."""
    async with chat() as it:
        await it.app.library.show(conversation(12, lambda number: f"# {number}\n\n{number}a\n"))
        await it.press("tab")
        transcript = it.app.query_one(Transcript)
        transcript.release_anchor()
        before = seen(it)
        for _ in range(40):
            transcript.scroll_relative(y=-5, animate=False)
            await it.pilot.pause()
            await until(it.pilot, lambda: is_quiet(it))
            now = seen(it)
            if transcript.scroll_y == 0:
                assert "prompt 0" in now[0]
                return
            assert now[5:] == before[: len(now) - 5]
            before = now
        raise AssertionError("the beginning was not reached")


def seen(it: Chat) -> list[str]:
    """The lines of the transcript."""
    return [line[:70] for line in on_screen(it).splitlines()[1 : it.transcript.size.height]]


@pytest.mark.long
@pytest.mark.parametrize("height", [50, *slow(24)])  # 50 shows the end of what is mounted too
async def test_a_message_that_was_found_is_shown_wherever_it_is(height: int) -> None:
    async with chat(size=(80, height)) as it:
        await it.app.library.show(conversation(100), "r50")
        await until(it.pilot, lambda: "answer 50" in on_screen(it))
        await until(it.pilot, lambda: is_quiet(it))
        assert "answer 50" in on_screen(it)
        await it.press("tab", "c")
        assert it.app.clipboard == "answer 50", "it is the chosen one"
        await it.press("end")
        await until(it.pilot, lambda: "answer 99" in on_screen(it))
        await it.app.library.show(conversation(100), "p3")
        await until(it.pilot, lambda: "prompt 3 " in on_screen(it))


@pytest.mark.long
async def test_an_old_prompt_is_edited_and_a_new_one_is_asked_from_there() -> None:
    async with chat() as it:
        await it.app.library.show(conversation(60))
        await it.press("tab", "home", "up", *["up"] * 45, "e")
        assert it.text() == "prompt 0"
        await it.press("escape", "pageup")
        await it.send("new")
        assert it.prompts[-1] == "new"
        await until(it.pilot, lambda: is_quiet(it))
        assert "new" in on_screen(it)


@pytest.mark.long
async def test_sections_of_a_list_look_like_one_list() -> None:
    async with chat(size=(80, 40)) as it:
        await it.send("go")
        text = "".join(f"- item {number}\n" for number in range(70))
        for start in range(0, len(text), 297):
            await it.piece(text[start : start + 297])
        await it.post(AnswerFinished(1, "stop", STATS))
        await until(it.pilot, lambda: is_quiet(it))
        shown = [line for line in on_screen(it).splitlines() if "item" in line]
        assert len(shown) > 25
        numbers = [int(line.split()[2]) for line in shown]
        assert numbers == list(range(70 - len(shown), 70))
        lines = on_screen(it).splitlines()
        first = lines.index(shown[0])
        assert lines[first : first + len(shown)] == shown, "no gap at a cut"
        assert len(list(it.app.query(Markdown))) > 1


ANSWER = """\
8. one
9. ```python
   a = [1,

   2]
   ```
   - two

   of [two](http://two)
10. #ten

* three **of** a long line, which is as long as it must be so that it is `wrapped` where words end
  - four

    five
    1. six
* > seven
  > * eight

> quoted
> - more
>   ```
>   code

| a | b |
|---|---|
| 1 | 2 |

- - nine

and `more`
of it
"""


@pytest.mark.long
async def test_an_answer_looks_the_same_wherever_it_was_when_it_was_first_seen() -> None:
    """One that grows behind the screen is drawn from its middle when it comes back."""
    looks = []
    async with chat(size=(80, 60)) as it:
        for cut, step in (
            (len(ANSWER), 1),
            (0, 17),
            (1, 61),
            *((cut, 200) for cut in range(40, 430, 195)),
        ):
            view = AnswerMarkdown(ANSWER[:cut])
            view.styles.height = "auto"
            mounted = it.app.screen.mount(view, before=0)
            if cut % 2:
                await mounted  # else more comes before it is mounted
            for start in range(cut, len(ANSWER), step):
                await view.append(ANSWER[start : start + step])
            await mounted
            await it.pilot.pause()
            looks.append(on_screen(it))
            await view.remove()
    assert "* three" not in looks[0]
    assert all(word in looks[0] for word in ("10. #ten", "▪ eight", "▪ nine", "and more of it"))
    for look in looks[1:]:
        assert look == looks[0]


async def test_a_selected_list_is_copied_without_the_breaks_of_its_lines() -> None:
    text = "- a long item " + "of words " * 30 + "\n  1. nested" + " and wrapped" * 12 + "\n- last"
    async with chat(size=(60, 40)) as it:
        view = AnswerMarkdown(text)
        await it.app.screen.mount(view, before=0)
        await it.pilot.pause()
        block = view.query_one(BulletList)
        words = text.replace("- ", "• ").replace(" \n  1.", "\n   1.")
        lines = str(block.render()).split("\n")
        assert len(lines) > 8
        assert block.get_selection(SELECT_ALL) == (words, "\n")
        for start, end in itertools.combinations(range(0, 300, 37), 2):
            places = [_place(lines, each) for each in (start, end)]
            selected = block.get_selection(Selection(*places))
            assert selected is not None
            assert selected[0].split() == " ".join(_between(lines, *places)).split()


def _place(lines: list[str], characters: int) -> Offset:
    for y, line in enumerate(lines):
        if characters <= len(line):
            return Offset(characters, y)
        characters -= len(line) + 1
    raise AssertionError(characters)


def _between(lines: list[str], start: Offset, end: Offset) -> list[str]:
    if start.y == end.y:
        return [lines[start.y][start.x : end.x]]
    return [lines[start.y][start.x :], *lines[start.y + 1 : end.y], lines[end.y][: end.x]]
