"""Where a completion ends: at the end of its line or its block, and before what is there already.

The rules look at text alone: the place of the cursor, indentation, brackets, and what follows. They
know no language beyond that: a rule that holds for most is better here than a parser for each.

    behind the cursor              the completion is
    -----------------              -----------------
    more code on the line          the rest of this line
    nothing, line begun            this line, and the block that it opens, if it does
    nothing, indented              the lines indented as deep, up to a shallower one
    nothing, at the margin         one statement, and its block
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_SCANNED = 20_000  # characters on each side of the cursor that brackets are looked for in
_LEADING_LINES = 2  # empty lines before the first that is not
_CLOSING_WORDS = ("end", "fi", "done", "esac")
_CLOSING = re.compile(rf"[)\]}}]|(?:{'|'.join(_CLOSING_WORDS)})\b")
_OPENING = re.compile(r"(?:[:({\[]|[=-]>|\b(?:then|do|else|begin))\s*(?:#.*|//.*)?$")

# Brackets count outside of quotes and comments, as far as one can tell without parsing: quotes end
# in their line, a comment begins with # or // at its start or behind a space. Strings that go over
# lines are read as code, and so are very long ones: looking for their ends from every quote would
# take for ever. A quote inside a word, or before one where it should end, is an apostrophe or a
# lifetime.
_DOUBLE = r"\"(?:\\.|[^\"\\\n]){0,1000}+"
_SINGLE = r"(?<!\w)'(?:\\.|[^'\\\n]){0,1000}+"
_OTHER = r"(?<!\S)(?:#|//)[^\n]*|[()\[\]{}]"
_CLOSED = re.compile(rf"{_DOUBLE}\"|{_SINGLE}'(?!\w)|{_OTHER}")
_MAY_CLOSE = re.compile(rf"{_DOUBLE}(?:\"|\\?\Z)|{_SINGLE}(?:'(?!\w)|\\?\Z)|{_OTHER}")
_STEPS = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)

_MARKDOWN = (".md", ".markdown", ".mdx", ".qmd", ".rmd")
_FENCE_OPENING = re.compile(r"```[\w+#.-]*[ \t]*\n")
_FENCE_MAY_OPEN = re.compile(r"`{1,3}|```[\w+#.-]*[ \t]*")  # so far
_FENCE_CLOSING = "\n```"


@dataclass(frozen=True, slots=True)
class Cut:
    """text: what of a completion is certain to stay. done: whether nothing can follow. full:
    whether max_lines is why."""

    text: str
    done: bool = False
    full: bool = False


class CompletionStops:
    """The end of one completion. It depends on the text, not on the pieces that it came in: what
    `cut` makes of a beginning is a beginning of what it makes of the whole."""

    def __init__(self, prefix: str, suffix: str, max_lines: int = 0) -> None:
        """prefix, suffix: around the cursor. max_lines: 0 for as many as the rules allow."""
        self._begun = prefix[max(prefix.rfind("\n") + 1, len(prefix) - _SCANNED) :]
        rest, _, below = suffix.partition("\n")
        self._rest_of_line = rest.rstrip()  # behind the cursor
        self._next_line = next((line.rstrip() for line in below.split("\n") if line.strip()), "")
        self._max_lines = max_lines
        open_before = left_open(prefix[-_SCANNED:])
        self._closable = max(0, open_before - closed_from_before(suffix[:_SCANNED]))
        # Brackets of the cursor's own line that the completion is to close.
        self._open_here = min(max(0, depth(self._begun)), self._closable)

    def cut(self, text: str, *, final: bool = False) -> Cut:
        """What stays of `text`, the completion so far; with `final` nothing more will come."""
        end = first_excess(text, self._closable, ended=final)
        if end is not None:
            return self._cut_lines(text[: self._end_before_rest(text, end)], final=True, done=True)
        if not final:
            # What is in quotes now may turn out not to be: a letter behind a quote shows it.
            text = text[: first_excess(text + "a", self._closable)]
        return self._cut_lines(text, final=final, done=False)

    def _cut_lines(self, text: str, *, final: bool, done: bool) -> Cut:
        lines = text.split("\n")
        if self._rest_of_line:
            return self._cut_one_line(lines, final, done)
        first = self._first_line(lines)
        if first is None or first > _LEADING_LINES:
            return Cut("", done or final or len(lines) > _LEADING_LINES + 1)
        kept = lines[:first]
        base = _width(self._begun + lines[0] if first == 0 else lines[first])
        block = base if base and not self._begun.strip() else None
        for number in range(first, len(lines)):
            line, whole = lines[number], number < len(lines) - 1 or final
            if number > first:
                continues = self._continues(kept, first, line, whole, base, block)
                if not continues:
                    return Cut(_trimmed(kept), done or continues is False)
            if self._may_repeat(self._begun + line if number == 0 else line, whole):
                return Cut(_trimmed(kept), done or whole)
            kept.append(line)
            if whole and 0 < self._max_lines <= len(kept):
                more = number < len(lines) - 1
                return Cut(_trimmed(kept), done or more, full=more)
            if whole and number > first and self._closed_all(kept, line, base, block):
                return Cut(_trimmed(kept), True)
        return Cut(_trimmed(kept), done)

    def _cut_one_line(self, lines: Sequence[str], final: bool, done: bool) -> Cut:
        """The rest of the cursor's line, without what stands behind the cursor already."""
        line = lines[0]
        if len(lines) > 1:
            line, final, done = line.rstrip(), True, True
        if not final:
            # What may turn out to be the rest is held back, and spaces, which may end the line.
            held = [
                len(part) - length
                for part in (line, line.rstrip())
                for length in range(1, min(len(part), len(self._rest_of_line)) + 1)
                if part.endswith(self._rest_of_line[:length])
            ]
            return Cut(line[: min(held, default=len(line))].rstrip())
        shorter = line[: len(line) - len(self._rest_of_line)]
        if line.endswith(self._rest_of_line) and depth(shorter) == depth(line):
            line = shorter
        return Cut(line, done)

    def _end_before_rest(self, text: str, end: int) -> int:
        """Where to cut `text` whose bracket at `end` stands behind the cursor already: there, or
        before all of what leads up to it behind the cursor too."""
        kept, rest = text[: end + 1], self._rest_of_line
        lengths = range(min(len(kept), len(rest)), 0, -1)
        return end + 1 - next((n for n in lengths if kept.endswith(rest[:n])), 1)

    def _first_line(self, lines: Sequence[str]) -> int | None:
        """The number of the first line that is not empty: the cursor's own, if it is begun."""
        if self._begun.strip():
            return 0
        return next((number for number, line in enumerate(lines) if line.strip()), None)

    def _continues(
        self, kept: list[str], first: int, line: str, whole: bool, base: int, block: int | None
    ) -> bool | None:
        """Whether `line` belongs to the completion too; None where it is too short to tell.

        base: how deep the first line is indented. block: the same where the cursor's line was
        empty, so that its neighbours belong to it.
        """
        if self._open_here + depth("\n".join(kept)) > 0 or kept[-1].lstrip().startswith("@"):
            return True
        in_block = block is not None or self._opens(kept, first)
        if not in_block:
            return False
        content = line.strip()
        if not content:
            return bool(kept[-1].strip()) if whole else None
        width = _width(line)
        if width > base or width == block:
            return True
        if not whole and any(word.startswith(content) for word in _CLOSING_WORDS):
            return None
        return bool(_CLOSING.match(content)) and (block is not None or width == base)

    def _opens(self, kept: list[str], first: int) -> bool:
        """Whether the statement that the completion begins with opens a block."""
        text = self._begun if first == 0 else ""
        for line in kept[first:]:
            if line.lstrip().startswith("@"):  # what it decorates follows
                continue
            text += line
            if _OPENING.search(text):
                return True
            if depth(text) <= 0:
                return False
            text += "\n"
        return False

    def _closed_all(self, kept: list[str], line: str, base: int, block: int | None) -> bool:
        """Whether `line` closes the block, so that nothing behind it belongs to it."""
        if not _CLOSING.match(line.strip()) or self._open_here + depth("\n".join(kept)) > 0:
            return False
        return _width(line) < base if block is not None else _width(line) == base

    def _may_repeat(self, line: str, whole: bool) -> bool:
        """Whether `line` is the next line of the buffer, or may become it."""
        if not self._next_line or not line.strip():
            return False
        same = line.rstrip() == self._next_line
        return same or (not whole and self._next_line.startswith(line))


