"""The decode loop: draft, verify, accept, roll back; and plain steps that are pipelined.

Speculative decoding after Leviathan et al. (2023), section 2, with a drafter in the place of the
small model. The output is exactly that of plain decoding (see `sampling` for temperatures).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix, first_outside
from akunu_py.types import Drafter, Piece

_MAX_PENDING = 8  # tokens; above it a pass runs only these, instead of adding a draft
_CLEAR_EVERY = 256  # passes between giving MLX's buffer cache back, as mlx-lm does


@dataclass(slots=True)
class _Pass:
    """A pass that was launched.

    sampled: what `Target.launch` returned. before: see `Target.pass_state`. behind: whether another
    pass was under way when this one was launched.
    """

    sampled: mx.array
    drafted: list[int]
    before: Any
    behind: bool


def decode(target: Target, drafter: Drafter, limit: int, stop: Collection[int]) -> Generator[Piece]:
    """Yields a piece per pass: up to `limit` tokens, ending with a token of `stop` if it comes.

    `drafter` knows all tokens up to and with the pending ones, and observes what follows. Where it
    wants plain steps pipelined, another pass is launched behind a plain step before that is
    collected: another plain step, or one over the token of the first, which nobody knows yet, and a
    draft of what follows it. Whatever the token turns out to be, that pass yields the next one.

    While the reader has a piece, a pass is under way; at the end it is waited for by nobody. Where
    the target does not run ahead, which may change from one piece to the next, passes are neither
    pipelined nor launched before the piece is delivered, and what the reader does meanwhile is not
    part of their time.
    """
    passes = 0
    launched: _Pass | None = None
    last = 0.0  # when the pass before was done, or this one was begun
    try:
        while limit > 0:
            if launched is None:
                last = target.clock()
                launched = launch(target, drafter, limit)
            behind = None
            if not launched.drafted and limit > 1 and target.runs_ahead:
                behind = launch_behind(target, drafter, limit - 1, launched)
            rows = len(target.pending) + len(launched.drafted)
            tokens, accepted = collect(target, launched, stop)
            started, last = last, target.clock()
            drafter.observe(
                len(launched.drafted), accepted, rows, last - started, behind=launched.behind
            )
            drafter.extend(tokens)
            rejected = tuple(launched.drafted[accepted:])
            launched = behind
            limit = 0 if ended(target, tokens[-1], stop) else limit - len(tokens)
            if limit and launched is None and target.runs_ahead:
                launched = launch(target, drafter, limit)
            passes += 1
            if passes % _CLEAR_EVERY == 0:
                mx.clear_cache()
            yield Piece(tuple(tokens), accepted, rejected, last - started)
    except GeneratorExit:  # the reader left
        pass
    if launched is not None:
        abandon(target, launched)


def launch(target: Target, drafter: Drafter, limit: int) -> _Pass:
    """A pass over the pending tokens and a draft, that yields `limit` tokens at most."""
    return _launch(target, draft(target, drafter, limit), None)


def launch_behind(target: Target, drafter: Drafter, limit: int, step: _Pass) -> _Pass | None:
    """A pass behind the plain step that is under way, that yields `limit` tokens at most; None
    where the drafter would rather wait for the step."""
    # A step that runs behind another one was launched before its history was known.
    drafted = draft(target, drafter, limit, ahead=True) if step.behind else []
    if not drafted and not drafter.pipelines:
        return None
    return _launch(target, drafted, step.sampled)


def _launch(target: Target, drafted: list[int], after: mx.array | None) -> _Pass:
    rows = drafted if after is not None else [*target.pending, *drafted]
    # A state that is held must not be in the way of steps that write in place.
    before = target.pass_state() if drafted else None
    return _Pass(target.launch(rows, 1 + len(drafted), after), drafted, before, after is not None)


def draft(target: Target, drafter: Drafter, limit: int, *, ahead: bool = False) -> list[int]:
    """Tokens to verify in the next pass, which yields one more, `limit` at most."""
    room = limit - 1 if len(target.pending) <= _MAX_PENDING else 0
    drafted = drafter.propose(room, ahead=ahead)
    # What is drafted from may come from a file.
    vocabulary = target.vocabulary
    return drafted if vocabulary is None else drafted[: first_outside(drafted, vocabulary)]


def collect(target: Target, launched: _Pass, stop: Collection[int]) -> tuple[list[int], int]:
    """Waits for a pass. Returns the new tokens, the last of them the bonus token, and how many of
    them were drafted."""
    sampled = target.read(launched.sampled)
    accepted = accept(launched.drafted, sampled)
    tokens = cut(sampled[: accepted + 1], stop)
    if target.constraint is not None:
        tokens = target.constraint.consume(tokens)
    written = len(target.pending) + len(launched.drafted)
    kept = len(target.pending) + len(tokens) - 1
    if kept < written:
        kept = target.roll_back(launched.before, written, kept)
    target.commit(tokens, kept)
    return tokens, min(accepted, len(tokens))


def abandon(target: Target, launched: _Pass) -> None:
    """Books a pass that nobody collects: the pending tokens are in the cache, its draft is not."""
    kept = len(target.pending)
    if launched.drafted:
        kept = target.roll_back(launched.before, kept + len(launched.drafted), kept)
    target.commit((), kept)


def plain_step(target: Target, stop: Collection[int] = ()) -> list[int]:
    """The token after the pending ones."""
    return collect(target, _launch(target, [], None), stop)[0]


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
