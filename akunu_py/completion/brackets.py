"""Brackets in source text, outside of quotes and comments, as far as one can tell without parsing.

Owns what counts as a bracket. It knows no language: quotes end in their line, a comment begins
with # or // at its start or behind a space. Texts in quotes that go over lines are read as code,
and so are very long ones: looking for their ends from every quote would take for ever.
"""

from __future__ import annotations

import re

OPENERS = "([{"
CLOSERS = ")]}"
# A quote inside a word, or before one where it should end, is an apostrophe or a lifetime.
_DOUBLE = r"\"(?:\\.|[^\"\\\n]){0,1000}+"
_SINGLE = r"(?<!\w)'(?:\\.|[^'\\\n]){0,1000}+"
_COMMENT = r"(?<!\S)(?:#|//)[^\n]*"
_CLOSED = re.compile(rf"{_DOUBLE}\"|{_SINGLE}'(?!\w)|{_COMMENT}")
_MAY_CLOSE = re.compile(rf"{_DOUBLE}(?:\"|\\?\Z)|{_SINGLE}(?:'(?!\w)|\\?\Z)|{_COMMENT}")


def brackets(text: str, *, ended: bool = True) -> list[tuple[int, int]]:
    """(position, 1 for an opening or -1 for a closing one) of all brackets in `text`.

    ended: whether the last line is whole. If not, a quote that is open at its end may yet be
    closed, and what is behind it is not counted.
    """
    found: list[tuple[int, int]] = []
    at = 0
    for skipped in (_CLOSED if ended else _MAY_CLOSE).finditer(text):
        found += _in(text, at, skipped.start())
        at = skipped.end()
    return found + _in(text, at, len(text))


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


def _in(text: str, start: int, end: int) -> list[tuple[int, int]]:
    return [
        (position, 1 if text[position] in OPENERS else -1)
        for position in range(start, end)
        if text[position] in OPENERS or text[position] in CLOSERS
    ]
