"""Neural drafters that continue from the target's hidden states: heads, and drafters of a block.

Row i of their cache belongs to position i. It exists once the target has the hidden states of that
position, so the newest token has none: drafts begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.engine.drafters.neural import NeuralDrafterBase
from akunu_py.engine.model import output_rows
from akunu_py.engine.model.drafters import PublishedDrafter
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.target import Target
from akunu_py.models.drafters.block import CONTEXT, BlockDrafter, ContextCache
from akunu_py.models.mtp import Trunk
from akunu_py.ngram.neural_plan import TokenView
from akunu_py.weak_cache import cached_weakly

_PASS = 33  # maximum rows of a decode pass


class StateHistory:
    """Hidden states of the target and rows of the drafter, for one history."""

    def __init__(self, cache: kv_cache.Cache, kept: int) -> None:
        """cache: of the drafter, empty. kept: minimum number of states to keep."""
        self._parts: list[tuple[int, mx.array]] = []  # (position of the first, [1, rows, width])
        self._kept = kept
        self.restart(cache, 0)

    def restart(self, cache: kv_cache.Cache, first: int) -> None:
        """Begin with no rows. first: position of the first row of `cache`."""
        self.cache, self.first = cache, first
        self.seen: list[int] = []  # the token after each row

    @property
    def start(self) -> int:
        """The first position with a state."""
        return self._parts[0][0] if self._parts else 0

    @property
    def end(self) -> int:
        """The position after the last state."""
        return self._parts[-1][0] + self._parts[-1][1].shape[1] if self._parts else 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self._parts) + kv_cache.nbytes(self.cache)

    def write(self, position: int, states: mx.array) -> None:
        """Write states [1, rows, width] from `position` on, replacing later ones."""
        while self._parts and self.end > position:
            first, part = self._parts.pop()
            if first < position:
                self._parts.append((first, part[:, : position - first]))
        if self.end != position:
            self._parts = []
        self._parts.append((position, states))
        while self.end - self._parts[0][0] - self._parts[0][1].shape[1] >= self._kept:
            del self._parts[0]

    def read(self, begin: int, end: int) -> mx.array:
        """Return the states of positions [begin, end), [1, rows, width]."""
        found = [
            part[:, max(0, begin - first) : end - first]
            for first, part in self._parts
            if first < end and first + part.shape[1] > begin
        ]
        return mx.concatenate(found, axis=1) if len(found) > 1 else found[0]


class HiddenStateDrafter(NeuralDrafterBase):
    """A `NeuralDrafter` of hidden states. Its rows stay with the target's history."""

    _kept = 512  # hidden states to keep of a prompt

    def __init__(self, network: Any, target: Target, key: str, share: float) -> None:
        """network: see `state_drafter.py`. share: see `relative_cost`."""
        super().__init__(target)
        self._network, self.longest = network, network.longest
        self.parallel = network.is_parallel
        self.key, self.relative_cost = key, share
        self.taps = (len(target.model.layers),) if network.needs_final else network.taps
        scaled = network.takes_scaled_embeddings
        self._ends = ScaledTrunk(target.model) if scaled else Trunk(target.model)
        self._position = 0  # of the first row of the target's pass
        self._draft: Any = None
        self._depth = 0  # tokens of the draft

    def make_cache(self, first: int) -> kv_cache.Cache:
        """Return an empty cache of the drafter. first: position of its first row."""
        return self._network.make_cache()

    def begin(self, states: mx.array, tokens: Sequence[int]) -> Any:
        """Add rows to the cache, then begin a draft; return None if that is impossible.

        states: new ones of the target, [1, rows, width]. tokens: those after the positions of
        these rows; more follow if n-gram predictions precede the draft.
        """
        raise NotImplementedError

    @property
    def _history(self) -> StateHistory:
        histories = self._target.history.drafter_histories
        if self.key not in histories:
            histories[self.key] = StateHistory(self.make_cache(0), self._kept)
        return histories[self.key]

    @property
    def prefilled(self) -> int:
        history = self._history
        return max(history.first + len(history.seen), history.start)

    def before_pass(self, cache: kv_cache.Cache) -> None:
        self._draft = None  # it may hold the target's keys, which the pass would have to copy
        self._position = next(
            each.offset for each in kv_cache.leaves(cache) if hasattr(each, "offset")
        )

    def keep_states(self, hidden: mx.array) -> None:
        end = self._position + hidden.shape[1]
        if hidden.shape[1] > _PASS:  # of a prompt, whose logits are not computed
            states = mx.contiguous(self._network.states(hidden[:, -self._kept :]))
            mx.async_eval(states)
        else:
            states = self._network.states(hidden)
        self._history.write(end - states.shape[1], states)

    def move_rows(self, rows: Sequence[int]) -> None:
        history, first = self._history, self._position
        history.write(first, history.read(first, history.end)[:, mx.array(rows)])

    def start_draft(self, known: Sequence[int]) -> bool:
        self._known = TokenView.of(known)
        history = self._history
        start = history.first + 1
        unchanged = self._known.unchanged if history is self._compared else 0
        same = min(max(0, unchanged - start), len(history.seen))
        self._keep(same + common_prefix(history.seen[same:], known[start + same :]))
        self._draft, self._depth, self._compared = None, 0, history
        return True

    def _keep(self, rows: int) -> None:
        """Keep only the first `rows` rows, and none of the last draft."""
        history = self._history
        for entry in kv_cache.leaves(history.cache):
            if isinstance(entry, ContextCache):
                entry.cut(history.first + rows)
            else:
                entry.trim(max(0, entry.offset - rows))
        del history.seen[rows:]

    def draft_token(self) -> tuple[int, float]:
        if self._draft is None:
            self._draft = self._begin()
        if self._draft is None or self._depth >= self.longest:
            return -1, 0.0
        drafted = self._sample(self._draft.logits(self._depth, self._known[-1]))
        self._depth += 1
        return drafted

    def _begin(self) -> Any:
        target, history = self._target, self._history
        # Later states may belong to rejected drafts.
        end = min(history.end, len(target.tokens) + len(target.pending) - 1, len(self._known) - 1)
        # At least one row, for its output.
        begin = min(history.first + len(history.seen), end - 1) - self._network.overlap
        begin = max(history.first, begin)
        if begin < history.start:
            begin = history.start
            history.restart(self.make_cache(begin), begin)
        if begin >= end:
            return None
        self._keep(begin - history.first)
        after = self._known[begin + 1 :]
        history.seen += after[: end - begin]
        return self.begin(history.read(begin, end), after)


