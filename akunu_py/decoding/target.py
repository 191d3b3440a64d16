"""The target model with its KV cache and the token history that the cache holds.

Keeps what the cache shares with the next prompt, and sets checkpoints for that where the cache
cannot be trimmed at will.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from akunu_py.decoding import kvcache
from akunu_py.decoding.constraint import ConstraintMatcher
from akunu_py.decoding.sampling import Sampler
from akunu_py.types import SamplingOptions

_CHECKPOINTS = 8  # how many a target has at most,
_RECENT = 4  # how many of them are always the last ones,
_CHECKPOINT_BYTES = 512 << 20  # and what they may take together; one is kept in any case
_TEMPLATE_TAIL = 16  # tokens; more than what templates add to ask for an answer, and drop later
_BLOCK = 256  # tokens compared at once


class Target:
    """A model, its KV cache, and the tokens in it.

    tokens: what the cache holds. pending: tokens that are known to follow but are not in the cache
    yet; they are the first rows of the next pass. There is one, the last token sampled, unless a
    prompt was just read or the cache is recurrent and was rolled back behind what was accepted.
    checkpoints: where the cache can return to, in caches that cannot always be trimmed: the ends of
    prompts and answers, and places in long prompts.
    """

    def __init__(self, model: Any, kv_bits: int | None = None) -> None:
        """kv_bits: see `kvcache.new_cache`, which may refuse it with UsageError."""
        self.model = model
        self.vocabulary: int | None = None  # width of the logits, known after a pass
        self._kv_bits = kv_bits
        self.sampler = Sampler(SamplingOptions())
        self.constraint: ConstraintMatcher | None = None  # of the answer that is being sampled
        self.reset()

    def reset(self) -> None:
        """Empties the cache and the history."""
        self.cache = kvcache.new_cache(self.model, self._kv_bits)
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self.checkpoints: list[kvcache.Checkpoint] = []
        self._needs_checkpoints = kvcache.needs_checkpoints(self.cache)

    def adopt(self, cache: kvcache.Cache, tokens: Sequence[int], pending: Sequence[int]) -> None:
        """Takes over a loaded prompt cache: `cache` holds `tokens`, and `pending` follow."""
        self.reset()
        self.cache, self.tokens, self.pending = cache, list(tokens), list(pending)

    @property
    def prompt_tail(self) -> int:
        """How many tokens of a prompt are left to the first pass of its answer, at most.

        Where returning needs a checkpoint, it must lie before what asks for the answer: in the
        prompt of the next turn the template may put that differently.
        """
        return 1 + (_TEMPLATE_TAIL if self._needs_checkpoints else 0)

    @property
    def last_checkpoint(self) -> int:
        """How many tokens the last checkpoint holds, 0 where there is none."""
        return self.checkpoints[-1].length if self.checkpoints else 0

    def forward(self, tokens: mx.array) -> mx.array:
        """One pass over `tokens` [rows], behind what the cache holds.

        Returns logits [rows, vocab], not yet evaluated.
        """
        return self.model(tokens[None], cache=self.cache)[0]

    def launch(self, rows: Sequence[int], wanted: int, after: mx.array | None = None) -> mx.array:
        """Starts one pass over `rows`, which nobody waits for.

        after: the token of the plain step that is under way, the first row of this pass then; not
        with a constraint, which needs to know that token.
        Returns the tokens [wanted] sampled after each of the last `wanted` rows.
        """
        tokens = mx.array(rows, mx.int32)
        known, count = self.tokens, len(self.tokens)
        if after is not None:
            tokens = mx.concatenate([after, tokens]) if rows else after
            known, count = (
                [*known[-self.sampler.window - 1 :], *self.pending],
                count + len(self.pending),
            )
        logits = self.forward(tokens)[-wanted:]
        self.vocabulary = logits.shape[-1]
        if self.constraint is not None:
            mx.async_eval(logits)  # the masks are made meanwhile
            logits = self.constraint.masked(logits, rows[len(rows) - wanted + 1 :])
        window = self.sampler.window
        before = mx.concatenate([mx.array(known[-window:], mx.int32), tokens]) if window else tokens
        sampled = self.sampler.sample(logits, before, count + tokens.shape[0] - wanted + 1)
        mx.async_eval(sampled)
        return sampled

    def read(self, sampled: mx.array) -> list[int]:
        """What `launch` returned, once it is there."""
        return [int(token) for token in sampled.tolist()]

    def pass_state(self) -> Any:
        """What `roll_back` needs to undo the pass of several rows that is launched next."""
        return kvcache.pass_state(self.cache)

    def roll_back(self, before: Any, written: int, kept: int) -> int:
        """See `kvcache.roll_back`."""
        return kvcache.roll_back(self.cache, before, written, kept)

    @staticmethod
    def clock() -> float:
        """Seconds, for how long passes take."""
        return time.perf_counter()

    def commit(self, sampled: Sequence[int], kept: int) -> None:
        """Books that the cache now holds the first `kept` of the pending and the sampled tokens."""
        known = [*self.pending, *sampled]
        self.tokens += known[:kept]
        self.pending = known[kept:]

    def checkpoint(self) -> None:
        """Makes the end of `tokens` a place that `reuse_prefix` can return to, if it needs any."""
        if not self._needs_checkpoints or len(self.tokens) in (0, self.last_checkpoint):
            return
        self.checkpoints.append(kvcache.checkpoint(self.cache, len(self.tokens)))
        while len(self.checkpoints) > _CHECKPOINTS:
            # Without it, returning there means reading on from the one before: the least of that.
            ends = [0, *(each.length for each in self.checkpoints)]
            older = range(_CHECKPOINTS - _RECENT + 1)
            del self.checkpoints[min(older, key=lambda index: ends[index + 1] - ends[index])]
        while (
            len(self.checkpoints) > 1
            and sum(each.nbytes for each in self.checkpoints) > _CHECKPOINT_BYTES
        ):
            del self.checkpoints[0]

    def reuse_prefix(self, prompt: Sequence[int]) -> int:
        """Makes `prompt` the history: keeps what the cache shares with it, the rest is pending.

        Its last token is always pending. Returns how many tokens the cache keeps.
        """
        assert kvcache.holds(self.cache, len(self.tokens)), "the cache is not what was booked"
        shared = min(common_prefix(self.tokens, prompt), len(prompt) - 1)
        surplus = len(self.tokens) - shared
        if not surplus:
            self.checkpoint()
        self.checkpoints = [each for each in self.checkpoints if each.length <= shared]
        if kvcache.can_trim(self.cache, surplus):
            kvcache.trim(self.cache, surplus)
            del self.tokens[shared:]
        elif self.checkpoints:
            kvcache.restore(self.cache, self.checkpoints[-1])
            del self.tokens[self.last_checkpoint :]
        else:
            self.reset()
        self.pending = list(prompt[len(self.tokens) :])
        return len(self.tokens)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both start with."""
    length = min(len(left), len(right))
    same = 0
    while same < length and left[same : same + _BLOCK] == right[same : same + _BLOCK]:
        same += _BLOCK  # lists are compared ten times as fast as token by token
    while same < length and left[same] == right[same]:
        same += 1
    return min(same, length)
