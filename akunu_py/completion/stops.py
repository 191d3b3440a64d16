"""Where a completion ends: at the end of its line or its block, and before what is there already.

The rules look at text alone: the place of the cursor, indentation, brackets, and what follows. They
know no language beyond that: a rule that holds for most is better here than a parser for each.

    behind the cursor              the completion is
    -----------------              -----------------
    more code on the line          the rest of this line
    only what closes there         all up to it
    nothing, line begun            this line, and the block that it opens, if it does
    nothing, indented              the lines indented as deep, up to a shallower one
    nothing, at the margin         one statement, and its block
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from akunu_py.completion.brackets import OpenBrackets, width

_LONGEST = 20_000  # characters of the cursor's line that are looked at
_LEADING_LINES = 2  # empty lines before the first that is not
_CLOSING_WORDS = ("end", "fi", "done", "esac")
_CLOSING = re.compile(rf"[)\]}}]|</|(?:{'|'.join(_CLOSING_WORDS)})\b")
_OPENING = re.compile(
    r"(?:[:({\[]|[=-]>|\b(?:then|do(?:\s*\|[^|]*\|)?|else|begin))\s*(?:#.*|//.*)?$"
)
# What goes on with a statement that had its block, at its own indentation.
_TRY = re.compile(r"\s*(?:try|begin)\b")
_MIDDLE_WORDS = ("except", "finally", "catch", "rescue", "ensure")
_MIDDLE = re.compile(rf"(?:{'|'.join(_MIDDLE_WORDS)})\b")
# What goes on with a line that was left: a brace, a method, a pipe; in SQL, a clause.
_FOLLOWING = re.compile(r"[{.]|\?\.|\|>|&&|\|\|")
_SQL_WORDS = tuple(
    re.findall(
        r"\w+",
        "select from where and or join left right inner outer full cross on using group order "
        "having limit offset union except intersect values set returning returns as begin with "
        "insert update delete when language",
    )
)
_SQL = re.compile(
    r"\s*(?!from\b.*\bimport\b)(?:select|insert\s+into|update\s+\w+|delete\s+from|create|alter"
    r"|with\s+\w+\s+as|from\s+\w+(?:\s+\w+)?|where)\b(?![^\n]*[=({:]\s*$)",
    re.IGNORECASE,
)
_AUTO_CLOSED = re.compile(r"(?:[)\]};,>\s]|\"\"\"|\'\'\'|\*/|</[\w.:-]+>)+")

_COMMENT = re.compile(r"\s*(?:#|//|--|/\*|\*)")
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
        self._begun = prefix[max(prefix.rfind("\n") + 1, len(prefix) - _LONGEST) :]
        rest, _, below = suffix.partition("\n")
        self._rest_of_line = rest.rstrip()  # behind the cursor
        self._next_lines = _next_lines(below)
        self._max_lines = max_lines
        self._brackets = OpenBrackets(prefix, suffix)

    def cut(self, text: str, *, final: bool = False) -> Cut:
        """What stays of `text`, the completion so far; with `final` nothing more will come."""
        end = self._brackets.first_excess(text, ended=final)
        if end is not None:
            return self._cut_lines(text[: self._end_before_rest(text, end)], final=True, done=True)
        if not final:
            # What is in quotes now may turn out not to be: a letter behind a quote shows it.
            ends = [self._brackets.first_excess(more) for more in (text, text + "a")]
            text = text[: min((end for end in ends if end is not None), default=len(text))]
            text = text[: len(text) - self._brackets.undecided(text)]
        return self._cut_lines(text, final=final, done=False)

    def _cut_lines(self, text: str, *, final: bool, done: bool) -> Cut:
        lines = text.split("\n")
        if self._rest_of_line and self._fills(lines):
            return self._cut_filling(lines, final, done)
        if self._rest_of_line:
            return self._cut_one_line(lines, final, done)
        first = self._first_line(lines)
        if first is None or first > _LEADING_LINES:
            return Cut("", done or final or len(lines) > _LEADING_LINES + 1)
        kept = lines[:first]
        base = width(self._begun + lines[0] if first == 0 else lines[first])
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

    def _fills(self, lines: Sequence[str]) -> bool:
        """Whether more than a line belongs between the cursor and what closes behind it."""
        if len(lines) == 1 or not _AUTO_CLOSED.fullmatch(self._rest_of_line):
            return False
        first = lines[0].rstrip()
        return not first or first[-1] in ",([{" or self._brackets.inside_long

    def _cut_filling(self, lines: Sequence[str], final: bool, done: bool) -> Cut:
        """What goes between the cursor and what closes behind it, up to the line break before."""
        base = width(self._begun)
        kept = [lines[0]]
        for number in range(1, len(lines)):
            line, last = lines[number], number == len(lines) - 1
            if last and not line.strip():
                break
            over = not self._brackets.inside_long and line.strip() and width(line) <= base
            if over or not (line.strip() or kept[-1].strip()):
                return Cut("\n".join([*kept, ""]), True)
            kept.append(line)
            if 0 < self._max_lines <= len(kept) and (final or not last):
                return Cut(_trimmed(kept), done or not last, full=not last)
        if done or final:  # the rest behind the cursor begins a line of its own, if it is to
            kept += lines[len(kept) :]
            return Cut("\n".join(kept) if "".join(kept).strip() else "", done)
        text = _trimmed(kept)
        return Cut(text[: self._held_from(text)].rstrip())

    def _cut_one_line(self, lines: Sequence[str], final: bool, done: bool) -> Cut:
        """The rest of the cursor's line, without what stands behind the cursor already."""
        line = lines[0]
        if len(lines) > 1:
            line, final, done = line.rstrip(), True, True
        if not final:
            return Cut(line[: self._held_from(line)].rstrip())
        shorter = line[: len(line) - len(self._rest_of_line)]
        if line.endswith(self._rest_of_line):
            opened = [self._brackets.depth(each, taken=True) for each in (shorter, line)]
            line = shorter if opened[0] == opened[1] else line
        return Cut(line, done)

    def _held_from(self, text: str) -> int:
        """Where the end of `text` begins that may turn out to be what stands behind the cursor, or
        spaces, which may end the line."""
        return min(
            (
                len(part) - length
                for part in (text, text.rstrip())
                for length in range(1, min(len(part), len(self._rest_of_line)) + 1)
                if part.endswith(self._rest_of_line[:length])
            ),
            default=len(text),
        )

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
        if self._brackets.depth("\n".join(kept)) > 0 or kept[-1].lstrip().startswith("@"):
            return True
        statement = self._begun + kept[0] if first == 0 else kept[first]
        before = statement if len(kept) == first + 1 else kept[-1]
        in_block = block is not None or self._opens(kept, first)
        in_block = in_block or any(width(each) > base for each in kept[first + 1 :] if each.strip())
        left = first == 0 and not kept[0].strip()  # the first thing the model did
        sql = bool(_SQL.match(statement)) and not before.rstrip().endswith(";")
        if not (in_block or left or sql):
            return False
        content = line.strip()
        if not content:
            return (in_block and bool(before.strip())) if whole else None
        indented = width(line)
        if indented > base or indented == block:
            return True
        words = [*_CLOSING_WORDS, *_MIDDLE_WORDS, "else", "</", "?.", "|>", "&&", "||"]
        words += _SQL_WORDS if sql else ()
        if not whole and any(word.startswith(content.lower()) for word in words):
            return None
        if block is not None or indented != base:
            return block is not None and bool(_CLOSING.match(content))
        if in_block and (_CLOSING.match(content) or _MIDDLE.match(content)):
            return True
        if _TRY.match(statement) and content.startswith("else"):
            return True
        if _FOLLOWING.match(content):
            return not before.rstrip().endswith((";", "}"))
        return sql and re.split(r"\W", content.lower(), maxsplit=1)[0] in _SQL_WORDS

    def _opens(self, kept: list[str], first: int) -> bool:
        """Whether the statement that the completion begins with opens a block."""
        text = ""
        for line in kept[first:]:
            if line.lstrip().startswith("@"):  # what it decorates follows
                continue
            text += line
            if _OPENING.search((self._begun if first == 0 else "") + text):
                return True
            if self._brackets.depth(text) <= 0:
                return False
            text += "\n"
        return False

    def _closed_all(self, kept: list[str], line: str, base: int, block: int | None) -> bool:
        """Whether `line` closes the block, so that nothing behind it belongs to it."""
        if not _CLOSING.match(line.strip()) or self._brackets.depth("\n".join(kept)) > 0:
            return False
        if block is not None:
            return width(line) < base
        begun = next((each for each in [self._begun + kept[0], *kept[1:]] if each.strip()), "")
        return width(line) == base and not (_TRY.match(begun) and line.strip()[0] == "}")

    def _may_repeat(self, line: str, whole: bool) -> bool:
        """Whether `line` is the next line of the buffer, or may become it."""
        if not line.strip():
            return False
        return any(
            line.rstrip() == there or (not whole and there.startswith(line))
            for there in self._next_lines
        )


def _next_lines(below: str) -> list[str]:
    """The next line of the buffer that is not empty, and where that is a comment, up to the next
    that is none."""
    found: list[str] = []
    for line in below[:_LONGEST].split("\n"):
        if line.strip():
            found.append(line.rstrip())
            if not _COMMENT.match(line):
                break
    return found


def _trimmed(lines: list[str]) -> str:
    return "\n".join(lines).rstrip()


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
