"""`--draft fixed`: akunu's own behaviour, always up to the same number of drafted tokens.

Owns nothing but the ceiling; counting and choosing are the predictor's. It learns nothing from
how its drafts fare.
"""

from __future__ import annotations

from collections.abc import Sequence

from akunu_py.ngram.predictor import DEFAULT_LIMIT, Predictor


class FixedDrafter:
    """A `Drafter` that drafts up to `draft_tokens` tokens at every pass."""

    def __init__(self, draft_tokens: int = DEFAULT_LIMIT) -> None:
        if draft_tokens < 0:
            raise ValueError(f"draft_tokens must be 0 or more, got {draft_tokens}")
        self.draft_tokens = draft_tokens
        self.predictor = Predictor()

    def extend(self, tokens: Sequence[int]) -> None:
        self.predictor.update_batch(tokens)

    def propose(self, limit: int) -> list[int]:
        return self.predictor.predict(min(limit, self.draft_tokens))

    def feedback(self, accepted: int, rows: int, seconds: float) -> None:
        """Ignored: a fixed draft does not adapt."""
