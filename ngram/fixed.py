"""`--draft fixed`, akunu's own behaviour, and `--draft off`: the drafters that do not adapt.

The fixed one's predictor asks what followed this context so far, in counts of orders 2 to 4
(contexts of 1 to 3 tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from akunu_py.types import DraftGuide

ORDERS = (2, 3, 4)  # of the n-gram; its context is one token shorter
LONGEST_CONTEXT = ORDERS[-1] - 1
WINDOW = 512
DEFAULT_LIMIT = 4

FNV_OFFSET_BASIS = 14695981039346656037
FNV_PRIME = 1099511628211
_MASK = (1 << 64) - 1


def fnv1a(tokens: Iterable[int]) -> int:
    """The 64-bit FNV-1a hash of `tokens`, each mixed in whole: xor, then multiply, modulo 2**64.

    Source: Fowler, Noll and Vo; akunu feeds it tokens where the original feeds it bytes.
    """
    digest = FNV_OFFSET_BASIS
    for token in tokens:
        digest = ((digest ^ token) * FNV_PRIME) & _MASK
    return digest


class Predictor:
    """Counts n-grams of 2, 3 and 4 tokens by their contexts, and drafts the most frequent.

    tables: by order, the FNV-1a hash of the order - 1 tokens of context -> {next token: count}.

    The history keeps the last `WINDOW` tokens. The tables keep everything: counts stay when the
    tokens they came from leave the window.
    """

    def __init__(self) -> None:
        self.history: list[int] = []
        self.tables: dict[int, dict[int, dict[int, int]]] = {order: {} for order in ORDERS}

    def update(self, token: int) -> None:
        """Counts `token` after every context that the history allows, then appends it."""
        history = self.history
        for order in ORDERS:
            if len(history) < order - 1:
                break
            counts = self.tables[order].setdefault(fnv1a(history[1 - order :]), {})
            counts[token] = counts.get(token, 0) + 1
        history.append(token)
        if len(history) > 2 * WINDOW:  # trimmed in blocks; `window` is what counts
            del history[:-WINDOW]

    def update_batch(self, tokens: Sequence[int]) -> None:
        """The same as `update` for each of `tokens` in turn."""
        for token in tokens:
            self.update(token)

    @property
    def window(self) -> list[int]:
        """The last `WINDOW` tokens."""
        return self.history[-WINDOW:]

    def predict(self, limit: int = DEFAULT_LIMIT, guide: DraftGuide | None = None) -> list[int]:
        """Drafts up to `limit` tokens, each after the longest context that was seen.

        A drafted token joins the context of the next one. The draft ends at the first position
        where no order knows the context. Of continuations seen equally often the one seen first
        wins: only a strictly greater count displaces it. Where a grammar guides the draft, what it
        forces comes first, and what it forbids ends the draft.
        """
        context = self.history[-LONGEST_CONTEXT:]
        draft: list[int] = []
        forced: list[int] = []
        while len(draft) < limit:
            if guide is not None and not forced:
                forced, _ = guide.forced()
            token = forced.pop(0) if forced else self._continuation(context)
            if token is None or (guide is not None and not guide.advance(token)):
                break
            draft.append(token)
            context = [*context[1 - LONGEST_CONTEXT :], token]
        return draft

    def _continuation(self, context: list[int]) -> int | None:
        for order in reversed(ORDERS):
            if len(context) < order - 1:
                continue
            counts = self.tables[order].get(fnv1a(context[1 - order :]))
            if counts is not None:
                # Dictionaries keep insertion order and max() keeps the first of equals.
                return max(counts, key=counts.__getitem__)
        return None


class FixedDrafter:
    """A `Drafter` that drafts up to `draft_tokens` tokens at every pass."""

    pipelines = False  # as in akunu

    def __init__(self, draft_tokens: int = DEFAULT_LIMIT) -> None:
        if draft_tokens < 0:
            raise ValueError(f"draft_tokens must be 0 or more, got {draft_tokens}")
        self.draft_tokens = draft_tokens
        self.guide: DraftGuide | None = None
        self.predictor = Predictor()

    def extend(self, tokens: Sequence[int]) -> None:
        self.predictor.update_batch(tokens)

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        if self.guide is None:
            return self.predictor.predict(min(limit, self.draft_tokens))
        self.guide.begin_draft()
        draft = self.predictor.predict(min(limit, self.draft_tokens), self.guide)
        self.guide.end_draft()
        return draft

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, behind: bool = False
    ) -> None:
        """Ignored."""


class NoDrafter:
    """A `Drafter` that drafts nothing: every pass is a plain step."""

    pipelines = True

    def extend(self, tokens: Sequence[int]) -> None:
        """Ignored."""

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        return []

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, behind: bool = False
    ) -> None:
        """Ignored."""
