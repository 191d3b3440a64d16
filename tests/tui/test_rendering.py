"""Answers on the screen: code, blocks, tables, mathematics and widths."""

import re
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.content import Content
from textual.style import Style

from akunu_py.settings import Settings
from akunu_py.tui.terminal import pin_columns
from akunu_py.tui.transcript.blocks import draw_table
from akunu_py.tui.transcript.code import CodeBlock, truncate_line, wrap_line
from akunu_py.tui.transcript.markdown import AnswerMarkdown
from akunu_py.tui.transcript.markdown_parser import markdown_parser, to_unicode
from akunu_py.tui.transcript.turn import PromptView
from tests.support.tui_chat import Chat, chat

LINES = st.text(st.sampled_from("ab (,;中é\U0001f469"), max_size=60)


@given(line=LINES, width=st.integers(6, 40), start=st.integers(0, 12).map(lambda step: 8 * step))
def test_a_cut_line_has_a_mark_where_there_is_more(line: str, width: int, start: int) -> None:
    content = Content(line)
    (shown,) = truncate_line(content, width, start, Style())
    assert shown.cell_length <= width
    assert shown.plain.endswith("›") == (content.cell_length > start + width)
    assert shown.plain.startswith("‹") == (start > 0 and content.cell_length > 0)
    if start == 0 and content.cell_length <= width:
        assert shown.plain == line


@given(line=LINES, width=st.integers(6, 40))
def test_a_wrapped_line_is_whole(line: str, width: int) -> None:
    lines = wrap_line(Content(line), width, 0, Style())
    assert all(each.cell_length <= width for each in lines)
    assert lines[0].plain + "".join(each.plain[2:] for each in lines[1:]) == line
    assert all(each.plain.startswith("↪ ") for each in lines[1:])


@pytest.mark.long
@pytest.mark.parametrize("start", ["", "- item\n  "])
async def test_the_end_of_a_growing_code_line_is_shown(start: str) -> None:
    async with chat(size=(80, 24)) as it:
        await it.send("go")
        await it.piece(f"{start}```text\n{start and '  '}{'x' * 100}END")
        assert "xEND" in it.screen
        await it.piece(f"MORE\n{start and '  '}second")
        assert "xEND" not in it.screen
        assert "x›" in it.screen
        await it.piece(" word" * 30 + "LAST")
        assert "wordLAST" in it.screen
        await it.finish()
        await it.rest()
        assert "wordLAST" not in it.screen
        assert "second word" in it.screen


@pytest.mark.long
async def test_long_code_is_seen_whole() -> None:
    async with chat(size=(80, 24)) as it:
        await it.send("go")
        await it.answer(f"```python title\nshort = 1\nlong = {'x' * 100}END\n```\n\n```\nb\n```\n")
        shown = it.screen
        assert "python · 2 lines  " in shown
        assert "x›" in shown
        assert "END" not in shown
        await it.press("tab", *["shift+right"] * 9)
        assert "END" in it.screen
        assert "‹" in it.screen
        assert "python · 2 lines · b copy · w wrap · Shift+←→ scroll" in it.screen
        assert "1 line · b copy " in it.screen
        await it.press("w")
        shown = it.screen
        assert "END" in shown
        assert "↪ " in shown
        assert it.app.query(CodeBlock).first().size.height == 4, "the lines that are wrapped count"
        await it.press("w", "b")
        assert it.app.clipboard.endswith("END\n")
        await it.click_on("b copy", which=1)
        assert it.app.clipboard == "b\n"
        await it.click_on("w wrap")
        assert "w unwrap" in it.screen


@pytest.mark.long
async def test_json_is_shown_and_copied_as_a_code_block(it: Chat) -> None:
    await it.send("/json")
    await it.send("go")
    await it.piece('{"a": ')
    assert it.app.query_one(CodeBlock).lexer == "json", "while it grows, too"
    await it.answer("1}")
    assert "json · 1 line" in it.screen
    await it.press("f8")
    assert it.app.clipboard == '{"a": 1}'


async def test_text_code_and_prompt_box_have_one_axis_on_a_wide_screen() -> None:
    async with chat(size=(160, 50)) as it:
        await it.send("go")
        await it.answer("Text.\n\n```python\nx = 1\n```\n")
        prompt = it.app.query_one(PromptView).region
        box = it.box.region
        assert (prompt.x, prompt.right) == (box.x, box.right) == (29, 129)
        assert it.app.query_one(CodeBlock).region.x == prompt.x + 2


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


