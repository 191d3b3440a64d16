"""Answers that go round in circles, which small models give: drafting those is no achievement."""

from __future__ import annotations

from collections.abc import Sequence

_PERIOD = 64  # tokens; the longest passage that counts as a loop when it comes again and again
_ROUNDS = 3


def loop_start(tokens: Sequence[int]) -> int | None:
    """From where `tokens` only repeat a passage, to their end and at least three times; None where
    they do not."""
    for period in range(1, min(_PERIOD, len(tokens) // _ROUNDS) + 1):
        start = len(tokens) - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= _ROUNDS * period:
            return start
    return None
