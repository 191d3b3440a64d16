"""The loop: draft, verify, accept, roll back; and plain steps that run ahead.

Speculative decoding after Leviathan et al. (2023), section 2, with a drafter in the place of the
small model; it yields exactly what the target alone would say (see `sampling` for temperatures).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from akunu_py.decoding import kvcache
from akunu_py.decoding.sampling import Sampler
from akunu_py.types import Drafter, Piece, SamplingOptions

PREFILL_CHUNK = 512  # positions; bounds memory, and is how soon a cancellation takes effect
_MARKS = 8  # how many places one timeline can go back to where its cache cannot be rewound,
_RECENT = 4  # how many of them are always the last ones,
_MARK_BYTES = 512 << 20  # and what they may take together; one is kept in any case
_MARK_EVERY = 2048  # positions of a long prompt between two of them
_HELD_BACK = 16  # longer than what a template adds to ask for an answer, and takes back later
_CARRY = 8  # pending tokens above which a pass settles them instead of adding a draft
_BLOCK = 256  # tokens compared at once
_CLEAR_EVERY = 256  # passes between giving MLX's buffer cache back, as mlx-lm does


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to go back to: the first `length` tokens of the timeline are in the cache."""

    length: int
    state: kvcache.Checkpoint


class Target:
    """A model and one timeline of tokens.

    tokens: what the KV cache holds. pending: tokens that are known to follow but are not in the
    cache yet; they are the first rows of the next pass. There is one, the last token said, unless
    a prompt was just read or the cache is recurrent and was set back behind what was accepted.

    Where the cache cannot be rewound at will, the timeline is marked at the end of each prompt and
    answer and along long prompts, and goes back to the last mark that it shares.
    """

    def __init__(self, model: Any, kv_bits: int | None = None) -> None:
        """kv_bits: see `kvcache.new_cache`, which may refuse it with UsageError."""
        self.model = model
        self.vocabulary: int | None = None  # tokens that the model tells apart, after a pass
        self._kv_bits = kv_bits
        self.sampler = Sampler(SamplingOptions())
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.cache = kvcache.new_cache(self.model, self._kv_bits)
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self.marks: list[Mark] = []
        self._needs_marks = kvcache.needs_checkpoints(self.cache)

    def adopt(self, cache: kvcache.Cache, tokens: Sequence[int], pending: Sequence[int]) -> None:
        """Takes over a timeline: `cache` holds `tokens`, and `pending` follow."""
        self.reset()
        self.cache, self.tokens, self.pending = cache, list(tokens), list(pending)

    @property
    def held_back(self) -> int:
        """How many tokens of a prompt are left for the first pass of its answer, at most.

        Where going back needs a mark, the mark must be before what asks for the answer: the next
        turn may put it differently.
        """
        return 1 + (_HELD_BACK if self._needs_marks else 0)

    def forward(self, tokens: mx.array) -> mx.array:
        """Runs `tokens` [rows] through the model, behind what the cache holds.

        Returns logits [rows, vocab], not yet evaluated.
        """
        return self.model(tokens[None], cache=self.cache)[0]

    def sample(self, rows: mx.array, wanted: int, known: Sequence[int]) -> mx.array:
        """What the target says after each of the last `wanted` of `rows`, not yet evaluated.

        known: the tokens before `rows`; those of a step under way need not be in `self.tokens`.
        """
        logits = self.forward(rows)[-wanted:]
        self.vocabulary = logits.shape[-1]
        window = self.sampler.window
        before = mx.concatenate([mx.array(known[-window:], mx.int32), rows]) if window else rows
        return self.sampler.sample(logits, before, len(known) + rows.shape[0] - wanted + 1)

    def commit(self, said: Sequence[int], kept: int) -> None:
        """Books that the cache now holds `kept` of the pending and the newly `said` tokens."""
        known = [*self.pending, *said]
        self.tokens += known[:kept]
        self.pending = known[kept:]

    def mark(self) -> None:
        """Makes the end of `tokens` a place that `reuse_prefix` can return to, if it needs any."""
        if not self._needs_marks or not self.tokens or len(self.tokens) == self.marked:
            return
        self.marks.append(Mark(len(self.tokens), kvcache.checkpoint(self.cache)))
        while len(self.marks) > _MARKS:
            # Without it going there means reading on from the one before: where that is least.
            ends = [0, *(mark.length for mark in self.marks)]
            del self.marks[min(range(_MARKS - _RECENT + 1), key=lambda i: ends[i + 1] - ends[i])]
        while len(self.marks) > 1 and sum(m.state.nbytes for m in self.marks) > _MARK_BYTES:
            del self.marks[0]

    @property
    def marked(self) -> int:
        """Where the last mark is, 0 where there is none."""
        return self.marks[-1].length if self.marks else 0

    def reuse_prefix(self, prompt: Sequence[int]) -> int:
        """Makes `prompt` the timeline: keeps what the cache shares with it, the rest is pending.

        Its last token is always pending. Returns how many tokens the cache keeps.
        """
        known = min(common_prefix(self.tokens, prompt), len(prompt) - 1)
        if known == len(self.tokens):
            self.mark()
        self.marks = [mark for mark in self.marks if mark.length <= known]
        if kvcache.can_rewind(self.cache, len(self.tokens) - known):
            kvcache.rewind(self.cache, len(self.tokens) - known)
            del self.tokens[known:]
        elif self.marks:
            kvcache.restore(self.cache, self.marks[-1].state)
            del self.tokens[self.marked :]
        else:
            self.reset()
        self.pending = list(prompt[len(self.tokens) :])
        return len(self.tokens)