def _trimmed(lines: list[str]) -> str:
    return "\n".join(lines).rstrip()


def _width(line: str) -> int:
    """How deep a line is indented; a tab counts up to the next multiple of 8."""
    expanded = line.expandtabs()
    return len(expanded) - len(expanded.lstrip())


def brackets(text: str, *, ended: bool = True) -> list[tuple[int, int]]:
    """(position, 1 for an opening or -1 for a closing one) of all brackets in `text`.

    ended: whether the last line is whole. If not, a quote that is open at its end may yet be
    closed, and what is behind it is not counted.
    """
    pattern = _CLOSED if ended else _MAY_CLOSE
    found = ((each.start(), each.group()) for each in pattern.finditer(text))
    return [(position, _STEPS[token]) for position, token in found if token in _STEPS]


def depth(text: str) -> int:
    """How many brackets `text` opens more than it closes."""
    return sum(step for _, step in brackets(text))


def left_open(text: str) -> int:
    """How many brackets are open at the end of `text`, whatever came before it."""
    now = 0
    for _, step in brackets(text):
        now = max(0, now + step)
    return now


def closed_from_before(text: str) -> int:
    """How many brackets `text` closes that were opened before it."""
    now = lowest = 0
    for _, step in brackets(text):
        now += step
        lowest = min(lowest, now)
    return -lowest


def first_excess(text: str, closable: int, *, ended: bool = True) -> int | None:
    """Where `text` closes a bracket that neither it nor one of `closable` before it opened."""
    now = closable
    for position, step in brackets(text, ended=ended):
        now += step
        if now < 0:
            return position
    return None


def is_markdown(path: str, language: str) -> bool:
    """Whether fences belong to what is written in the file `path`."""
    return path.lower().endswith(_MARKDOWN) or language.lower() == "markdown"


def strip_fence(text: str, *, final: bool) -> tuple[str, bool]:
    """(`text` without the Markdown fence that a chat model may put around its code, whether that
    was closed, so that nothing follows).

    final: nothing more will come. Until then what may turn out to be of a fence is held back; what
    was returned once stays.
    """
    opening = _FENCE_OPENING.match(text)
    if opening is None:
        begun = _FENCE_MAY_OPEN.fullmatch(text) and (text.startswith("```") or not final)
        return ("" if begun else text), False
    code, closing, _ = text[opening.end() :].partition(_FENCE_CLOSING)
    if closing or final:
        return code, bool(closing)
    lengths = range(len(_FENCE_CLOSING) - 1, -1, -1)
    held_back = next(n for n in lengths if code.endswith(_FENCE_CLOSING[:n]))
    return code[: len(code) - held_back], False
