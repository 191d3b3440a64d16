"""Holding pieces back for a moment, so that drawing costs the decoding little.

Pieces may come at 200 a second, and drawing takes turns with decoding in Python's interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from akunu_py.tui.conversation import Rejected, Span, add_spans
from akunu_py.tui.session.messages import Gauges, PieceArrived
from akunu_py.types import Stats, TextPiece

_INTERVAL_S = 1 / 16


class Held:
    """Pieces that wait to be posted together."""

    def __init__(self) -> None:
        self._posted = 0.0
        self._empty()

    def _empty(self) -> None:
        self._text = ""
        self._thinking = ""
        self._spans: list[Span] = []
        self._rejected: list[Rejected] = []
        self._passes: list[int] = []

    def add(self, piece: TextPiece, rejected: str = "", *, from_prefill: bool = False) -> None:
        """`rejected`: the text of the drafted tokens that the target did not confirm."""
        offset = len(self._text)
        add_spans(self._spans, piece.drafted, offset)
        if rejected and (piece.text or not piece.thinking):
            accepted = piece.drafted[-1][1] if piece.drafted else 0
            self._rejected.append((offset + accepted, rejected))
        if piece.piece.tokens and not from_prefill:
            self._passes.append(len(piece.piece.tokens))
        self._text += piece.text
        self._thinking += piece.thinking

    def __bool__(self) -> bool:
        return bool(self._text or self._thinking or self._passes)

    def is_due(self) -> bool:
        """The first piece goes at once, and so does every piece of a slow model."""
        text = self._text or self._thinking
        return bool(text) and time.monotonic() - self._posted >= _INTERVAL_S

    def release(self, turn: int, stats: Stats, gauges: Gauges) -> PieceArrived:
        """The message that tells what was held."""
        note = PieceArrived(
            turn,
            self._text,
            tuple(self._spans),
            replace(stats),
            thinking=self._thinking,
            rejected=tuple(self._rejected),
            passes=tuple(self._passes),
            gauges=gauges,
        )
        self._posted = time.monotonic()
        self._empty()
        return note


class Pacer:
    """Calls a function of (done, total) at most every `_INTERVAL_S`."""

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self._function = function
        self._called = 0.0

    def call(self, done: int, total: int) -> None:
        if time.monotonic() - self._called >= _INTERVAL_S:
            self._called = time.monotonic()
            self._function(done, total)
