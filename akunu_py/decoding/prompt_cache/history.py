"""A token history: a KV cache, the tokens in it, and the places that it can return to.

A cache that only grows is cut anywhere. The others return to checkpoints: the ends of prompts and
answers, places in long prompts, and where requests parted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from akunu_py.decoding import kv_cache
from akunu_py.decoding.token_ids import common_prefix

_CHECKPOINTS = 8  # how many a history has at most,
_RECENT = 4  # how many of them are always the last ones,
_LEAST_LEFT = 256  # tokens of a history that is shortened
_CHECKPOINT_BYTES = 512 << 20  # and what they may take together; one is kept in any case


class TokenHistory:
    """tokens: what the cache holds. pending: tokens that are known to follow but are not in the
    cache yet; they are the first rows of the next pass. There is one, the last token sampled,
    unless a prompt was just read or the cache is recurrent and was rolled back behind what was
    accepted. checkpoints: where a cache that cannot always be trimmed can return to. marks: after
    how many tokens checkpoints are set while a prompt is read. uses: how often it was kept for
    later. beside: what networks that draft have read of it, by their keys. remember: whether it may
    be kept on disk. conversation, asked: which one asked for it last, "" for none, and when, in
    seconds of `time.time`. reserved: bytes that it may come to take while it is in use.
    """

    def __init__(
        self, cache: kv_cache.Cache, tokens: Sequence[int] = (), pending: Sequence[int] = ()
    ) -> None:
        self.cache = cache
        self.tokens = list(tokens)
        self.pending = list(pending)
        self.checkpoints: list[kv_cache.Checkpoint] = []
        self.marks: frozenset[int] = frozenset()
        self.uses = 0
        self.beside: dict[str, TokenHistory] = {}
        self.remember = True
        self.conversation = ""
        self.asked = 0.0
        self.reserved = 0
        self.needs_checkpoints = kv_cache.needs_checkpoints(cache)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        beside = sum(each.nbytes for each in self.beside.values())
        return kv_cache.nbytes(self.cache) + beside + sum(each.nbytes for each in self.checkpoints)

    @property
    def last_checkpoint(self) -> int:
        """How many tokens the last checkpoint holds, 0 where there is none."""
        return self.checkpoints[-1].length if self.checkpoints else 0

    def checkpoint(self) -> None:
        """Makes the end of `tokens` a place to return to, if the cache needs any."""
        if not self.needs_checkpoints or len(self.tokens) in (0, self.last_checkpoint):
            return
        self.checkpoints.append(kv_cache.checkpoint(self.cache, len(self.tokens)))
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

    @property
    def to_next_mark(self) -> int | None:
        """How many tokens it is to the next one, None where there is none."""
        return min(
            (mark - len(self.tokens) for mark in self.marks if mark > len(self.tokens)),
            default=None,
        )

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens the cache shares with `prompt`, but for its last, which a pass reads."""
        return min(common_prefix(self.tokens, prompt), len(prompt) - 1)

    def reach(self, shared: int) -> int:
        """How many tokens are left where all behind the first `shared` are taken away."""
        if kv_cache.can_trim(self.cache, len(self.tokens) - shared):
            return shared
        return max((each.length for each in self.checkpoints if each.length <= shared), default=0)

    def return_to(self, length: int) -> None:
        """Takes away what is behind the first `length` tokens: a number that `reach` gave."""
        _return(self.cache, len(self.tokens), length, self.checkpoints)
        self.checkpoints = [each for each in self.checkpoints if each.length <= length]
        del self.tokens[length:]
        self.pending = []

    def shorten(self, nbytes: int) -> bool:
        """Takes away so much of the end that about as many bytes are free, what is beside it first.
        False where there is no place to return to that would be worth it."""
        beside, self.beside = sum(each.nbytes for each in self.beside.values()), {}
        if beside >= nbytes:
            return True
        nbytes -= beside
        tokens, size = len(self.tokens), max(1, self.nbytes)
        left = self.reach(max(0, tokens - 1 - nbytes * tokens // size))
        if left < _LEAST_LEFT:
            return False
        self.return_to(left)
        kv_cache.shrink(self.cache)
        return True

    def branch(self, length: int) -> TokenHistory:
        """A history of its own of the first `length` tokens, a number that `reach` gave; this one
        stays as it is."""
        cache = kv_cache.compact(self.cache)
        _return(cache, len(self.tokens), length, self.checkpoints)
        other = TokenHistory(kv_cache.detached(cache), self.tokens[:length])
        other.checkpoints = [each for each in self.checkpoints if each.length <= length]
        return other


def _return(cache: Any, held: int, length: int, checkpoints: Sequence[kv_cache.Checkpoint]) -> None:
    if kv_cache.can_trim(cache, held - length):
        kv_cache.trim(cache, held - length)
    else:
        (back_to,) = (each for each in checkpoints if each.length == length)
        kv_cache.restore(cache, back_to)
