"""Loops and echoes: where a model begins to repeat itself, or the lines above the cursor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LOOP_REPEATS = 5  # equal lines, or equal groups of lines, that are a loop
_MAX_GROUP = 4  # lines of a repeated group
_MAX_PERIOD = 32  # characters of a text that is repeated within a line
_LOOP_LENGTH = 64  # minimum characters of a loop within a line
_CHARACTER_LOOP_LENGTH = 100  # the same, if a single character is repeated
_LOOP_PERIODS = 6  # minimum repeats of a loop within a line
_KEPT_LENGTH = 12  # minimum characters of a repetition that stay in the output
_CONTEXT_LENGTH = 2000  # characters around the cursor in which the user may repeat the same text
_MAX_ECHO = 6  # lines above the cursor that are compared with the output
_WORDS = re.compile(r"\w.*\w")
_REPEATED = re.compile(r"(\S.{0,31}?)\1{2,}")
_CONFLICT = re.compile(r"(?m)^(?:<{7}|>{7}|\|{7})(?=[ \n])")
_MARKER = 7  # characters
_PARTIAL_CONFLICT = re.compile(r"(?:^|\n)([<>|]{1,7})\Z")


@dataclass(frozen=True, slots=True)
class RepetitionEnd:
    """Where to end a text."""

    at: int
    is_loop: bool = False  # False: the text after `at` may still become a loop


class RepetitionStops:
    """Finds loops and echoes in the output at one cursor position."""

    def __init__(self, prefix: str, suffix: str) -> None:
        self._before = prefix[prefix.rfind("\n") + 1 :]
        self._context = f"{prefix[-_CONTEXT_LENGTH:]}\n{suffix[:_CONTEXT_LENGTH]}"
        above = prefix[: len(prefix) - len(self._before)][-_CONTEXT_LENGTH:]
        lines = [line.rstrip() for line in above.split("\n") if line.strip()]
        self._above = lines[-_MAX_ECHO:]
        self._has_conflict = bool(_CONFLICT.search(prefix[-20_000:]))

    def find(self, text: str, *, final: bool) -> RepetitionEnd:
        """Return where the output `text` begins to repeat. final: no more output follows."""
        ends = [
            self._echo(text, final=final),
            self._line_loop(text, final=final),
            self._inline_loop(text, final=final),
            self._conflict(text, final=final),
        ]
        loops = [end for end in ends if end.is_loop]
        return min(loops or ends, key=lambda end: end.at)

    def _echo(self, text: str, *, final: bool) -> RepetitionEnd:
        """Find the lines above the cursor at the start of the output."""
        none = RepetitionEnd(len(text))
        if self._before.strip():
            return none
        start = len(text) - len(text.lstrip("\n"))
        lines = (text[start:] if start else self._before + text).split("\n")
        whole = lines if final else lines[:-1]
        for size in range(1, len(self._above) + 1):
            above = self._above[-size:]
            if not self._is_distinct(above):
                continue
            if [line.rstrip() for line in whole[:size]] == above:
                return RepetitionEnd(0, is_loop=True)
            if not final and len(whole) < size and _begins(above, whole, lines[-1]):
                none = RepetitionEnd(0)
        return none

    def _is_distinct(self, lines: Sequence[str]) -> bool:
        """Return True if the lines have words, open no block and occur only once."""
        if not any(len(line.strip()) >= 8 and _WORDS.search(line) for line in lines):
            return False
        last = lines[-1].rstrip()
        if last.endswith((":", "{", "(", "[", ",", "do", "then")):
            return False
        return f"\n{self._context}".count("\n" + "\n".join(lines)) == 1

    def _line_loop(self, text: str, *, final: bool) -> RepetitionEnd:
        """Find the same line, or the same few lines, five times."""
        lines = (self._before + text).split("\n")
        whole = len(lines) if final else len(lines) - 1
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        alike = [0] * (_MAX_GROUP + 1)  # by size: lines in a row that equal those `size` before
        pending = len(lines)
        for number in range(1, len(lines)):
            for size in range(1, min(_MAX_GROUP, number) + 1):
                one, other = lines[number - size].rstrip(), lines[number]
                complete = number < whole
                same = other.rstrip() == one if complete else one.startswith(other.rstrip())
                alike[size] = alike[size] + 1 if same else 0
                first = number + 1 - alike[size]
                if not alike[size] or not _has_words(lines[first - size : first]):
                    continue
                if complete and alike[size] >= (_LOOP_REPEATS - 1) * size:
                    return RepetitionEnd(self._offset(starts[first]), is_loop=True)
                if number == len(lines) - 1 and not final:
                    pending = min(pending, first)
        return RepetitionEnd(self._offset(starts[pending]) if pending < len(lines) else len(text))

    def _offset(self, start: int) -> int:
        """Return the place of a line's start in the output."""
        return max(0, start - len(self._before))

    def _inline_loop(self, text: str, *, final: bool) -> RepetitionEnd:
        """Find a text that is repeated many times within a line."""
        lines = text.split("\n")
        at = 0
        for number, line in enumerate(lines):
            found = self._inline_loop_end(line) if _REPEATED.search(line) else None
            if found is not None:
                end, is_loop = found
                if is_loop or (number == len(lines) - 1 and not final):
                    return RepetitionEnd(at + end, is_loop)
            at += len(line) + 1
        return RepetitionEnd(len(text))

    def _inline_loop_end(self, line: str) -> tuple[int, bool] | None:
        """Return where a repetition in `line` is to be cut, and whether it is a loop.

        A repetition that is no loop counts only at the end of the line.
        """
        pending: int | None = None
        for period in range(1, min(_MAX_PERIOD, len(line) // 3) + 1):
            least = max(3 * period, _KEPT_LENGTH)
            loop = _CHARACTER_LOOP_LENGTH if period == 1 else _LOOP_LENGTH
            loop = max(loop, _LOOP_PERIODS * period)
            length = period  # of the repetition that ends at `end`
            for end in range(period, len(line)):
                length = length + 1 if line[end] == line[end - period] else period
                start = end + 1 - length
                if length < least or self._may_repeat(line[start:][:period]):
                    continue
                kept = start + least
                if length >= loop:
                    return kept, True
                if end == len(line) - 1:
                    pending = min(kept, len(line) if pending is None else pending)
        return None if pending is None else (pending, False)

    def _may_repeat(self, part: str) -> bool:
        """Return True if `part` may be repeated: punctuation, or a text that the user repeats."""
        shorter = part in (2 * part)[1:-1]  # it repeats a shorter text
        return shorter or not re.search(r"\w", part) or 3 * part in self._context

    def _conflict(self, text: str, *, final: bool) -> RepetitionEnd:
        """Find the markers of a merge conflict."""
        if not self._has_conflict:
            for found in _CONFLICT.finditer(text):
                if found.start() or not self._before:
                    return RepetitionEnd(found.start(), is_loop=True)
            partial = _PARTIAL_CONFLICT.search(text)
            at_start = partial and (partial.start(1) or not self._before)
            if partial and at_start and (not final or len(partial.group(1)) == _MARKER):
                return RepetitionEnd(partial.start(1), is_loop=final)
        return RepetitionEnd(len(text))


def _begins(above: Sequence[str], whole: Sequence[str], partial: str) -> bool:
    """Return True if the output so far is a beginning of the lines `above`."""
    same = all(one.rstrip() == two for one, two in zip(whole, above, strict=False))
    return same and above[len(whole)].startswith(partial.rstrip())


def _has_words(lines: Sequence[str]) -> bool:
    return any(_WORDS.search(line) for line in lines)