class HeadDrafter(HiddenStateDrafter):
    """Drafts token by token, each from the hidden state of the one before it: all other kinds.

    Row i of its cache combines the target's hidden state at position i with the next token, and
    predicts the token after that. Further draft tokens use its own hidden states; these rows are
    computed again once the target's states exist.
    """

    def begin(self, states: mx.array, tokens: Sequence[int]) -> Any:
        network, rows, cache = self._network, states.shape[1], self._history.cache
        embeddings = network.embed(mx.array([tokens[:rows]], mx.int32), self._ends)
        made = network.extend(states, embeddings, cache)
        attended = self._target.cache if network.attends_to_target else cache
        draft = network.start(self._ends, made, attended)
        self._depth = len(tokens) - rows  # predictions after the newest token
        for depth, token in enumerate(tokens[rows - 1 : -1][: self.longest]):
            draft.logits(depth, token)
        return draft


class ParallelDrafter(HiddenStateDrafter):
    """Drafts a block of tokens in one pass: DFlash, DFlash2 and DSpark."""

    _kept = CONTEXT

    def make_cache(self, first: int) -> kv_cache.Cache:
        return self._network.make_cache(self._kept, first)

    def begin(self, states: mx.array, tokens: Sequence[int]) -> Any:
        self._network.extend(states, None, self._history.cache)
        if len(tokens) > states.shape[1]:  # the anchor's predecessors have no states
            return None
        return self._network.start(self._ends, self._known[-1], self._history.cache)

    def draft_token(self) -> tuple[int, float]:
        previous = self._known[-1]
        token, chance = super().draft_token()
        if self._draft is not None and token >= 0:
            stated = self._draft.confidence(self._depth - 1, previous)
            chance = chance if stated is None else stated
        return token, chance


def published_drafter(published: PublishedDrafter, target: Target) -> HiddenStateDrafter:
    """Return the drafter of its kind."""
    kind = ParallelDrafter if isinstance(published.model, BlockDrafter) else HeadDrafter
    return kind(published.model, target, published.key, published.relative_cost)


class ScaledTrunk(Trunk):
    """A trunk whose embeddings are scaled for the first layer, as some families do."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._scale = _embedding_scale(model)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the inputs [1, rows, width] of the first layer for tokens [1, rows]."""
        return super().embed(tokens) * self._scale


@cached_weakly
def _embedding_scale(model: Any) -> float:
    """Return the ratio of the first layer's inputs to the embeddings."""
    tokens = mx.arange(8)[None]
    cache = kv_cache.new_cache(model)
    inputs = output_rows.run(model, tokens, cache, lambda rows: rows, [-1])[1][-1]
    raw = Trunk(model).embed(tokens)
    return float((mx.sum(inputs * raw) / mx.sum(raw * raw)).item())
