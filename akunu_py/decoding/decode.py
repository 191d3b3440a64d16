"""The decode loop: draft, verify, accept, roll back; and plain steps that are pipelined.

Speculative decoding after Leviathan et al. (2023), section 2, with a drafter in the place of the
small model. The output is exactly that of plain decoding (see `sampling` for temperatures).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

import mlx.core as mx

from akunu_py.decoding.target import Target, common_prefix
from akunu_py.decoding.vocabulary import first_outside
from akunu_py.types import Drafter, Piece

_MAX_PENDING = 8  # tokens; above it a pass runs only these, instead of adding a draft
_CLEAR_EVERY = 256  # passes between giving MLX's buffer cache back, as mlx-lm does


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
    steps are pipelined: each is launched before the one before it is collected. That hides the
    time between two steps, and costs a pass when there is a draft again. Under a constraint what
    a step may sample depends on the one before it, so none are pipelined.
    """
    wait = None if target.constraint is not None else plain_steps_before_pipelining
    ahead: mx.array | None = None  # the token of a plain step that is under way
    last = target.clock()
    passes = idle = 0
    try:
        while limit > 0:
            started = last if ahead is not None else target.clock()
            drafted = draft(target, drafter, limit)
            rows = len(target.pending) + len(drafted)
            idle = 0 if drafted else idle + 1
            if ahead is None and (drafted or wait is None or idle <= wait):
                tokens, accepted = speculate(target, drafted, stop)
            else:
                sampled = target.launch(target.pending, 1) if ahead is None else ahead
                # With a draft at hand, collect what is under way and launch nothing behind it.
                ahead = None if drafted or limit == 1 else target.launch((), 1, sampled)
                drafted, rows = [], len(target.pending)
                tokens, accepted = target.read(sampled), 0
                target.commit(tokens, rows)
            last = target.clock()
            drafter.observe(len(drafted), accepted, rows, last - started)
            drafter.extend(tokens)
            limit = 0 if ended(target, tokens[-1], stop) else limit - len(tokens)
            passes += 1
            if passes % _CLEAR_EVERY == 0:
                mx.clear_cache()
            yield Piece(tuple(tokens), accepted, tuple(drafted[accepted:]), last - started)
    finally:
        if ahead is not None:  # the step that nobody collects has put its token into the cache
            target.commit((), 1)


def draft(target: Target, drafter: Drafter, limit: int) -> list[int]:
    """Tokens to verify in the next pass, which yields one more, `limit` at most."""
    room = limit - 1 if len(target.pending) <= _MAX_PENDING else 0
    drafted = drafter.propose(room)
    # What is drafted from may come from a file.
    vocabulary = target.vocabulary
    return drafted if vocabulary is None else drafted[: first_outside(drafted, vocabulary)]


def speculate(
    target: Target, drafted: Sequence[int], stop: Collection[int]
) -> tuple[list[int], int]:
    """One pass over the pending tokens and a draft.

    Returns the new tokens, the last of them the bonus token, and how many of them were drafted.
    """
    before = target.pass_state()
    rows = [*target.pending, *drafted]
    sampled = target.read(target.launch(rows, 1 + len(drafted)))
    accepted = accept(drafted, sampled)
    tokens = cut(sampled[: accepted + 1], stop)
    if target.constraint is not None:
        tokens = target.constraint.consume(tokens)
    kept = len(target.pending) + len(tokens) - 1
    if kept < len(rows):
        kept = target.roll_back(before, len(rows), kept)
    target.commit(tokens, kept)
    return tokens, min(accepted, len(tokens))


def accept(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafted tokens the target sampled too, up to the first that it did not."""
    return common_prefix(drafted, sampled)


def ended(target: Target, token: int, stop: Collection[int]) -> bool:
    """Whether an answer ends with `token`: it says so, or nothing may follow it."""
    return token in stop or (target.constraint is not None and target.constraint.complete)


def cut(tokens: list[int], stop: Collection[int]) -> list[int]:
    """`tokens` up to and with the first that is in `stop`."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens
