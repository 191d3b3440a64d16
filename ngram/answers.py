"""Where a prompt has earlier answers of the model. It repeats its own ways more than what it was
told: what followed a token or two there comes again twice as often as what followed elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

# Tokens that open an answer, at the end of a prompt: the end of the turn before, and the header of
# the model's. Fewer come by chance where a prompt is a text to go on with.
OPENING = 5


def find_answers(tokens: list[int], start: int, searched: int = 0) -> Iterator[tuple[int, int]]:
    """(start, end) of the answers that begin at `searched` or later, before the one at `start`.

    They begin behind the tokens that are before `start`, too, and end where two neighbours of these
    come again, of which the first is included.
    """
    opening = tokens[max(0, start - OPENING) : start]
    ends = set(pairwise(opening))
    place = max(searched - OPENING, 0)
    while len(opening) == OPENING:
        try:
            place = tokens.index(opening[0], place, start - OPENING)
        except ValueError:
            return
        if tokens[place : place + OPENING] != opening:
            place += 1
            continue
        begin = end = place + OPENING
        while end < start - 1 and (tokens[end], tokens[end + 1]) not in ends:
            end += 1
        yield begin, end + 1
        place = end