@pytest.mark.long
@settings(max_examples=50)
@given(table=tables(), width=st.integers(4, 160))
def test_every_word_is_shown_and_no_line_is_too_long(
    table: tuple[list[list[Content]], list[str]], width: int
) -> None:
    (header, *rows), alignment = table
    lines = [line.plain for line in draw_table(header, rows, alignment, width, Style())]
    assert max(map(cell_len, lines)) <= max(width, 2)
    if any("│" in line for line in lines):  # a table, not a list
        shown = [line.split("│") for line in lines if "─" not in line]
        columns = zip(*table[0], strict=True)
        room = width - sum(3 + max(cell_len(cell.plain) for cell in column) for column in columns)
        assert room < 0 or len(shown) == len(table[0]), "no cell is wrapped where there is room"
        for place in range(len(header)):
            text = "".join(each[place] for each in shown)
            expected = "".join(row[place].plain for row in [header, *rows])
            assert "".join(text.split()) == "".join(expected.split())


HEADS = [f"column{number}" for number in range(8)]
WIDE = (
    f"| {' | '.join(HEADS)} |\n|{'--:|' * 8}\n"
    + f"| {' | '.join(['1111111111'] * 8)} |\n" * 3
)  # fmt: skip


NESTED = f"""\
1. A table:

   {WIDE.replace(chr(10), chr(10) + "   ")}
   and

   text.
2. ```python
   a = 1
   ```
   - deeper

> A quote:
> ```sh
> b
> ```
>
> {WIDE.replace(chr(10), chr(10) + "> ")}

The end.
"""


@pytest.mark.long
async def test_tables_and_code_in_lists_and_quotes_keep_their_gaps_and_are_whole() -> None:
    async with chat(size=(170, 60), settings=Settings(theme="dark")) as it:
        await it.send("go")
        await it.answer(NESTED)
        shown = [line.strip().rstrip("│ ") for line in it.screen.splitlines()]
    assert "\n".join(shown).count("1111111111") == 48
    place = shown.index("1. A table:")
    heads = [at for at, line in enumerate(shown) if "column7" in line]
    assert (shown[place + 1], heads[0]) == ("", place + 2)
    # The header, a rule, three rows; what is written after it.
    assert shown[place + 7 : place + 11] == ["", "and", "", "text."]
    assert "python · 1 line" in shown[place + 11], "no row where none was written"
    assert shown[place + 13 : place + 15] == ["• deeper", ""]
    assert shown[heads[1] + 5 : heads[1] + 7] == ["", "The end."]


def shown(text: str) -> str:
    """What the parser makes of a text, a line for each break."""
    children = (child for token in markdown_parser().parse(text) for child in token.children or [])
    return "".join("\n" if child.type == "hardbreak" else child.content for child in children)


