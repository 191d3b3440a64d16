"""Blocks of code: every column of every line can be seen, and what is cut has a mark."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.content import Content
from textual.style import Style

from akunu_py.tui import app
from akunu_py.tui.transcript.code import CodeBlock, truncate_line, wrap_line
from tests.support.tui_chat import chat

LINES = st.text(st.sampled_from("ab (,;中é\U0001f469"), max_size=60)


@settings(max_examples=28, deadline=None)
@given(line=LINES, width=st.integers(6, 40), start=st.integers(0, 12).map(lambda step: 8 * step))
def test_a_cut_line_has_a_mark_where_there_is_more(line: str, width: int, start: int) -> None:
    content = Content(line)
    (shown,) = truncate_line(content, width, start, Style())
    assert shown.cell_length <= width
    assert shown.plain.endswith("›") == (content.cell_length > start + width)
    assert shown.plain.startswith("‹") == (start > 0 and content.cell_length > 0)
    if start == 0 and content.cell_length <= width:
        assert shown.plain == line


@settings(max_examples=28, deadline=None)
@given(line=LINES, width=st.integers(6, 40))
def test_a_wrapped_line_is_whole(line: str, width: int) -> None:
    lines = wrap_line(Content(line), width, 0, Style())
    assert all(each.cell_length <= width for each in lines)
    assert lines[0].plain + "".join(each.plain[2:] for each in lines[1:]) == line
    assert all(each.plain.startswith("↪ ") for each in lines[1:])


@pytest.mark.long
async def test_long_code_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "clipboard_command", lambda: None)
    async with chat(size=(80, 24)) as it:
        await it.send("go")
        await it.answer(f"```python title\nshort = 1\nlong = {'x' * 100}END\n```\n\n```\nb\n```\n")
        shown = it.screen_text()
        assert "python · 2 lines  " in shown
        assert "copy" not in shown.partition("╭")[0], "the keys of the chosen message"
        assert "x›" in shown
        assert "END" not in shown
        await it.press("tab", *["shift+right"] * 9)
        assert "END" in it.screen_text()
        assert "‹" in it.screen_text()
        assert "python · 2 lines · b copy · w wrap · Shift+←→ scroll" in it.screen_text()
        assert "1 line · b copy " in it.screen_text()
        await it.press("w")
        shown = it.screen_text()
        assert "END" in shown
        assert "↪ " in shown
        assert "w unwrap" in shown
        assert it.app.query(CodeBlock).first().size.height == 4, "the lines that are wrapped count"
        await it.press("w", "b")
        assert it.app.clipboard.endswith("END\n")
        it.app.copy_to_clipboard("")
        await it.click_on("b copy")
        assert it.app.clipboard.endswith("END\n")
        await it.click_on("b copy", which=1)
        assert it.app.clipboard == "b\n"
        await it.click_on("w wrap")
        assert "w unwrap" in it.screen_text()


@pytest.mark.long
async def test_a_block_that_is_copied_in_mid_stream_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "clipboard_command", lambda: None)
    async with chat() as it:
        await it.send("go")
        await it.piece("```python\na = 1\n")
        await it.press("f8")
        assert it.app.clipboard == "a = 1\n"
        assert "so far" in it.notifications[-1]
        await it.piece("```\nThat is all.")
        await it.press("f8")
        assert "so far" not in it.notifications[-1], "it is whole, though the answer is not"


async def test_json_is_shown_and_copied_as_a_code_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "clipboard_command", lambda: None)
    async with chat() as it:
        await it.send("/json")
        await it.send("go")
        await it.piece('{"a": ')
        assert it.app.query_one(CodeBlock).lexer == "json", "while it grows, too"
        await it.answer("1}")
        assert "json · 1 line" in it.screen_text()
        await it.press("f8")
        assert it.app.clipboard == '{"a": 1}'
        await it.app.view.show_conversation()
        assert len(it.app.query(CodeBlock)) == 1
