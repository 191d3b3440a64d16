"""Stop sequences: an answer ends before the first of some literal texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from akunu_py.engine.events import Span
from akunu_py.engine.text.reader import ParserSteps, Reader, StreamParser
from akunu_py.errors import UsageError

Kind = Literal["answer", "thinking"]


@dataclass(frozen=True, slots=True)
class TextRun:
    """Text of one kind."""

    text: str
    drafted: tuple[Span, ...] = ()  # its ranges from accepted draft tokens
    kind: Kind = "answer"


class TextSplitter(StreamParser[TextRun]):
    """Splits a stream of text into runs."""

    def __init__(self) -> None:
        super().__init__(Reader())

    def _emit(self, text: str, kind: Kind = "answer") -> None:
        """Add text that was just read."""
        self._output.append(TextRun(text, self._reader.drafted(len(text), len(text)), kind))


class StopText(TextSplitter):
    """Streams text up to the first stop sequence, as early as is certain.

    The sequence that is complete first wins; of several at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Without stops all text passes at once. Raises UsageError for an empty stop."""
        if "" in stops:
            raise UsageError("a stop sequence needs at least one character, got an empty one")
        self._stops = tuple(stops)
        self.found = ""  # the stop sequence that ended the text
        super().__init__()

    def _parse(self) -> ParserSteps[None]:
        self.found = yield from self._reader.emit_until(self._stops, self._emit)
