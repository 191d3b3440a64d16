"""Fuzzy matching: which names a few letters mean, and which of their letters those are."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A path that matches what was typed. places: indices into it of the matched letters."""

    path: str
    places: tuple[int, ...] = ()


def best(letters: str, paths: Iterable[str], most: int) -> list[Match]:
    """The `most` of `paths` that match best: a name that begins with the letters, one that
    contains them, a path that contains them, then one in which they come in order."""
    letters = letters.lower()
    # Each class leaves out the letter that follows, so there is one way to match: no backtracking.
    in_order = re.compile("".join(f"[^{re.escape(each)}]*{re.escape(each)}" for each in letters))
    scored: list[tuple[int, int, str]] = []
    for path in paths:
        lower = path.lower()
        if in_order.match(lower):
            scored.append((_rank(letters, lower), len(path), path))
    chosen = heapq.nsmallest(most, scored)
    return [Match(path, _places(letters, path.lower())) for _, _, path in chosen]


def _rank(letters: str, path: str) -> int:
    """Of a path that has the letters in order; lower is better."""
    name = path.rpartition("/")[2]
    if name.startswith(letters):
        return 1
    if letters in name:
        return 2
    return 3 if letters in path else 4


def _places(letters: str, path: str) -> tuple[int, ...]:
    if len(letters) == 0:
        return ()
    start = path.rfind(letters)
    if start >= 0:
        return tuple(range(start, start + len(letters)))
    places: list[int] = []
    for letter in letters:
        places.append(path.index(letter, places[-1] + 1 if places else 0))
    return tuple(places)
