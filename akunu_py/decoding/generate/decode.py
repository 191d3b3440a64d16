"""The decode loop: draft, verify, accept, roll back; plain steps are pipelined.

Speculative decoding after Leviathan et al. (2023), section 2, with a drafter in the place of the
small model. The output is exactly that of plain decoding (see `sampling` for temperatures).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix, first_invalid
from akunu_py.types import Drafter, Piece

_MAX_PENDING = 8  # with more pending tokens a pass has no draft
_CLEAR_EVERY = 256  # passes between clearing MLX's buffer cache, as in mlx-lm


@dataclass(slots=True)
class _Pass:
    """A launched pass."""

    sampled: mx.array  # see `Target.launch`
    drafted: list[int]
    before: Any  # see `Target.pass_state`
    behind: bool  # launched while another pass was running


def decode(target: Target, drafter: Drafter, limit: int, stop: Collection[int]) -> Generator[Piece]:
    """Yield a piece per pass: up to `limit` tokens, ending after a token of `stop`.

    `drafter` knows all tokens including the pending ones. If it pipelines, another pass is launched
    after a plain step before that step is collected: a plain step, or one that verifies a draft of
    the tokens after the unknown next token. If `target.runs_ahead` is false, no pass runs while the
    consumer holds a piece, and the consumer's time does not count.
    """
    passes = 0
    launched: _Pass | None = None
    last = 0.0  # end of the previous pass, or start of this one
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
                len(launched.drafted), accepted, rows, last - started, pipelined=launched.behind
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
    except GeneratorExit:
        pass
    if launched is not None:
        abandon(target, launched)


def launch(target: Target, drafter: Drafter, limit: int) -> _Pass:
    """Launch a pass over the pending tokens and a draft, for at most `limit` tokens."""
    return _launch(target, draft(target, drafter, limit), None)


def launch_behind(target: Target, drafter: Drafter, limit: int, step: _Pass) -> _Pass | None:
    """Launch a pass after the running plain step; None if the drafter prefers to wait."""
    # A step that runs behind another one was launched before its history was known.
    drafted = draft(target, drafter, limit, ahead=True) if step.behind else []
    if not drafted and not drafter.pipelines:
        return None
    return _launch(target, drafted, step.sampled)


def _launch(target: Target, drafted: list[int], after: mx.array | None) -> _Pass:
    rows = drafted if after is not None else [*target.pending, *drafted]
    # Holding the state would prevent in-place writes of plain steps.
    before = target.pass_state() if drafted else None
    return _Pass(target.launch(rows, 1 + len(drafted), after), drafted, before, after is not None)


def draft(target: Target, drafter: Drafter, limit: int, *, ahead: bool = False) -> list[int]:
    """Return draft tokens for the next pass, which yields at most `limit` tokens."""
    room = limit - 1 if len(target.pending) <= _MAX_PENDING else 0
    drafted = drafter.propose(room, ahead=ahead)
    vocabulary = target.vocabulary  # the answer cache's file may hold other token ids
    return drafted if vocabulary is None else drafted[: first_invalid(drafted, vocabulary)]


def collect(target: Target, launched: _Pass, stop: Collection[int]) -> tuple[list[int], int]:
    """Wait for a pass. Returns the new tokens, bonus token last, and how many were accepted."""
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
    """Record a pass that is not collected: keep its pending tokens and drop its draft."""
    kept = len(target.pending)
    if launched.drafted:
        kept = target.roll_back(launched.before, kept + len(launched.drafted), kept)
    target.commit((), kept)


def plain_step(target: Target, stop: Collection[int] = ()) -> list[int]:
    """Return the token after the pending ones."""
    return collect(target, _launch(target, [], None), stop)[0]


def accept(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many draft tokens match the sampled ones, up to the first mismatch."""
    return common_prefix(drafted, sampled)


def ended(target: Target, token: int, stop: Collection[int]) -> bool:
    """Return whether `token` ends the answer."""
    return token in stop or (target.constraint is not None and target.constraint.complete)


def cut(tokens: list[int], stop: Collection[int]) -> list[int]:
    """Return `tokens` up to and including the first stop token."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens
