"""The blocks of an answer: one empty line between them, and boxes for tasks."""

from __future__ import annotations

import re

import pytest

from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.turn import PromptView
from tests.support.tui_chat import at_rest, chat

BLOCKS = [
    "# One",
    "## Two",
    "### Three",
    "text of a paragraph",
    "- a list\n- of two",
    "1. numbered\n2. twice",
    "> a quote",
    "```python\ncode = 1\n```",
    "| table | x |\n|---|---|\n| a | b |",
    "---",
    "$$\nx^2\n$$",
]


@pytest.mark.long
async def test_one_empty_line_between_any_two_blocks() -> None:
    pairs = [block for one in BLOCKS for other in BLOCKS for block in (one, other)]
    async with chat(size=(80, 1000)) as it:
        await it.send("go")
        await it.answer("\n\n".join([*pairs, "END"]))
        await at_rest(it.pilot)
        rows = [line.strip() for line in it.screen_text().splitlines()]
        shown = rows[rows.index("One") if "One" in rows else 0 : rows.index("END") + 1]
        assert len(shown) > 300
        places = [at for at in range(1, len(shown)) if not shown[at] and not shown[at - 1]]
        assert not [shown[at - 2 : at + 2] for at in places]


async def test_tasks_have_boxes() -> None:
    async with chat() as it:
        await it.send("go")
        await it.answer("- [ ] to do\n- [x] done\n\n1. [X] first\n\n[ ] text\n")
        lines = [line.strip() for line in it.screen_text().splitlines()]
        assert [re.sub(r"\W", "", line) for line in lines if "☐" in line] == ["todo"]
        assert [re.sub(r"\W", "", line) for line in lines if "☑" in line] == ["done", "1first"]
        assert "[ ] text" in lines


async def test_text_code_and_prompt_box_have_one_axis_on_a_wide_screen() -> None:
    async with chat(size=(160, 50)) as it:
        await it.send("go")
        await it.answer("Text.\n\n```python\nx = 1\n```\n")
        prompt = it.app.query_one(PromptView).region
        box = it.box.region
        assert (prompt.x, prompt.right) == (box.x, box.right) == (29, 129)
        assert it.app.query_one(CodeBlock).region.x == prompt.x + 2
        title = it.screen_text().splitlines()[0]
        assert title.index("go") == prompt.x + 2, "the title of the chat"
        await it.pilot.resize_terminal(80, 24)
        await at_rest(it.pilot)
        assert it.box.region.width == 78


@pytest.mark.parametrize(("width", "columns"), [(100, 1), (160, 2)])
async def test_the_help_has_two_columns_where_there_is_room(width: int, columns: int) -> None:
    async with chat(size=(width, 50)) as it:
        await it.press("f1")
        await at_rest(it.pilot)
        assert len({each.region.x for each in it.app.screen.query(".heading")}) == columns
