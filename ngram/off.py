"""No drafting at all: every pass is a plain step."""

from __future__ import annotations

from collections.abc import Sequence


class NoDrafter:
    """The drafter of `--draft off`."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Learns nothing."""

    def propose(self, limit: int) -> list[int]:
        """Drafts nothing."""
        return []

    def feedback(self, accepted: int, rows: int, seconds: float) -> None:
        """Has nothing to learn from."""
