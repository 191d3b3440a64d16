"""The decode loop: draft, verify, accept, roll back; plain steps are pipelined.

Speculative decoding after Leviathan et al. (2023), section 2, with a drafter in the place of the
small model. The output is exactly that of plain decoding (see `sampling` for temperatures).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix, first_invalid
from akunu_py.ngram.joint_plan import SharedPass
from akunu_py.types import Drafter, Piece

_MAX_PENDING = 8  # with more pending tokens a pass has no draft
_CLEAR_EVERY = 256  # passes between clearing MLX's buffer cache, as in mlx-lm


@dataclass(slots=True)
class _Pass:
    """A launched pass, or the part of one request in it."""

    sampled: mx.array  # see `Target.launch`
    drafted: list[int]
    before: Any  # see `Target.pass_state`
    behind: bool  # launched while another pass was running
    shared: SharedPass | None = None


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows of one request in a shared pass: its pending tokens and its draft."""

    tokens: mx.array  # [rows]
    drafted: list[int]
    before: Any  # see `Target.pass_state`


class Decoding:
    """The decode passes of one answer: up to `limit` tokens, ending after a token of `stop`.

    `drafter` knows all tokens including the pending ones. If it pipelines, another pass is launched
    after a plain step before that step is collected: a plain step, or one that verifies a draft of
    the tokens after the unknown next token. If `target.runs_ahead` is false, no pass runs between
    two steps, and the time between them does not count.

    A shared pass is `offer`, `rows`, `launched`, `wait`, `collect` instead of `step`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        limit: int,
        stop: Collection[int],
        *,
        answering: bool = True,
    ) -> None:
        """answering: False before the answer's first token, which is not drafted."""
        self.target = target
        self.limit = limit  # tokens that may follow; 0 at the end
        self._drafter = drafter
        self._stop = stop
        self.answering = answering
        self._launched: list[_Pass] = []  # at most two, in order
        self._last = 0.0  # end of the previous pass, or start of this one
        self._passes = 0

    @property
    def is_running(self) -> bool:
        """Whether a pass is launched, which only `step` or `collect` can read."""
        return bool(self._launched)

    @property
    def shared(self) -> SharedPass | None:
        """The launched pass, if other requests share it."""
        return self._launched[0].shared if self._launched else None

    @property
    def can_continue(self) -> bool:
        """Whether a plain step can be launched before the launched pass is read.

        An answer's first token is read at once: MLX's CPU backend launches at most 10 tasks ahead.
        """
        drafted = self._launched[0].drafted
        return self.answering and not drafted and self.target.constraint is None

    def step(self) -> Piece:
        """Run one pass of this request alone."""
        target, drafter = self.target, self._drafter
        if not self._launched:
            self._last = target.clock()
            self._launch()
        launched = self._launched[0]
        if self.can_continue and self.limit > 1 and target.runs_ahead:
            behind = launch_next(target, drafter, self.limit - 1, launched)
            self._launched += [behind] if behind is not None else []
        rows, first = len(target.pending) + len(launched.drafted), not self.answering
        tokens, accepted = self._read()
        started, self._last = self._last, target.clock()
        seconds = self._last - started
        if launched.shared is None and not first:
            drafted = len(launched.drafted)
            drafter.observe(drafted, accepted, rows, seconds, pipelined=launched.behind)
        piece = self._extend(tokens, accepted, launched, seconds)
        if self.limit and not self._launched and target.runs_ahead and not first:
            self._launch()
        return piece

    def offer(self) -> list[float]:
        """Return the acceptance chances of draft tokens for the next pass."""
        few = len(self.target.pending) <= _MAX_PENDING
        return self._drafter.offer(self.limit - 1) if few and self.answering else []

    def rows(self, count: int) -> SharedRows:
        """Return the rows of a shared pass with the first `count` offered draft tokens."""
        target = self.target
        drafted = self._drafter.take(count) if self.answering else []
        drafted = in_vocabulary_prefix(drafted, target.vocabulary)
        before = target.pass_state() if drafted else None
        return SharedRows(mx.array([*target.pending, *drafted], mx.int32), drafted, before)

    def next_row(self) -> SharedRows:
        """Return the row of a plain step after the launched one, which is not read yet."""
        return SharedRows(self._launched[0].sampled, [], None)

    def launched(self, rows: SharedRows, sampled: mx.array, shared: SharedPass) -> None:
        """Record a launched pass, from which `sampled` will come."""
        behind = bool(self._launched)
        self._launched.append(_Pass(sampled, rows.drafted, rows.before, behind, shared))

    def wait(self) -> None:
        """Wait for the launched pass."""
        mx.eval(self._launched[0].sampled)

    def collect(self, seconds: float) -> Piece:
        """Accept the tokens of the launched pass. seconds: its time."""
        launched = self._launched[0]
        tokens, accepted = self._read()
        self._last = self.target.clock()
        return self._extend(tokens, accepted, launched, seconds)

    def close(self) -> None:
        """End between two steps: keep the pending tokens of a launched pass and drop its draft."""
        launched, self._launched = self._launched, []
        for each in launched:
            abandon(self.target, each)

    def _launch(self) -> None:
        target = self.target
        drafted = draft(target, self._drafter, self.limit) if self.answering else []
        self._launched.append(_launch(target, drafted, None))

    def _read(self) -> tuple[list[int], int]:
        """Wait for the first launched pass; return its tokens and how many were drafted."""
        sampled = self.target.read(self._launched[0].sampled)
        return collect(self.target, self._launched.pop(0), sampled, self._stop)

    def _extend(self, tokens: list[int], accepted: int, launched: _Pass, seconds: float) -> Piece:
        self.answering = True
        self._drafter.extend(tokens)
        over = ended(self.target, tokens[-1], self._stop)
        self.limit = 0 if over else self.limit - len(tokens)
        self._passes += 1
        if self._passes % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return Piece(tuple(tokens), accepted, tuple(launched.drafted[accepted:]), seconds)


def launch_next(target: Target, drafter: Drafter, limit: int, step: _Pass) -> _Pass | None:
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
    return in_vocabulary_prefix(drafter.propose(room, ahead=ahead), target.vocabulary)


def in_vocabulary_prefix(drafted: list[int], vocabulary: int | None) -> list[int]:
    """Return the draft up to the first invalid token, which the answer cache's file may hold."""
    return drafted if vocabulary is None else drafted[: first_invalid(drafted, vocabulary)]


def collect(
    target: Target, launched: _Pass, sampled: list[int], stop: Collection[int]
) -> tuple[list[int], int]:
    """Accept sampled tokens. Returns the new ones, bonus token last, and how many were drafted."""
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
