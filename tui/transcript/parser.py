r"""The parser of answers: Markdown of GitHub's kind in which HTML is text and a table is one token.

Mathematics between `\(..\)`, `\[..\]`, `$..$` or `$$..$$` becomes Unicode."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

from akunu_py.tui.transcript.latex import to_unicode

_DELIMITERS = {"\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$"}
_LONGEST = 2000  # characters of one formula
# `$HOME/bin:$PATH` and `$5 to $10` are no mathematics.
_IN_DOLLARS = re.compile(r"\$(?![\s\d]*\$|\s)([^$\n]+?)(?<![\s\\])\$(?!\w)")
_LEAVES = ("paragraph_open", "fence", "code_block", "table")
_PROSE = re.compile(r"[^\W\d_]{2,}\W(.*\W)?[^\W\d_]{2,}")  # and the brackets are escaped ones
_MATHS = re.compile(r"[\\^_={}<>+*|]|^-?\w$|^\w\(\w+\)$")


@dataclass(frozen=True, slots=True)
class TableCells:
    """The inline tokens of a table, and how each column is aligned: left, center or right."""

    header: list[Token]
    rows: list[list[Token]]
    alignment: list[str]


def markdown_parser() -> MarkdownIt:
    """A new parser."""
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.inline.ruler.before("escape", "math", _inline_math)
    parser.block.ruler.before(
        "fence", "math", _block_math, {"alt": ["paragraph", "reference", "blockquote", "list"]}
    )
    parser.core.ruler.push("tables", _join_tables)
    parser.core.ruler.push("gaps", _mark_gaps)
    return parser


def parse(text: str) -> list[Token]:
    """The tokens of a text; none where the parser fails, which those say who draw it."""
    try:
        return markdown_parser().parse(text)
    except Exception:  # noqa: BLE001 - a bug there
        return []


def table_cells(token: Token) -> TableCells:
    """The cells of a token of the type `table`."""
    cells: TableCells = token.meta["cells"]
    return cells


def has_gap(token: Token) -> bool:
    """Whether a block within a list or quote is followed by an empty line."""
    return "gap" in token.meta


def _inline_math(state: StateInline, silent: bool) -> bool:
    opening = state.src[state.pos : state.pos + 2]
    if opening[:1] == "$" and opening != "$$":
        opening = "$"
    closing = _DELIMITERS.get(opening)
    if closing is None:
        return False
    start = state.pos + len(opening)
    end = state.src.find(closing, start, start + _LONGEST)
    if opening == "$":
        found = _IN_DOLLARS.match(state.src, state.pos, state.pos + _LONGEST)
        if found is None or not _MATHS.search(found[1]):
            return False
        end = found.end() - 1
    if end <= start:
        if opening[0] == "$" or end == start:
            return False
        end, closing, text = start, "", opening  # not closed yet: the backslash stays
    else:
        text = state.src[start:end]
        if _PROSE.search(text) and not _MATHS.search(text):
            return False
        text = to_unicode(text)
    if not silent:
        _push_lines(state, text)
    state.pos = end + len(closing)
    return True


def _push_lines(state: StateInline, text: str) -> None:
    for number, line in enumerate(text.split("\n")):
        if number:
            state.push("hardbreak", "br", 0)
        state.push("text", "", 0).content = line


def _block_math(state: StateBlock, first: int, end_line: int, silent: bool) -> bool:
    r"""`\[` or `$$` that begins a line, up to the end of the line that closes it."""
    begin = state.bMarks[first] + state.tShift[first]
    opening = state.src[begin : begin + 2]
    closing = {"\\[": "\\]", "$$": "$$"}.get(opening)
    if closing is None or state.is_code_block(first):
        return False
    lines: list[str] = []
    for line in range(first, end_line):
        text = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()
        text = text[2:] if line == first else text
        if (not text and line > first) or sum(map(len, lines)) > _LONGEST:
            return False
        if closing in text:
            if not text.endswith(closing) or text.count(closing) > 1:
                return False  # in the middle of a paragraph
            lines.append(text[:-2])
            break
        lines.append(text)
    else:
        return False
    if not silent:
        state.line = line + 1
        content = to_unicode("\n".join(lines).strip())
        _push_paragraph(state, content, [first, state.line])
    return True


def _push_paragraph(state: StateBlock, content: str, lines: list[int]) -> None:
    state.push("paragraph_open", "p", 1).map = lines
    inline = state.push("math", "", 0)  # becomes `inline` when the rules of text have run
    inline.content, inline.map, inline.children = content, lines, []
    for number, line in enumerate(content.split("\n")):
        if number:
            inline.children.append(Token("hardbreak", "br", 0))
        inline.children.append(Token("text", "", 0, content=line))
    state.push("paragraph_close", "p", -1)


def _join_tables(state: StateCore) -> None:
    """Makes one token of each table, which needs no widget for a cell."""
    joined: list[Token] = []
    table: list[Token] | None = None
    for token in state.tokens:
        if token.type == "math":
            token.type = "inline"
        if token.type == "table_open":
            table = []
            joined.append(Token("table", "table", 0, map=token.map, level=token.level, block=True))
        elif token.type == "table_close" and table is not None:
            joined[-1].meta = {"cells": _cells(table)}
            table = None
        elif table is not None:
            table.append(token)
        else:
            joined.append(token)
    state.tokens = joined


def _mark_gaps(state: StateCore) -> None:
    """Marks the blocks with `has_gap`: items stand as close together as they were written. The end
    of the whole list or quote is none."""
    lines = state.src.split("\n")
    last: Token | None = None
    for token in state.tokens:
        if token.level and token.map and token.type in _LEAVES:
            after = lines[token.map[1] : token.map[1] + 1]
            last = None
            if after and not after[0].strip("> \t"):
                token.meta["gap"] = True
                last = token
        elif token.level == 0 and token.nesting < 0 and last is not None:
            del last.meta["gap"]
            last = None


def _cells(tokens: list[Token]) -> TableCells:
    header: list[Token] = []
    rows: list[list[Token]] = []
    alignment: list[str] = []
    for opened, token in itertools.pairwise(tokens):
        if opened.type == "tr_open":
            rows.append([])
        if opened.type == "th_open":
            header.append(token)
            style = str(opened.attrGet("style") or "")
            alignment.append(style.removeprefix("text-align:") or "left")
        elif opened.type == "td_open":
            rows[-1].append(token)
    return TableCells(header, [row for row in rows if row], alignment)
