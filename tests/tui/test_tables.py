"""Tables of answers: nothing is left out, whatever the room is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.content import Content
from textual.style import Style

from akunu_py.settings import Settings
from akunu_py.tui.transcript.blocks import column_widths, draw_table, natural_widths
from akunu_py.tui.transcript.markdown_parser import markdown_parser
from tests.support.tui_chat import chat, until

WORDS = st.lists(
    st.sampled_from(["a", "word", "1111", "中文字", "seventeen-letters", "é"]), max_size=9
)
CELLS = WORDS.map(" ".join)


@st.composite
def tables(drawer: st.DrawFn) -> tuple[list[list[Content]], list[str]]:
    """Rows of as many cells as there are alignments, the first one the header."""
    alignment = drawer(
        st.lists(st.sampled_from(["left", "center", "right"]), min_size=1, max_size=8)
    )
    row = st.lists(CELLS.map(Content), min_size=len(alignment), max_size=len(alignment))
    return drawer(st.lists(row, min_size=2, max_size=4)), alignment


def columns(line: str) -> list[str]:
    return line.split("│")


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(table=tables(), width=st.integers(4, 160))
def test_every_word_is_there_and_no_line_is_too_long(
    table: tuple[list[list[Content]], list[str]], width: int
) -> None:
    (header, *rows), alignment = table
    lines = [line.plain for line in draw_table(header, rows, alignment, width, Style())]
    assert max(map(cell_len, lines)) <= max(width, 2)
    if any("│" in line for line in lines):  # a table, not a list
        shown = [columns(line) for line in lines if "─" not in line]
        for place in range(len(header)):
            text = "".join(each[place] for each in shown)
            expected = "".join(row[place].plain for row in [header, *rows])
            assert "".join(text.split()) == "".join(expected.split())


@settings(max_examples=28, deadline=None)
@given(
    wanted=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=9),
    room=st.integers(9, 200),
)
def test_columns_share_the_room(wanted: list[tuple[int, int]], room: int) -> None:
    natural = [max(pair) for pair in wanted]
    words = [min(pair) for pair in wanted]
    widths = column_widths(natural, words, room)
    assert sum(widths) <= max(room, len(natural))
    assert all(width <= most for width, most in zip(widths, natural, strict=True))
    if sum(natural) <= room:
        assert widths == natural
    elif sum(words) <= room:
        assert sum(widths) == room, "all the room is used"
        assert all(width >= least for width, least in zip(widths, words, strict=True))
        fair = room // len(natural)
        assert all(w == n for w, n in zip(widths, natural, strict=True) if n <= fair - max(words))


def test_cells_are_aligned_as_the_table_says() -> None:
    text = "| l | c | r |\n|:--|:-:|--:|\n| a | b | c |\n| long one | long one | long one |\n"
    cells = markdown_parser().parse(text)[0].meta["cells"]
    assert cells.alignment == ["left", "center", "right"]
    rows = [[Content(cell.content) for cell in row] for row in [cells.header, *cells.rows]]
    lines = draw_table(rows[0], rows[1:], cells.alignment, 80, Style())
    assert lines[2].plain == "a        │    b     │        c"
    assert natural_widths(rows) == ([8, 8, 8], [4, 4, 4])


HEADS = [f"column{number}" for number in range(8)]
WIDE = (
    f"| {' | '.join(HEADS)} |\n|{'--:|' * 8}\n"
    + f"| {' | '.join(['1111111111'] * 8)} |\n" * 3
)  # fmt: skip


@pytest.mark.long
async def test_a_wide_table_takes_the_free_columns_and_grows() -> None:
    async with chat(size=(160, 40)) as it:
        await it.send("go")
        await it.piece(WIDE)
        await it.piece("| more | of | it |  |  |  |  |  |\n\nand `text`")
        await until(it.pilot, lambda: "and text" in it.screen_text())
        shown = it.screen_text()
        assert shown.count("1111111111") == 24
        row = next(line for line in shown.splitlines() if "1111111111" in line)
        assert len(row.strip()) > 100, "wider than the measure of text"
        assert "more │" in shown


NESTED = """\
1. A table:

   {table}
   and

   text.
2. ```python
   a = 1
   ```
   - deeper
     ```
     {long}
     ```

> A quote:
> ```sh
> b
> ```
>
> {quoted}

The end.
"""


@pytest.mark.long
async def test_tables_and_code_in_lists_and_quotes_are_as_elsewhere() -> None:
    """As wide as they need, whole, and as close to each other as they were written."""
    table = WIDE.replace("\n", "\n   ")
    text = NESTED.format(table=table, long="x" * 110, quoted=WIDE.replace("\n", "\n> "))
    async with chat(size=(170, 60), settings=Settings(theme="dark")) as it:
        await it.send("go")
        await it.answer(text)
        shown = [line.strip().rstrip("│ ") for line in it.screen_text().splitlines()]
    assert "\n".join(shown).count("1111111111") == 48
    assert "x" * 110 in "\n".join(shown)
    place = shown.index("1. A table:")
    assert shown[place + 1] == "", "as it was written"
    heads = [at for at, line in enumerate(shown) if "column7" in line]
    assert heads[0] == place + 2
    # The header, a rule, three rows; what is written after it.
    assert shown[place + 7 : place + 11] == ["", "and", "", "text."]
    assert "python · 1 line" in shown[place + 11], "no row where none was written"
    assert shown[place + 13] == "• deeper"
    assert shown[place + 16] == "", "one row after the list"
    assert "A quote:" in shown[place + 17]
    assert "sh · 1 line" in shown[place + 18]
    assert heads[1] == place + 21
    assert shown[heads[1] + 5 : heads[1] + 7] == ["", "The end."]
