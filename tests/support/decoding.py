"""The decode passes of a target, without an engine."""

from collections.abc import Collection, Generator
from types import SimpleNamespace
from typing import Any

from akunu_py.engine.drafters.drafter import TrackedDrafter
from akunu_py.engine.request import Request, Status, Step
from akunu_py.engine.runner import ModelRunner
from akunu_py.engine.target import Target
from akunu_py.types import Drafter, GenerateOptions, Piece, TextPiece


class BareRequest(Request):
    """Up to `limit` tokens after the history of a target, without their text."""

    def __init__(self, target: Target, drafter: Drafter, limit: int, stop: Collection[int]) -> None:
        self.engine: Any = SimpleNamespace(tokens=SimpleNamespace(stop_tokens=frozenset(stop)))
        self.options = GenerateOptions(stop_tokens=tuple(stop))
        self.target, self.limit = target, limit
        self.drafter = TrackedDrafter(lambda: (drafter, drafter))
        self.status, self.answering = Status.DECODING, True
        self.launched, self.tokens, self.pieces = [], [0], list[Piece]()
        self.cancelled = False

    @property
    def ends(self) -> bool:
        return self.limit <= 0

    def add(self, piece: Piece, now: float) -> TextPiece:
        self.pieces.append(piece)
        return TextPiece("", piece)


class BareRunner(ModelRunner):
    """Runs the passes of one `BareRequest`."""

    def __init__(self, model: Any) -> None:
        self._engine: Any = SimpleNamespace(model=model, recurrent=False, exact=None)
        self._passes, self._last, self._joint = 0, 0.0, {}

    def decode(self, request: BareRequest) -> Piece:
        self._decode([request], (), alone=True)
        return request.pieces.pop()

    def _finish(self, request: Request) -> list[Step]:
        return []

    def fail(self, request: Request, error: BaseException) -> Exception:
        raise error


def decode(target: Target, drafter: Drafter, limit: int, stop: Collection[int]) -> Generator[Piece]:
    """Yield the pieces of an answer; closing the generator drops the launched passes."""
    request = BareRequest(target, drafter, limit, stop)
    runner = BareRunner(target.model)
    try:
        while request.limit > 0:
            yield runner.decode(request)
    finally:
        request.drop_launched()
