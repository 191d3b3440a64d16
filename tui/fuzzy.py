"""Fuzzy matching of typed letters with names.

Textual's own matcher tries every way to place the letters: up to 80 ms for one name, and a
directory has thousands.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A path that matches."""

    path: str
    places: tuple[int, ...] = ()  # indices into `path` of the matched letters


def best(letters: str, paths: Iterable[str], most: int) -> list[Match]:
    """Return the `most` of `paths` that match best.

    The order: names that begin with the letters, names and then paths that contain them, and paths
    that have them in order.
    """
    letters = letters.lower()
    # Each class excludes the next letter, so the expression cannot backtrack.
    in_order = re.compile("".join(f"[^{re.escape(each)}]*({re.escape(each)})" for each in letters))
    found: list[tuple[int, int, str, tuple[int, ...]]] = []
    for path in paths:
        lower = path.lower()
        if match := in_order.match(lower):
            start, name = lower.rfind(letters), lower.rfind("/") + 1
            places = tuple(match.start(number + 1) for number in range(len(letters)))
            rank = 4
            if start >= 0:
                places = tuple(range(start, start + len(letters)))
                rank = 1 if lower.startswith(letters, name) else 2 if start >= name else 3
            found.append((rank, len(path), path, places))
    return [Match(path, places) for *_, path, places in heapq.nsmallest(most, found)]
