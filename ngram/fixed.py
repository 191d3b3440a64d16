"""Drafters that do not adapt: `--draft fixed` (n-gram counts) and `--draft off`."""

from collections.abc import Iterable, Sequence

from akunu_py.types import DraftGuide, PassCosts

ORDERS = (2, 3, 4)  # of the n-gram; its context is one token shorter
LONGEST_CONTEXT = ORDERS[-1] - 1
WINDOW = 512
DEFAULT_LIMIT = 4

FNV_OFFSET_BASIS = 14695981039346656037
FNV_PRIME = 1099511628211
_MASK = (1 << 64) - 1


def fnv1a(tokens: Iterable[int]) -> int:
    """Return the 64-bit FNV-1a hash of `tokens` (Fowler, Noll and Vo), one round per token."""
    digest = FNV_OFFSET_BASIS
    for token in tokens:
        digest = ((digest ^ token) * FNV_PRIME) & _MASK
    return digest


class Predictor:
    """Counts n-grams of orders 2, 3 and 4, and drafts the most frequent continuation."""

    def __init__(self) -> None:
        self.history: list[int] = []
        # By order: FNV-1a hash of the order - 1 tokens of context -> {next token: count}.
        self.tables: dict[int, dict[int, dict[int, int]]] = {order: {} for order in ORDERS}

    def update(self, token: int) -> None:
        """Count `token` after each context, then append it."""
        history = self.history
        for order in ORDERS:
            if len(history) < order - 1:
                break
            counts = self.tables[order].setdefault(fnv1a(history[1 - order :]), {})
            counts[token] = counts.get(token, 0) + 1
        history.append(token)
        if len(history) > 2 * WINDOW:  # trimmed in blocks; `window` is exact
            del history[:-WINDOW]

    def update_batch(self, tokens: Sequence[int]) -> None:
        """Call `update` for each of `tokens`."""
        for token in tokens:
            self.update(token)

    @property
    def window(self) -> list[int]:
        return self.history[-WINDOW:]

    def predict(self, limit: int = DEFAULT_LIMIT, guide: DraftGuide | None = None) -> list[int]:
        """Draft up to `limit` tokens, each after the longest known context.

        Of equally frequent continuations the first seen wins. A grammar's forced tokens come first,
        and a forbidden token ends the draft.
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


class NoDrafter:
    """A `Drafter` that drafts nothing: every pass is a plain step."""

    pipelines = True

    def extend(self, tokens: Sequence[int]) -> None:
        """Ignored."""

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        return []

    def offer(self, limit: int, known: PassCosts | None = None) -> list[float]:
        return []

    def take(self, count: int) -> list[int]:
        return []

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        """Ignored."""


class FixedDrafter(NoDrafter):
    """A `Drafter` that drafts up to `draft_tokens` tokens at every pass."""

    pipelines = False

    def __init__(self, draft_tokens: int = DEFAULT_LIMIT) -> None:
        if draft_tokens < 0:
            raise ValueError(f"draft_tokens must be 0 or more, got {draft_tokens}")
        self.draft_tokens = draft_tokens
        self.guide: DraftGuide | None = None
        self.predictor = Predictor()
        self._offered: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.predictor.update_batch(tokens)

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        if self.guide is None:
            return self.predictor.predict(min(limit, self.draft_tokens))
        self.guide.begin_draft()
        draft = self.predictor.predict(min(limit, self.draft_tokens), self.guide)
        self.guide.end_draft()
        return draft

    def offer(self, limit: int, known: PassCosts | None = None) -> list[float]:
        """Return a chance of 1 for each token; the planner of shared passes may take fewer."""
        self._offered = self.propose(limit)
        return [1.0] * len(self._offered)

    def take(self, count: int) -> list[int]:
        return self._offered[:count]
