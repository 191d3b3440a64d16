"""The loop: draft, verify, accept, roll back; and plain steps that run ahead.

Speculative decoding after Leviathan et al. (2023), section 2, with a drafter in the place of the
small model; under greedy decoding it yields exactly what the target alone would say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import mlx.core as mx

from akunu_py import kvcache
from akunu_py.sampling import greedy
from akunu_py.types import Drafter, Piece

PREFILL_CHUNK = 512  # positions; bounds memory, and is how soon a cancellation takes effect
_CLEAR_EVERY = 256  # positions between giving MLX's buffer cache back, as mlx-lm does


class Target:
    """A model and one timeline of tokens in its KV cache.

    The last known token is always *pending*: known, but not yet in the cache. It is the first
    input of the next pass.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = kvcache.new_cache(model)
        self.tokens: list[int] = []  # what the cache holds

    def forward(self, tokens: mx.array) -> mx.array:
        """Runs `tokens` [rows] through the model, behind what the cache holds.

        Returns the tokens that the target says after each of them, [rows], not yet evaluated.
        """
        return greedy(self.model(tokens[None], cache=self.cache)[0])

    def roll_back(self, positions: int) -> None:
        """Forgets the last `positions` positions of the cache."""
        kvcache.roll_back(self.cache, positions)

    def reset(self) -> None:
        """Forgets everything."""
        self.cache = kvcache.new_cache(self.model)
        self.tokens = []

    def rewind(self, length: int) -> None:
        """Goes back to the first `length` tokens."""
        self.roll_back(len(self.tokens) - length)
        del self.tokens[length:]


def prefill(target: Target, tokens: Sequence[int], go_on: Callable[[int], bool]) -> bool:
    """Reads `tokens` into the cache, a chunk at a time.

    `go_on` is told how many were read, before each chunk and at the end; where it says no, reading
    stops there and the result is False.
    """
    for start in range(0, len(tokens), PREFILL_CHUNK):
        if not go_on(start):
            return False
        chunk = list(tokens[start : start + PREFILL_CHUNK])
        target.forward(mx.array(chunk))
        # Only the cache is evaluated: the logits of a prompt are never computed.
        mx.eval([entry.state for entry in target.cache])
        target.tokens += chunk
        mx.clear_cache()
    return go_on(len(tokens))


def decode(
    target: Target,
    pending: int,
    drafter: Drafter,
    limit: int,
    stop: Collection[int],
    *,
    runs_ahead: bool,
) -> Generator[Piece]:
    """Yields a piece per pass: up to `limit` tokens, ending with a token of `stop` if it comes.

    `drafter` knows all tokens up to and with `pending`, and is told what follows. Where it drafts
    nothing and `runs_ahead` holds, plain steps are pipelined: each is launched before the one
    before it is read. Whenever the caller stops, the cache holds all known tokens but the last.
    """
    ahead: mx.array | None = None  # what a plain step that is under way will say
    last = time.perf_counter()
    try:
        while limit > 0:
            started = last if ahead is not None else time.perf_counter()
            known = len(target.tokens)
            draft = drafter.propose(limit - 1)
            if ahead is None and (draft or not runs_ahead):
                tokens, accepted = speculate(target, pending, draft, stop)
            else:
                says = target.forward(mx.array([pending])) if ahead is None else ahead
                # A draft is waiting: read what is under way, and launch nothing behind it.
                ahead = None if draft or limit == 1 else target.forward(says)
                draft = drafter.propose(0)
                tokens, accepted = plain(target, pending, says, ahead), 0
            if len(target.tokens) // _CLEAR_EVERY != known // _CLEAR_EVERY:
                mx.clear_cache()
            last = time.perf_counter()
            drafter.feedback(accepted, last - started)
            drafter.extend(tokens)
            pending = tokens[-1]
            limit = 0 if pending in stop else limit - len(tokens)
            yield Piece(tuple(tokens), accepted, tuple(draft[accepted:]), last - started)
    finally:
        if ahead is not None:
            target.roll_back(1)


def plain(target: Target, pending: int, says: mx.array, ahead: mx.array | None) -> list[int]:
    """Reads a step that was launched, while the one behind it, if any, is under way."""
    mx.async_eval(says, *([] if ahead is None else [ahead]))
    target.tokens.append(pending)
    return [int(says.item())]


def speculate(
    target: Target, pending: int, draft: list[int], stop: Collection[int]
) -> tuple[list[int], int]:
    """One pass over the pending token and a draft -> the new tokens, and how many were drafted."""
    says = verify(target, [pending, *draft])
    accepted = accept(draft, says)
    tokens = cut(says[: accepted + 1], stop)
    target.roll_back(1 + len(draft) - len(tokens))
    target.tokens += [pending, *tokens[:-1]]
    return tokens, min(accepted, len(tokens))


def verify(target: Target, tokens: list[int]) -> list[int]:
    """What the target says after each of `tokens`, in one pass."""
    return [int(token) for token in target.forward(mx.array(tokens)).tolist()]


def accept(draft: Sequence[int], says: Sequence[int]) -> int:
    """How many tokens of the draft the target says too, up to the first that it does not."""
    for index, (drafted, said) in enumerate(zip(draft, says, strict=False)):
        if drafted != said:
            return index
    return len(draft)


def cut(tokens: list[int], stop: Collection[int]) -> list[int]:
    """`tokens` up to and with the first that is in `stop`."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens
