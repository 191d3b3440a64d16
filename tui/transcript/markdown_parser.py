r"""Parser for answers: GitHub Markdown with HTML as text and one token per table.

Math between `\(..\)`, `\[..\]`, `$..$`, `$$..$$` or `\begin{..}` and `\end{..}` becomes Unicode."""

import itertools
import re
import tomllib
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

_DELIMITERS = {"\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$"}
_MAX_FORMULA = 2000  # characters of one formula
_BEGIN = re.compile(r"\\begin\{([a-zA-Z]+)\*?\}")
_TASK = re.compile(r"\[([ xX])\](?=\s)")
# `$HOME/bin:$PATH` and `$5 to $10` are not math.
_IN_DOLLARS = re.compile(r"\$(?![\s\d]*\$|\s)([^$\n]+?)(?<![\s\\])\$(?!\w)")
_LEAVES = ("paragraph_open", "fence", "code_block", "table")
_PROSE = re.compile(r"[^\W\d_]{2}\W(?:.*\W)?[^\W\d_]{2}")  # text between escaped brackets
_MATH = re.compile(r"[\\^_={}<>+*|]|^-?\w$|^\w\(\w+\)$")


class TableCells(NamedTuple):
    """The inline tokens of a table."""

    rows: list[list[Token]]  # header row first; all rows have the same length
    alignment: list[str]  # per column: left, center or right


def markdown_parser() -> MarkdownIt:
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.inline.ruler.before("escape", "math", _inline_math)
    parser.block.ruler.before(
        "fence", "math", _block_math, {"alt": ["paragraph", "reference", "blockquote", "list"]}
    )
    parser.core.ruler.push("tables", _join_tables)
    parser.core.ruler.push("tasks", _draw_boxes)
    parser.core.ruler.push("gaps", _mark_gaps)
    return parser


def parse(text: str) -> list[Token]:
    """Return a text's tokens, none if the parser fails (the renderer reports that)."""
    try:
        return markdown_parser().parse(text)
    except Exception:  # noqa: BLE001 - any parser bug
        return []


def has_gap(token: Token) -> bool:
    """Return whether an empty line follows a block inside a list or quote."""
    return "gap" in token.meta


def _inline_math(state: StateInline, silent: bool) -> bool:
    opening = state.src[state.pos : state.pos + 2]
    if opening[:1] == "$" and opening != "$$":
        opening = "$"
    closing = _DELIMITERS.get(opening)
    if closing is None:
        return False
    start = state.pos + len(opening)
    end = state.src.find(closing, start, start + _MAX_FORMULA)
    if opening == "$":
        found = _IN_DOLLARS.match(state.src, state.pos, state.pos + _MAX_FORMULA)
        if found is None or not _MATH.search(found[1]):
            return False
        end = found.end() - 1
    if end <= start:
        if opening[0] == "$" or end == start:
            return False
        end, closing, text = start, "", opening  # not closed yet: keep the backslash
    else:
        text = state.src[start:end]
        if _PROSE.search(text) and not _MATH.search(text):
            return False
        text = to_unicode(text)
        if "\n" in text:  # the text around it would shift the first and the last line
            text = (
                "\n" * bool(state.pos) + text + "\n" * bool(state.src[end + len(closing) :].strip())
            )
    if not silent:
        for number, line in enumerate(text.split("\n")):
            if number:
                state.push("hardbreak", "br", 0)
            state.push("text", "", 0).content = line
    state.pos = end + len(closing)
    return True


def _block_math(state: StateBlock, first: int, end_line: int, silent: bool) -> bool:
    r"""Parse a block from a line that starts with `\[`, `$$` or `\begin{}` to its closing line."""
    begin = state.bMarks[first] + state.tShift[first]
    opening = state.src[begin : begin + 2]
    closing = {"\\[": "\\]", "$$": "$$"}.get(opening, "")
    environment = _BEGIN.match(state.src, begin)
    if environment and environment[1] in (*_latex()["aligned"], *_latex()["brackets"]):
        opening, closing = "", environment[0].replace("begin", "end")
    if not closing or state.is_code_block(first):
        return False
    lines: list[str] = []
    for line in range(first, end_line):
        text = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()
        text = text.removeprefix(opening) if line == first else text
        if (not text and line > first) or sum(map(len, lines)) > _MAX_FORMULA:
            return False
        if closing in text:
            if not text.endswith(closing) or text.count(closing) > 1:
                return False  # inside a paragraph
            lines.append(text.removesuffix(closing) if opening else text)
            break
        lines.append(text)
    else:
        return False
    if not silent:
        state.line = line + 1
        state.push("paragraph_open", "p", 1).map = [first, state.line]
        inline = state.push("math", "", 0)  # `_join_tables` makes it `inline` after the text rules
        inline.content = to_unicode("\n".join(lines).strip())
        inline.map, inline.children = [first, state.line], []
        for text in inline.content.split("\n"):
            inline.children += [Token("hardbreak", "br", 0), Token("text", "", 0, content=text)]
        del inline.children[0]
        state.push("paragraph_close", "p", -1)
    return True


def _join_tables(state: StateCore) -> None:
    """Replace each table by one token, so that cells need no widgets."""
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


def _draw_boxes(state: StateCore) -> None:
    for item, _, text in zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False):
        if item.type == "list_item_open" and text.type == "inline" and text.children:
            first = text.children[0]
            if box := _TASK.match(first.content):
                first.content = ("☐" if box[1] == " " else "☑") + first.content[box.end() :]


def _mark_gaps(state: StateCore) -> None:
    """Mark blocks before an empty line, except at the end of a whole list or quote."""
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
    rows: list[list[Token]] = []
    alignment: list[str] = []
    for opened, token in itertools.pairwise(tokens):
        if opened.type == "tr_open":
            rows.append([])
        elif opened.type in ("th_open", "td_open"):
            rows[-1].append(token)
        if opened.type == "th_open":
            style = str(opened.attrGet("style") or "")
            alignment.append(style.removeprefix("text-align:") or "left")
    return TableCells(rows, alignment)


@cache
def _latex() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("latex.toml").read_text("utf-8"))


_ROOTS = {"": "√", "2": "√", "3": "∛", "4": "∜"}
_VULGAR = {unicodedata.normalize("NFKC", each).replace("⁄", "/"): each for each in "½⅓⅔¼¾⅕⅙⅛"}

_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_FACTOR = re.compile(r"\d+|√?[d∂]?[^\W\d][\u2070-\u209c²³¹ᵢ-ᵪ]*|√?[^\W\d]*\(\)|[^\W\d]!")
_MAX_DEPTH = 20


class _InvalidLatexError(Exception):
    """The text is not valid LaTeX."""


def to_unicode(tex: str) -> str:
    """Convert LaTeX without delimiters to Unicode lines; keep unbalanced input as is."""
    try:
        text = "".join(_LatexReader(tex).read())
    except _InvalidLatexError:
        return tex
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(filter(None, lines))


class _LatexReader:
    """Converts LaTeX from left to right. Raises _InvalidLatexError for invalid input."""

    def __init__(self, tex: str, depth: int = 0) -> None:
        self._tex, self._place, self._depth = tex, 0, depth
        if depth > _MAX_DEPTH:
            raise _InvalidLatexError

    def read(self) -> Iterator[str]:
        while self._place < len(self._tex):
            letter = self._tex[self._place]
            if letter in "^_":
                self._place += 1
                yield _script(letter, self._argument())
                if self._tex[self._place - 1].isspace():
                    yield " "  # the space ended a command
            elif letter == "{":
                yield self._convert(self._group())
            elif letter == "}":
                raise _InvalidLatexError
            elif letter == "\\":
                yield self._command()
            else:
                self._place += 1
                yield {"~": " ", "&": " ", "'": "′", "\n": " "}.get(letter, letter)

    def _convert(self, tex: str) -> str:
        return "".join(_LatexReader(tex, self._depth + 1).read())

    def _command(self) -> str:
        found = _COMMAND.match(self._tex, self._place)
        if found is None:
            raise _InvalidLatexError  # a backslash at the end
        start, self._place = self._place, found.end()
        name = found[1]
        if name.isalpha():
            self._skip_spaces()
        text = _latex()["symbols"].get(name)
        if text is not None:
            return text + " " if text and self._place > found.end() else text
        if name in _latex()["functions"]:
            return name if self._tex[self._place : self._place + 1] in "_^(" else f"{name} "
        if name in _latex()["plain"]:
            return self._group() if name.startswith(("text", "mbox")) else self._argument()
        if name in ("frac", "dfrac", "tfrac", "sfrac", "cfrac"):
            return _fraction(self._argument(), self._argument())
        if name == "sqrt":
            return self._root()
        if alphabets := _latex()["alphabets"].get(name):
            return "".join(_in_alphabet(letter, *alphabets) for letter in self._argument())
        if name == "begin":
            return self._environment()
        if accent := _latex()["accents"].get(name):
            accented = self._argument()
            if len(accented) == 1:
                return accented + accent
        # Unknown commands stay unchanged, with their arguments.
        while name.isalpha() and self._place < len(self._tex) and self._tex[self._place] in "{[":
            self._group(*("{", "}") if self._tex[self._place] == "{" else ("[", "]"))
        return self._tex[start : self._place]

    def _skip_spaces(self) -> None:
        while self._tex[self._place : self._place + 1].isspace():
            self._place += 1

    def _group(self, opening: str = "{", closing: str = "}") -> str:
        self._skip_spaces()
        if not self._tex.startswith(opening, self._place):
            raise _InvalidLatexError
        start, depth = self._place + 1, 0
        while self._place < len(self._tex):
            letter = self._tex[self._place]
            depth += (letter == opening) - (letter == closing)
            self._place += 2 if letter == "\\" else 1
            if depth == 0:
                return self._tex[start : self._place - 1]
        raise _InvalidLatexError

    def _argument(self) -> str:
        self._skip_spaces()
        following = self._tex[self._place : self._place + 1]
        if following == "{":
            return self._convert(self._group()).strip()
        if following == "\\":
            return self._command().strip()
        if following in ("", "}", "^", "_"):
            raise _InvalidLatexError
        self._place += 1
        return following

    def _root(self) -> str:
        index = ""
        if self._tex.startswith("[", self._place):
            index = self._convert(self._group("[", "]"))
        sign = _ROOTS.get(index) or f"{_script('^', index)}√"
        under = self._argument()
        return sign + (under if len(under) == 1 or under.isdecimal() else f"({under})")

    def _environment(self) -> str:
        r"""Read an environment after `\begin`; a matrix becomes rows between semicolons."""
        name = self._group()
        closing = f"\\end{{{name}}}"
        end = self._tex.find(closing, self._place)
        inner = self._tex[self._place : end]
        kind = name.rstrip("*")
        if end < 0 or ("\\begin" in inner and kind not in _latex()["aligned"]):
            raise _InvalidLatexError
        self._place = end + len(closing)
        if kind in _latex()["aligned"]:
            return f"\n{self._convert(inner)}\n"
        brackets = _latex()["brackets"].get(kind)
        if brackets is None:
            return f"\\begin{{{name}}}{inner}{closing}"
        if kind == "array":
            inner = re.sub(r"^\s*\{[^}]*\}", "", inner)
        rows = [[self._convert(cell).strip() for cell in row.split("&")]
                for row in re.split(r"\\\\", inner) if row.strip()]  # fmt: skip
        left, right = brackets
        return f"{left}{'; '.join(map(' '.join, rows))}{right}"


@cache
def _scripts(kind: str) -> dict[str, str]:
    table = {"−": "⁻" if kind == "<super>" else "₋", " ": ""}
    ranges = (0xB2, 0xBA), (0x2B0, 0x2E5), (0x1D2C, 0x1DBF), (0x2070, 0x209D), (0x2C7C, 0x2C7E)
    for code in itertools.chain(*itertools.starmap(range, ranges)):
        found, _, plain = unicodedata.decomposition(chr(code)).partition(" ")
        if found == kind and " " not in plain:
            table.setdefault(chr(int(plain, 16)), chr(code))
    table["-"] = table["−"]
    return table


def _script(mark: str, text: str) -> str:
    """Raise (^) or lower (_) `text`; keep the mark if Unicode lacks a letter."""
    if mark == "^" and text in ("∘", "°", "′", "′′"):
        return "°" if text == "∘" else text
    table = _scripts("<super>" if mark == "^" else "<sub>")
    if text and all(letter in table for letter in text):
        return "".join(table[letter] for letter in text)
    if text == "∞":
        return f"{mark}∞ "
    return f"{mark}{text}" if len(text) == 1 else f"{mark}({text})"


def _fraction(above: str, below: str) -> str:
    if vulgar := _VULGAR.get(f"{above}/{below}"):
        return vulgar
    top, bottom = _without_brackets(above), _without_brackets(below)
    if re.search(r"[-+±∓=<>/\s]", top):
        above = f"({above})"
    if not _FACTOR.fullmatch(bottom):
        below = f"({below})"
    return f"{above}/{below}"


def _without_brackets(text: str) -> str:
    shorter = re.sub(r"\([^()]+\)", "()", text)
    return text if shorter == text else _without_brackets(shorter)


def _in_alphabet(letter: str, *alphabets: str) -> str:
    case = "CAPITAL" if letter.isupper() else "SMALL"
    for alphabet in alphabets if letter.isascii() and letter.isalpha() else ():
        try:
            return unicodedata.lookup(f"{alphabet} {case} {letter.upper()}")
        except KeyError:
            continue
    return letter
