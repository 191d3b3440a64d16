"""Prompt lookup as transformers does it, for comparison in replays. Not used by the engine.

Owns the search alone: the last n tokens, n from 3 down to 1, are searched in everything said so
far, and what followed their first occurrence is the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NGRAM = 3
DRAFT_TOKENS = 10


class PromptLookupDrafter:
    """A `Drafter` after transformers' `PromptLookupCandidateGenerator` (its defaults, 10 tokens).

    Source: Saxena, Prompt Lookup Decoding (2023), as adopted by transformers. The earliest
    match wins there, also over a later one.
    """

    def __init__(self, draft_tokens: int = DRAFT_TOKENS, max_ngram: int = MAX_NGRAM) -> None:
        self.draft_tokens = draft_tokens
        self.max_ngram = max_ngram
        self.timeline: list[int] = []
        # First position after each n-gram that something follows, by the n-gram.
        self._first: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        timeline = self.timeline
        for token in tokens:
            end = len(timeline)
            for n in range(1, min(self.max_ngram, end) + 1):
                self._first.setdefault(tuple(timeline[end - n : end]), end)
            timeline.append(token)

    def propose(self, limit: int) -> list[int]:
        end = len(self.timeline)
        for n in range(min(self.max_ngram, end), 0, -1):
            start = self._first.get(tuple(self.timeline[end - n : end]))
            if start is not None:
                return self.timeline[start : start + min(limit, self.draft_tokens)]
        return []

    def observe(self, accepted: int, rows: int, seconds: float) -> None:
        """Ignored: prompt lookup does not adapt."""
