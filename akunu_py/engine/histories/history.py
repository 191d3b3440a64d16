"""A token history: a KV cache, its tokens, and checkpoints to return to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from akunu_py.engine import kv_cache
from akunu_py.engine.model.token_ids import reusable_prefix

CHECKPOINT_EVERY = 2048  # tokens of a long prompt between two checkpoints
MAX_CHECKPOINTS = 8  # maximum per history
_KEEP_RECENT = 4  # the last checkpoints are never dropped
_MIN_SHORTENED = 256  # minimum tokens of a history after `shorten`
MAX_CHECKPOINT_BYTES = 512 << 20  # per history; the last checkpoint always stays


@dataclass(frozen=True, slots=True)
class Owner:
    """The request that last used a history."""

    conversation: str  # its id, "" if unknown
    requested_at: float  # time of the request (`time.time`)
    may_store: bool  # on disk


NO_OWNER = Owner("", 0.0, may_store=False)  # no request used the history


class TokenHistory:
    """A KV cache with its tokens, and checkpoints to truncate it."""

    def __init__(
        self,
        cache: kv_cache.Cache,
        owner: Owner,
        tokens: Sequence[int] = (),
        pending: Sequence[int] = (),
    ) -> None:
        self.cache = cache
        self.owner = owner
        self.tokens = list(tokens)  # in the cache
        self.pending = list(pending)  # known tokens for the next pass, not yet in the cache
        self.checkpoints: list[kv_cache.Checkpoint] = []
        self.marks: frozenset[int] = frozenset()  # lengths for checkpoints during prefill
        self.uses = 0  # number of returns to the caches
        self.drafter_histories: dict[str, Any] = {}  # with `nbytes`, by the drafter's key
        self.reserved = 0  # bytes that it may grow to while in use
        self.needs_checkpoints = kv_cache.needs_checkpoints(cache)

    @property
    def nbytes(self) -> int:
        """Total bytes of memory."""
        drafters = sum(each.nbytes for each in self.drafter_histories.values())
        checkpoints = sum(each.nbytes for each in self.checkpoints)
        return kv_cache.nbytes(self.cache) + drafters + checkpoints

    @property
    def last_checkpoint(self) -> int:
        """Length of the last checkpoint, or 0."""
        return self.checkpoints[-1].length if self.checkpoints else 0

    def checkpoint(self) -> None:
        """Set a checkpoint after `tokens`, if the cache needs any."""
        if not self.needs_checkpoints or len(self.tokens) in (0, self.last_checkpoint):
            return
        self.checkpoints.append(kv_cache.checkpoint(self.cache, len(self.tokens)))
        while len(self.checkpoints) > MAX_CHECKPOINTS:
            # Drop the checkpoint whose loss costs the fewest tokens of prefill.
            ends = [0, *(each.length for each in self.checkpoints)]
            older = range(MAX_CHECKPOINTS - _KEEP_RECENT + 1)
            del self.checkpoints[min(older, key=lambda index: ends[index + 1] - ends[index])]
        while (
            len(self.checkpoints) > 1
            and sum(each.nbytes for each in self.checkpoints) > MAX_CHECKPOINT_BYTES
        ):
            del self.checkpoints[0]

    def reach(self, shared: int) -> int:
        """Return how many tokens remain after truncating to at most `shared`."""
        trims = kv_cache.can_trim(self.cache, len(self.tokens) - shared)
        return reusable_prefix(shared, [each.length for each in self.checkpoints], trims=trims)

    def truncate(self, length: int) -> None:
        """Truncate to the first `length` tokens, a result of `reach`."""
        behind = len(self.tokens) - length
        if kv_cache.can_trim(self.cache, behind):
            kv_cache.trim(self.cache, behind)
        else:
            (checkpoint,) = (each for each in self.checkpoints if each.length == length)
            kv_cache.restore(self.cache, checkpoint)
        self.checkpoints = [each for each in self.checkpoints if each.length <= length]
        del self.tokens[length:]
        self.pending = []

    def shorten(self, nbytes: int) -> bool:
        """Free about `nbytes` bytes from the end; False if too little would remain."""
        drafters = sum(each.nbytes for each in self.drafter_histories.values())
        self.drafter_histories = {}
        if drafters >= nbytes:
            return True
        nbytes -= drafters
        tokens, size = len(self.tokens), max(1, self.nbytes)
        length = self.reach(max(0, tokens - 1 - nbytes * tokens // size))
        if length < _MIN_SHORTENED:
            return False
        self.truncate(length)
        kv_cache.shrink(self.cache)
        return True

    def branch(self, length: int, owner: Owner) -> TokenHistory:
        """Return a copy of the first `length` tokens, a result of `reach`, for `owner`."""
        other = TokenHistory(kv_cache.compact(self.cache), owner, self.tokens)
        other.checkpoints = self.checkpoints
        other.truncate(length)
        kv_cache.detach(other.cache)
        return other
