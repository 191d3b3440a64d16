"""A request with a fixed answer, for tests of what becomes of an answer."""

from __future__ import annotations

from typing import Any

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompleteOptions
from akunu_py.engine.engine import Engine
from akunu_py.engine.request import Status, Step
from akunu_py.types import FinishReason, Piece, Stats, TextPiece


class FixedRequest:
    """Yields `answer` letter by letter, then ends with `finish_reason`."""

    def __init__(self, answer: str, finish_reason: FinishReason = "stop") -> None:
        self.tokens: list[int] = []
        self.stats = Stats()
        self.finish_reason = finish_reason
        self.status = Status.DECODING
        self._left = list(answer)

    def step(self) -> list[Step]:
        if not self._left:
            self.status = Status.FINISHED
            return []
        self.tokens.append(0)
        return [TextPiece(self._left.pop(0), Piece(()))]

    def cancel(self) -> None:
        self._left = []

    def close(self) -> None:
        self.status = Status.FINISHED


def answering(
    engine: Engine, answer: str, reason: FinishReason = "stop", fim: str = "auto"
) -> Completer:
    """Return a completer whose model generates `answer`."""
    completer = Completer(engine, CompleteOptions(fim=fim))
    loop: Any = completer.loop
    loop.request = lambda *_: FixedRequest(answer, reason)
    loop.advance = lambda requests: {each: each.step() for each in requests}
    loop.close_request = lambda request: request.close()
    return completer