@pytest.mark.parametrize(("tex", "text"), [
    ("a^2 + b_{10}", "a² + b₁₀"),
    (r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}", "x = (-b ± √(b²-4ac))/(2a)"),
    (r"\sum_{i=1}^{n} i = \frac{n(n+1)}{2}", "∑ᵢ₌₁ⁿ i = n(n+1)/2"),
    (r"\frac12 \tfrac{dy}{dx}", "½ dy/dx"),
    (r"f\colon A\to B", r"f\colon A → B"),
    (r"\forall{x}\in\mathbb{R}: x\le y\implies x\neq z", "∀x ∈ ℝ: x ≤ y ⟹ x ≠ z"),
    (r"\lim_{n\to\infty} \log n", "lim_(n → ∞) log n"),
    (r"\left(\text{if } x\right)", "(if x)"),
    (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", "a = b\nc = d"),
    (
        r"\begin{bmatrix} 1 & 20 \\ 3 & 4 \end{bmatrix} x"
        r" = \begin{pmatrix} a \\ b \\ c \end{pmatrix}",
        "[1 20; 3 4] x = (a; b; c)",
    ),
    (r"\{x\} 5\% \$3", "{x} 5% $3"),
    (r"\sqrt[3]{x}", "∛x"),
])  # fmt: skip
def test_the_common_part(tex: str, text: str) -> None:
    assert to_unicode(tex).replace("\u00a0", " ") == text


def test_incomplete_tex_stays_as_it_is() -> None:
    for tex in ("{a", "a}", "a^", "\\", r"\begin{foo} x", r"\frac{a}", "{" * 50):
        assert to_unicode(tex) == tex


def test_other_text_is_not_mathematics() -> None:
    for text in (
        "from $5 to $10", "echo $HOME/bin:$PATH", "$A and $B", "open \\(a^2 and no end",
        "open \\[a^2 and no end", "a $ b $ c",
    ):  # fmt: skip
        assert shown(text) == text


def test_delimiters() -> None:
    assert shown(r"so \(a^2\), $b^2$, $$c^2$$ and \[d^2\].") == "so a², b², c² and d²."
    assert shown("so\n\\[\na^2\n- b\n\\]\nend") == "a² - b".join(["so", "end"])
    assert shown("$$\nx_1\n$$") == "x₁"
    assert shown("so\n\\begin{equation}\na^2\n\\end{equation}\nend") == "soa²end"
    assert shown("\\begin{align*}\na &= b \\\\\nc &= d\n\\end{align*}") == "a = b\nc = d"
    assert shown("\\begin{itemize}\na\n\\end{itemize}").startswith("\\begin{itemize}")
    assert shown(r"so $\begin{aligned} a \\ b \end{aligned}$ is") == "so \na\nb\n is"
    assert shown(r"\[not a link\] and \*") == "[not a link] and *"
    assert shown("`\\(a^2\\)`") == "\\(a^2\\)", "in code nothing is changed"


CLUSTERS = [
    *("👩\u200d👩\u200d👧\u200d👦", "❤\ufe0f", "👍🏽", "🇩🇪", "1\ufe0f\u20e3", "☺", "☰", "Ⅷ", "中"),
    *("สวัสดี", "น้ำ", "ที่นี่", "हिन्दी", "தமிழ்", "\u1100\u1161\u11a8", "a\u0301", "\u00ad", "\u200d."),
]
CLUSTERED = st.lists(st.sampled_from([*CLUSTERS, "word", " ", "│", "中文", "é"]), max_size=12).map(
    "".join
)
# A letter that no cluster has, after each text: it is where Textual laid it out, or it is not.
MARKS = "abcdefgh"
_TOKEN = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[[0-9;]*m|(.)", re.DOTALL)


class Terminal:
    """One that measures each code point with `width`, and overwrites what it writes on."""

    def __init__(self, width: Callable[[str], int]) -> None:
        self.width = width
        self.cells: dict[tuple[int, int], str] = {}

    def write(self, data: str) -> None:
        row = column = 1
        for to_row, to_column, letter in _TOKEN.findall(data):
            if to_row:
                row, column = int(to_row), int(to_column)
            elif letter:
                for place in range(self.width(letter)):
                    self.cells[row, column + place] = letter if not place else ""
                column += self.width(letter)


def agreed(letter: str) -> int | None:
    """Return the width of a letter that `pin_columns` does not change, or None if it does."""
    data = f"\x1b[1;1H{letter}"
    return cell_len(letter) if pin_columns(data) == data else None


@given(
    texts=st.lists(CLUSTERED, min_size=1, max_size=8),
    widths=st.dictionaries(st.characters(), st.integers(0, 2)),
    rest=st.integers(0, 2),
    styled=st.booleans(),
)
def test_text_after_a_cluster_is_in_its_column(
    texts: list[str], widths: dict[str, int], rest: int, styled: bool
) -> None:
    """Whatever the widths of everything but plain letters are."""

    def width(letter: str) -> int:
        plain = agreed(letter)
        return widths.get(letter, rest) if plain is None else plain

    style = "\x1b[1;31m" if styled else ""
    line = "".join(f"{text}{style}<{mark}>" for text, mark in zip(texts, MARKS, strict=False))
    terminal = Terminal(width)
    terminal.write(pin_columns(f"\x1b[3;5H{line}\x1b[4;1Hend"))
    column = 5
    for text, mark in zip(texts, MARKS, strict=False):
        column += cell_len(text)
        shown = "".join(terminal.cells.get((3, column + place), "?") for place in range(3))
        assert shown == f"<{mark}>"
        column += 3
    assert terminal.cells[4, 1] == "e"


def test_unpinned_characters_have_one_width_everywhere() -> None:
    """Every character that is left alone measures the same by the rule of glibc (wide and full
    width: two columns; marks: none) as where the screen is laid out."""
    left_alone = 0
    for code in (*range(0x20, 0x7F), *range(0xA0, 0x4E00), *range(0xE000, 0x30000, 5)):
        letter = chr(code)
        data = f"\x1b[1;1H{letter}"
        category = unicodedata.category(letter)
        if category in ("Cn", "Zl", "Zp") or pin_columns(data) != data:
            continue
        wide = unicodedata.east_asian_width(letter) in "WF"
        expected = 0 if category in ("Mn", "Me", "Cf") else 2 if wide else 1
        assert cell_len(letter) == expected, hex(code)
        left_alone += 1
    assert left_alone > 20_000


async def test_tasks_have_a_box_in_place_of_a_bullet(it: Chat) -> None:
    await it.talk("go", "- [ ] open\n- [x] done\n- other\n")
    await it.rest()
    assert all(line in it.screen for line in ("  ☐ open", "  ☑ done", "• other"))
    assert "• ☐" not in it.screen


@pytest.mark.long
async def test_much_text_is_drawn_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    append = AnswerMarkdown.append

    async def counted(self: AnswerMarkdown, text: str) -> None:
        drawn.append(len(text))
        await append(self, text)

    monkeypatch.setattr(AnswerMarkdown, "append", counted)
    monkeypatch.setattr("akunu_py.tui.transcript.turn._MAX_DRAWN", 200)
    async with chat() as it:
        await it.talk("go", "some words\n\n" * 40)
        assert (sum(drawn), max(drawn)) == (480, 200)
