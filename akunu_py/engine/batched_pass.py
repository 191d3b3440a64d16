"""One forward pass over the rows of several requests.

The rows of all requests enter the model as tokens [rows, 1]. Each layer sees a view over the
requests' own caches, so that attention runs per request on its own keys, and everything bound by
weights (projections, MLP, experts, output head) runs once. Caches are neither merged nor copied.
"""

import copy
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from akunu_py.engine import kv_cache
from akunu_py.engine.model import output_rows
from akunu_py.errors import one_line
from akunu_py.ngram.token_tree import TokenTree

_KNOWN = (KVCache, QuantizedKVCache, RotatingKVCache, ArraysCache)
# Tolerance of the trial of batching, in the logits' deviation: at least, at most, and in the
# difference between passes of some rows and of twice as many.
_TOLERANCE, _MOST_TOLERANCE, _NOISE = 0.05, 0.5, 2.0


class PassFollower:
    """Follows the passes of a request, such as a neural drafter. By default it does nothing."""

    taps: Sequence[int] = ()  # hidden states that it uses; see `output_rows.run`

    def before_pass(self, cache: kv_cache.Cache) -> None:
        """Prepare for a pass on `cache`."""

    def keep_states(self, hidden: mx.array) -> None:
        """Keep the hidden states [1, rows, width of all taps] of that pass, if there are taps."""

    def move_rows(self, rows: Sequence[int]) -> None:
        """Move these rows of that pass to its first ones; see `kv_cache.move_rows`."""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one request in a pass."""

    tokens: mx.array  # [rows]
    cache: kv_cache.Cache
    wanted: int | None = None  # last rows to compute logits for; None: all
    followers: Sequence[PassFollower] = ()
    tree: TokenTree | None = None  # the last rows, if they are a draft with branches


# By the first request's cache of a layer, and the index of a state: the joint states of the last
# shared pass, and those of each request.
Joint = dict[tuple[int, int], tuple[mx.array, list[mx.array]]]


def run(model: Any, parts: Sequence[Part], joint: Joint | None = None) -> list[mx.array]:
    """Run one pass over all parts. Returns lazy logits [wanted, vocab] for each part.

    Parts of recurrent caches have one row if there are several; see `why_not_batched`.
    joint: of the last pass, so that states are not copied while the requests are the same.
    """
    taps: set[int] = set()
    for part in parts:
        for each in part.followers:
            each.before_pass(part.cache)
            taps.update(each.taps)
    if len(parts) == 1 and parts[0].tree is None:
        (part,) = parts
        count = part.wanted or part.tokens.size
        if count == part.tokens.size and not taps:
            return [model(part.tokens[None], cache=part.cache)[0]]
        logits, states = output_rows.run(
            model, part.tokens[None], part.cache, lambda rows: rows[:, -count:], sorted(taps)
        )
        _keep_states(part, states)
        return [logits[0]]
    _route_attention()
    ends = list(accumulate(part.tokens.size for part in parts))
    spans = list(pairwise([0, *ends]))
    layouts = [_RowLayout(part.tokens.size, part.tree) for part in parts]
    views = _views([part.cache for part in parts], spans, layouts, {} if joint is None else joint)
    tokens = mx.concatenate([part.tokens for part in parts])
    counts = [part.wanted or part.tokens.size for part in parts]
    last_rows = (range(end - count, end) for end, count in zip(ends, counts, strict=True))
    wanted = mx.array([row for rows in last_rows for row in rows])
    if sum(counts) == ends[-1] and not taps:
        logits = model(tokens[:, None], cache=views)
    else:
        logits, states = output_rows.run(
            model, tokens[:, None], views, lambda rows: rows[wanted], sorted(taps)
        )
        for part, (start, stop) in zip(parts, spans, strict=True):
            _keep_states(part, {at: each[start:stop].swapaxes(0, 1) for at, each in states.items()})
    return mx.split(logits[:, 0], list(accumulate(counts[:-1])))


def _keep_states(part: Part, states: Mapping[int, mx.array]) -> None:
    for each in part.followers:
        if each.taps:
            each.keep_states(mx.concatenate([states[tap] for tap in each.taps], axis=-1))


class _RowLayout:
    """The positions of a request's rows, and the rows that each one attends to."""

    def __init__(self, rows: int, tree: TokenTree | None) -> None:
        """tree: the last rows, None for a chain."""
        self.positions = list(range(rows))  # relative to the first row
        self.is_tree = tree is not None
        self._masks: dict[int, mx.array] = {}  # by keys; most layers have the same number
        if tree is None:
            return
        before = rows - len(tree)
        seen = [set(range(row + 1)) for row in range(before)]
        for parent in tree.parents:
            row = before + parent
            self.positions[len(seen)] = self.positions[row] + 1
            seen.append({*seen[row], len(seen)})
        self._seen = mx.array([[row in each for row in range(rows)] for each in seen])

    def mask(self, causal: mx.array) -> mx.array:
        """Return the mask [rows, keys] of a tree. causal: the mask of a chain, with a window."""
        rows, keys = causal.shape[-2:]
        seen = mx.concatenate([mx.ones((rows, keys - rows), mx.bool_), self._seen], axis=1)
        at = mx.array(self.positions)
        columns = mx.concatenate([mx.arange(keys - rows), keys - rows + at])
        return seen & causal[at][:, columns]

    def unwindowed_mask(self, keys: int) -> mx.array:
        """Return the mask [rows, keys] of a tree or a chain, without a window."""
        if keys not in self._masks:
            rows = len(self.positions)
            causal = base.create_causal_mask(rows, keys - rows)
            self._masks[keys] = self.mask(causal) if self.is_tree else causal
        return self._masks[keys]


