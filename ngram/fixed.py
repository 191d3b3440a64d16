"""`--draft fixed`, akunu's own behaviour, and `--draft off`: the drafters that do not adapt."""

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

    def observe(self, accepted: int, rows: int, seconds: float) -> None:
        """Ignored."""


class NoDrafter:
    """A `Drafter` that drafts nothing: every pass is a plain step."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Ignored."""

    def propose(self, limit: int) -> list[int]:
        return []

    def observe(self, accepted: int, rows: int, seconds: float) -> None:
        """Ignored."""