def prefill(target: Target, go_on: Callable[[int], bool]) -> bool:
    """Reads the pending tokens into the cache, a chunk at a time, and marks the end.

    The last `target.held_back` are left to be the first rows of the next pass. `go_on` is told how
    many were read, before each chunk and at the end; where it says no, reading stops there and the
    result is False.
    """
    done = 0
    while go_on(done):
        chunk = target.pending[: -target.held_back][:PREFILL_CHUNK]
        if not chunk or len(target.tokens) >= target.marked + _MARK_EVERY:
            target.mark()
        if not chunk:
            return True
        target.forward(mx.array(chunk))
        # Only the cache is evaluated: the logits of a prompt are never computed.
        mx.eval([entry.state for entry in target.cache])
        target.commit((), len(chunk))
        done += len(chunk)
        mx.clear_cache()
    return False


def decode(
    target: Target,
    drafter: Drafter,
    limit: int,
    stop: Collection[int],
    *,
    plain_steps_before_pipelining: int | None,
) -> Generator[Piece]:
    """Yields a piece per pass: up to `limit` tokens, ending with a token of `stop` if it comes.

    `drafter` knows all tokens up to and with the pending ones, and observes what follows. Where it
    drafted nothing `plain_steps_before_pipelining` times in a row (None: however often), plain
    steps are pipelined: each is dispatched before the one before it is collected. That hides the
    time between two steps, and costs a pass when the drafter has a draft again.
    """
    ahead: mx.array | None = None  # what a plain step that is under way will say
    last = time.perf_counter()
    passes = idle = 0
    try:
        while limit > 0:
            started = last if ahead is not None else time.perf_counter()
            room = limit - 1 if len(target.pending) <= _CARRY else 0
            draft = clip_to_vocabulary(drafter.propose(room), target.vocabulary)
            rows = len(target.pending) + len(draft)
            idle = 0 if draft else idle + 1
            if ahead is None and (
                draft
                or plain_steps_before_pipelining is None
                or idle <= plain_steps_before_pipelining
            ):
                tokens, accepted = speculate(target, draft, stop)
            else:
                sampled = dispatch(target) if ahead is None else ahead
                # A draft is waiting: read what is under way, and launch nothing behind it.
                ahead = None if draft or limit == 1 else dispatch(target, sampled)
                draft, rows = drafter.propose(0), len(target.pending)
                tokens, accepted = collect(target, sampled, ahead), 0
            last = time.perf_counter()
            drafter.observe(accepted, rows, last - started)
            drafter.extend(tokens)
            limit = 0 if tokens[-1] in stop else limit - len(tokens)
            passes += 1
            if passes % _CLEAR_EVERY == 0:
                mx.clear_cache()
            yield Piece(tuple(tokens), accepted, tuple(draft[accepted:]), last - started)
    finally:
        if ahead is not None:  # the step that nobody will read has put its token into the cache
            target.commit((), 1)


def clip_to_vocabulary(draft: list[int], vocabulary: int | None) -> list[int]:
    """`draft` up to the first token that the model does not have. What is drafted from may come
    from a file, and MLX does not check where in a table of embeddings it reads."""
    if vocabulary is None or not draft or 0 <= min(draft) <= max(draft) < vocabulary:
        return draft
    return draft[: next(at for at, token in enumerate(draft) if not 0 <= token < vocabulary)]


def dispatch(target: Target, after: mx.array | None = None) -> mx.array:
    """A plain step over the pending tokens, or over the token that the step under way will say."""
    if after is None:
        return target.sample(mx.array(target.pending), 1, target.tokens)
    return target.sample(after, 1, [*target.tokens, *target.pending])


def collect(target: Target, sampled: mx.array, ahead: mx.array | None) -> list[int]:
    """Reads a plain step that was launched, while the one behind it, if any, is under way."""
    mx.async_eval(sampled, *([] if ahead is None else [ahead]))
    token = int(sampled.item())
    target.commit([token], len(target.pending))
    return [token]


def speculate(target: Target, draft: Sequence[int], stop: Collection[int]) -> tuple[list[int], int]:
    """One pass over the pending tokens and a draft -> the new tokens, and how many were drafted."""
    before = kvcache.pass_state(target.cache)
    rows = [*target.pending, *draft]
    sampled = verify(target, rows, 1 + len(draft))
    accepted = accept(draft, sampled)
    tokens = cut(sampled[: accepted + 1], stop)
    kept = len(target.pending) + len(tokens) - 1
    if kept < len(rows):
        kept = kvcache.roll_back(target.cache, before, len(rows), kept)
    target.commit(tokens, kept)
    return tokens, min(accepted, len(tokens))


def verify(target: Target, rows: list[int], wanted: int) -> list[int]:
    """What the target says after each of the last `wanted` of `rows`, in one pass."""
    return [int(token) for token in target.sample(mx.array(rows), wanted, target.tokens).tolist()]


def accept(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many tokens of the draft the target says too, up to the first that it does not."""
    return common_prefix(draft, sampled)


def cut(tokens: list[int], stop: Collection[int]) -> list[int]:
    """`tokens` up to and with the first that is in `stop`."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both start with."""
    length = min(len(left), len(right))
    same = 0
    while same < length and left[same : same + _BLOCK] == right[same : same + _BLOCK]:
        same += _BLOCK  # lists are compared ten times as fast as token by token
    while same < length and left[same] == right[same]:
        same += 1
    return min(same, length)