def _views(
    caches: Sequence[kv_cache.Cache],
    spans: Sequence[tuple[int, int]],
    layouts: Sequence[_RowLayout],
    joint: Joint,
) -> list[Any]:
    views: list[Any] = []
    known: dict[tuple[int, ...], mx.array] = {}  # positions by offsets: one array for most layers
    for entries in zip(*caches, strict=True):
        if type(entries[0]) is CacheList:
            views.append(_views([entry.caches for entry in entries], spans, layouts, joint))
        elif type(entries[0]) is ArraysCache:
            views.append(_StateView(entries, joint))
        else:
            offsets = tuple(entry.offset for entry in entries)
            if offsets not in known:
                rows = [
                    offset + position
                    for offset, layout in zip(offsets, layouts, strict=True)
                    for position in layout.positions
                ]
                known[offsets] = mx.array(rows, mx.int32)
            views.append(_AttentionView(entries, spans, layouts, known[offsets]))
    return views


class _PerRequest(list[Any]):
    """One value for each request, passed through the model to `_attention`."""


class _Fetched(_PerRequest):
    """Keys or values of each request, [1, heads, its tokens, dim]."""

    def swapaxes(self, first: int, second: int) -> mx.array:
        """Return the identity [dim, dim]: a product with it returns the queries unchanged.

        Multi-head latent attention multiplies queries by these position keys before it calls
        `_attention`, which multiplies those of each request instead.
        """
        return mx.eye(self[0].shape[-1], dtype=self[0].dtype)


@dataclass(eq=False)
class _AttentionView:
    """One layer's KV caches."""

    entries: Sequence[Any]
    spans: Sequence[tuple[int, int]]
    layouts: Sequence[_RowLayout]
    offset: mx.array  # positions of all rows, [rows]
    values: _PerRequest = field(default_factory=_PerRequest)  # once they are fetched

    def make_mask(self, rows: int, **options: Any) -> _PerRequest | None:
        """Return the masks of all requests, None if `_attention` needs none."""
        masks = _PerRequest()
        for entry, (start, end), layout in zip(self.entries, self.spans, self.layouts, strict=True):
            # With an array, latent attention would mask scores itself; see `_masked`.
            as_array = layout.is_tree and not options.get("return_array")
            mask = entry.make_mask(end - start, **{**options, "return_array": as_array})
            masks.append(layout.mask(mask) if as_array else mask)
        return masks if any(isinstance(mask, mx.array) for mask in masks) else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append rows [rows, heads, 1, dim] to each request's cache; return all keys and values."""
        both = [
            entry.update_and_fetch(own_keys, own_values)
            for entry, own_keys, own_values in zip(
                self.entries, self.split(keys), self.split(values), strict=True
            )
        ]
        keys, self.values = (_Fetched(each) for each in zip(*both, strict=True))
        return keys, self.values

    def split(self, rows: mx.array) -> list[mx.array]:
        """Return each request's part of [rows, heads, 1, dim] as [1, heads, its rows, dim]."""
        parts = mx.split(rows, [start for start, _ in self.spans[1:]])
        return [part if len(part) == 1 else part.swapaxes(0, 2) for part in parts]

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return each request's keys and values, for layers that share them."""
        both = [entry.keys_and_values() for entry in self.entries]
        return _PerRequest(each[0] for each in both), _PerRequest(each[1] for each in both)


@dataclass(eq=False)
class _StateView:
    """One layer's recurrent states; each request has one row."""

    lengths = left_padding = None
    entries: Sequence[Any]
    joint: Joint

    def __getitem__(self, index: int) -> mx.array:
        states = [entry[index] for entry in self.entries]
        joint, rows = self.joint.get((id(self.entries[0]), index), (None, []))
        same = len(rows) == len(states) and all(map(operator.is_, rows, states))
        return joint if same else mx.concatenate(states)

    def __setitem__(self, index: int, value: mx.array) -> None:
        rows = [value[row : row + 1] for row in range(len(self.entries))]
        self.joint[id(self.entries[0]), index] = value, rows
        for row, entry in zip(rows, self.entries, strict=True):
            entry[index] = row

    def make_mask(self, rows: int) -> None:
        """Every row is valid."""

    def advance(self, rows: int) -> None:
        """Lengths are not tracked."""


