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
from akunu_py.ngram.planner import SharedPass
from akunu_py.types import Drafter, Piece

_MAX_PENDING = 8  # with more pending tokens a pass has no draft
_CLEAR_EVERY = 256  # passes between clearing MLX's buffer cache, as in mlx-lm


@dataclass(slots=True)
class DecodePass:
    """A pass, or the part of one request in it."""

    drafted: list[int]
    before: Any  # see `Target.pass_state`
    behind: bool = False  # launched while another pass was running
    rows: Any = None  # tokens [rows] of a shared pass: the pending ones and the draft
    sampled: Any = None  # once it is launched; see `Target.launch`
    shared: SharedPass | None = None


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
        self._launched: list[DecodePass] = []  # at most two, in order
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
        target, drafter, first = self.target, self._drafter, not self.answering
        if not self._launched:
            self._last = target.clock()
            self._launch([] if first else self._draft(self.limit))
        launched = self._launched[0]
        if self.can_continue and self.limit > 1 and target.runs_ahead:
            # A step that runs behind another one was launched before its history was known.
            drafted = self._draft(self.limit - 1, ahead=True) if launched.behind else []
            if drafted or drafter.pipelines:
                self._launch(drafted, launched.sampled)
        piece = self.collect()
        if self.limit and not self._launched and target.runs_ahead and not first:
            self._launch(self._draft(self.limit))
        return piece

    def offer(self) -> list[float]:
        """Return the acceptance chances of draft tokens for the next pass."""
        few = len(self.target.pending) <= _MAX_PENDING
        return self._drafter.offer(self.limit - 1) if few and self.answering else []

    def rows(self, count: int) -> DecodePass:
        """Return a shared pass with the first `count` offered draft tokens."""
        target = self.target
        drafted = self._in_vocabulary(self._drafter.take(count)) if self.answering else []
        before = target.pass_state() if drafted else None
        return DecodePass(drafted, before, rows=mx.array([*target.pending, *drafted], mx.int32))

    def next_row(self) -> DecodePass:
        """Return a shared plain step after the launched one, which is not read yet."""
        return DecodePass([], None, behind=True, rows=self._launched[0].sampled)

    def launched(self, made: DecodePass, sampled: mx.array, shared: SharedPass) -> None:
        """Record that a shared pass is launched, from which `sampled` will come."""
        made.sampled, made.shared = sampled, shared
        self._launched.append(made)

    def wait(self) -> None:
        """Wait for the launched pass."""
        mx.eval(self._launched[0].sampled)

    def collect(self, seconds: float | None = None) -> Piece:
        """Accept the tokens of the launched pass: those of the draft that match, and the next one.

        seconds: its time; None: the time since the previous pass.
        """
        target, launched = self.target, self._launched[0]
        sampled = target.read(launched.sampled)
        del self._launched[0]
        accepted = common_prefix(launched.drafted, sampled)
        tokens = cut(sampled[: accepted + 1], self._stop)
        if target.constraint is not None:
            tokens = target.constraint.consume(tokens)
        accepted = min(accepted, len(tokens))
        rows = len(target.pending) + len(launched.drafted)
        self._commit(launched, tokens, len(target.pending) + len(tokens) - 1)
        started, self._last = self._last, target.clock()
        if seconds is None:
            seconds = self._last - started
            if launched.shared is None and self.answering:
                drafted, behind = len(launched.drafted), launched.behind
                self._drafter.observe(drafted, accepted, rows, seconds, pipelined=behind)
        self.answering = True
        self._drafter.extend(tokens)
        over = ended(target, tokens[-1], self._stop)
        self.limit = 0 if over else self.limit - len(tokens)
        self._passes += 1
        if self._passes % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return Piece(tuple(tokens), accepted, tuple(launched.drafted[accepted:]), seconds)

    def close(self) -> None:
        """End between two steps: keep the pending tokens of a launched pass and drop its draft."""
        launched, self._launched = self._launched, []
        for each in launched:
            self._commit(each, (), len(self.target.pending))

    def _launch(self, drafted: list[int], after: mx.array | None = None) -> None:
        """Launch a pass of this request alone. after: see `Target.launch`."""
        target = self.target
        rows = drafted if after is not None else [*target.pending, *drafted]
        # Holding the state would prevent in-place writes of plain steps.
        made = DecodePass(drafted, target.pass_state() if drafted else None, after is not None)
        made.sampled = target.launch(rows, 1 + len(drafted), after)
        self._launched.append(made)

    def _draft(self, limit: int, *, ahead: bool = False) -> list[int]:
        """Return draft tokens for the next pass, which yields at most `limit` tokens."""
        room = limit - 1 if len(self.target.pending) <= _MAX_PENDING else 0
        return self._in_vocabulary(self._drafter.propose(room, ahead=ahead))

    def _in_vocabulary(self, drafted: list[int]) -> list[int]:
        """Return the tokens before the first invalid one, which an answer cache may hold."""
        vocabulary = self.target.vocabulary
        return drafted if vocabulary is None else drafted[: first_invalid(drafted, vocabulary)]

    def _commit(self, launched: DecodePass, tokens: Sequence[int], kept: int) -> None:
        """Record the new tokens of a pass, and keep the first `kept` of its rows."""
        target = self.target
        written = len(target.pending) + len(launched.drafted)
        if kept < written:
            kept = target.roll_back(launched.before, written, kept)
        target.commit(tokens, kept)


def ended(target: Target, token: int, stop: Collection[int]) -> bool:
    """Return whether `token` ends the answer."""
    return token in stop or (target.constraint is not None and target.constraint.complete)


def cut(tokens: list[int], stop: Collection[int]) -> list[int]:
    """Return `tokens` up to and including the first stop token."""
    end = next((count for count, token in enumerate(tokens, 1) if token in stop), None)
    return tokens[:end]