_plain_attention = base.scaled_dot_product_attention


def _attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **options: Any
) -> mx.array:
    """Run attention for each request on its own keys. queries: [rows, heads, 1, dim].

    mask: a `_PerRequest`, None, or queries for scores to add; see `_Fetched.swapaxes`.
    """
    if type(cache) is not _AttentionView:
        return _plain_attention(queries, keys, values, cache, scale, mask, **options)
    outputs = []
    masks = cache.split(mask) if isinstance(mask, mx.array) else mask
    for index, own_queries in enumerate(cache.split(queries)):
        own_mask = None if masks is None else masks[index]
        rows, layout = own_queries.shape[2], cache.layouts[index]
        entry, own_keys = cache.entries[index], keys[index]
        if isinstance(mask, mx.array):
            own_mask = _masked(own_mask @ cache.values[index].swapaxes(-1, -2), layout)
        elif own_mask is None and layout.is_tree:
            count = (own_keys if isinstance(own_keys, mx.array) else own_keys[0]).shape[-2]
            own_mask = layout.unwindowed_mask(count)
        elif own_mask is None and rows > 1:
            own_mask = "causal"
        output = _plain_attention(
            own_queries, own_keys, values[index], entry, scale, own_mask, **options
        )
        outputs.append(output if rows == 1 else output.swapaxes(0, 2))
    return mx.concatenate(outputs)


def _masked(scores: mx.array, layout: _RowLayout) -> mx.array:
    """Return the scores of the last rows [1, heads, rows, keys], masked."""
    rows, keys = scores.shape[2:]
    if rows == 1:
        return scores
    lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
    return mx.where(layout.unwindowed_mask(keys), scores, lowest)


def _route_attention() -> None:
    """Let all loaded model families call `_attention`, which they import by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models."):
            names = vars(module)
            if names.get("scaled_dot_product_attention") is _plain_attention:
                names["scaled_dot_product_attention"] = _attention


def why_not_batched(model: Any, kv_bits: int | None = None) -> str | None:
    """Return why requests to `model` cannot share a pass, None if they can.

    Compares passes over two requests with passes over each of them alone. In half precision a
    model's results depend a little on the number of rows, so that the tolerance does too.
    """
    empty = kv_cache.new_cache(model, kv_bits)
    unknown = [entry for entry in kv_cache.leaves(empty) if type(entry) not in _KNOWN]
    if isinstance(empty, kv_cache.SharedCache):
        return "it is split over several hosts"
    if unknown:
        return f"its cache ({kv_cache.kinds(unknown)}) cannot be batched"
    rows = (1, 1) if kv_cache.is_recurrent(empty) else (1, 3)
    try:
        caches = [kv_cache.new_cache(model, kv_bits) for _ in _PROMPTS]
        for prompt, cache in zip(_PROMPTS, caches, strict=True):
            mx.eval(model(mx.array([prompt]), cache=cache))
        alone = _trial(model, caches, rows)
        noise = _difference(_trial(model, caches, [2 * each for each in rows], passes=1), alone)
        difference = _difference(_trial(model, caches, rows, batched=True), alone)
    except Exception as error:  # noqa: BLE001 - any failure of a model's code means no batching
        return f"its layers do not support it ({one_line(error, 80)})"
    if not difference <= min(_MOST_TOLERANCE, max(_TOLERANCE, _NOISE * noise)):
        return "its layers give other results in a batch"
    return None


_PROMPTS = tuple(range(1, 41)), tuple(range(17, 0, -1))


def _trial(
    model: Any,
    caches: Sequence[kv_cache.Cache],
    rows: Sequence[int],
    passes: int = 2,
    *,
    batched: bool = False,
) -> list[mx.array]:
    """Return the logits [rows, vocab] of each prompt's first tokens. rows: of each per pass."""
    caches = copy.deepcopy(caches)
    found = []
    for number in range(passes):
        parts = [
            Part(mx.array(prompt[number * count : (number + 1) * count]), cache)
            for prompt, cache, count in zip(_PROMPTS, caches, rows, strict=True)
        ]
        if batched:
            found.append(run(model, parts))
        else:
            found.append([model(part.tokens[None], cache=part.cache)[0] for part in parts])
    return [mx.concatenate(each).astype(mx.float32) for each in zip(*found, strict=True)]


def _difference(these: Sequence[mx.array], others: Sequence[mx.array]) -> float:
    """Return the larger difference of two requests' logits, over their deviation.

    A wrong pass changes all rows. A single row may also change because of another expert.
    """
    differences = []
    for one, other in zip(these, others, strict=True):
        rows = mx.sqrt(mx.mean(mx.square(one - other), axis=-1)) / mx.std(other)
        differences.append(mx.sort(rows)[(len(rows) - 1) // 2])
    return float(mx.max(mx.stack(differences)).item())
