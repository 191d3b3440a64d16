"""Incremental parsing of a text that arrives in pieces, and its end at a stop sequence.

Parsers are generators that yield wherever they need more text, so where the text is cut changes
when output comes, but never which.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from akunu_py.engine.events import Span
from akunu_py.errors import UsageError

_Result = TypeVar("_Result")
_Output = TypeVar("_Output")
ParserSteps = Generator[None, None, _Result]  # yields where it needs more text
Emit = Callable[[str], None]

SPACE = " \t\r\n"


class Malformed(Exception):
    """The text does not continue as expected."""


class CutOff(Malformed):
    """The text ends too early."""


class Reader:
    """A text and the position in it."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._begin = 0  # of the available text, in the whole text
        self._drafted = deque[Span]()  # ranges of the whole text
        self.closed = False  # no more text follows

    def feed(self, text: str, drafted: Iterable[Span] = ()) -> None:
        """Add text. drafted: its ranges from accepted drafts."""
        self._begin += self._at
        self._text = self._text[self._at :] + text
        self._at = 0
        end = self._begin + len(self._text) - len(text)
        self._drafted += ((end + first, end + last) for first, last in drafted)

    def drafted(self, back: int, count: int) -> tuple[Span, ...]:
        """Return drafted ranges in the `count` characters from `back` ago; forget earlier ones."""
        begin = self._begin + self._at - back
        while self._drafted and self._drafted[0][1] <= begin:
            self._drafted.popleft()
        spans = ((max(0, at - begin), min(count, end - begin)) for at, end in self._drafted)
        return tuple((at, end) for at, end in spans if at < end)

    @property
    def unread(self) -> str:
        """The available text that is not read yet."""
        return self._text[self._at :]

    def consume(self, count: int) -> str:
        """Read `count` available characters."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        return text

    def peek(self, count: int = 1) -> ParserSteps[str]:
        """Return the next characters without reading them; fewer at the end of the text."""
        while len(self._text) - self._at < count and not self.closed:
            yield
        return self._text[self._at : self._at + count]

    def skip(self, characters: str = SPACE, emit: Emit | None = None) -> ParserSteps[str]:
        """Skip the `characters`; return the next character without reading it, "" at the end."""
        while True:
            rest = self.unread
            skipped = self.consume(len(rest) - len(rest.lstrip(characters)))
            if emit and skipped:
                emit(skipped)
            if self._at < len(self._text) or self.closed:
                return self.unread[:1]
            yield

    def accept(self, *literals: str, skip: str = "") -> ParserSteps[str]:
        """Skip characters, then read the first of `literals` that comes next; "" if none does."""
        if skip:
            yield from self.skip(skip)
        for literal in literals:
            while literal.startswith(rest := self.unread) and rest != literal and not self.closed:
                yield
            if rest.startswith(literal):
                return self.consume(len(literal))
        return ""

    def expect(self, *literals: str, skip: str = "") -> ParserSteps[str]:
        """Like `accept`, but raise Malformed or CutOff if none of `literals` comes next."""
        found = yield from self.accept(*literals, skip=skip)
        if not found:
            raise CutOff if any(map(self.cut_off_in, literals)) else Malformed
        return found

    def cut_off_in(self, literal: str) -> bool:
        """Return whether the text ends before or within `literal`."""
        return self.closed and literal.startswith(self.unread)

    def emit_until(self, ends: tuple[str, ...], emit: Emit) -> ParserSteps[str]:
        """Read to the end of the first of `ends` and return that end; see `find_first`.

        Emits the text before it as early as is certain. Raises CutOff after emitting everything.
        """
        while True:
            rest = self.unread
            at, end = find_first(rest, ends) if ends else (0, "")
            if not end:
                held = partial_match_length(rest, ends) if ends and not self.closed else 0
                at = len(rest) - held
            if at:
                emit(self.consume(at))
            if end:
                return self.consume(len(end))
            if self.closed:
                raise CutOff
            yield

    def read_until(self, *ends: str) -> ParserSteps[tuple[str, str]]:
        """Return the text before the first of `ends`, and that end. Raises CutOff."""
        parts: list[str] = []
        end = yield from self.emit_until(ends, parts.append)
        return "".join(parts), end


class StreamParser(Generic[_Output]):
    """Turns a stream of text into output, as early as is certain. Subclasses define `_parse`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._output: list[_Output] = []
        self._steps = self._parse()

    def _parse(self) -> ParserSteps[None]:
        """Read the text and append to the output. May raise CutOff at the end of the text."""
        raise NotImplementedError

    def add(self, text: str, drafted: Sequence[Span] = ()) -> list[_Output]:
        """Return the output that `text` completes. drafted: its ranges from accepted drafts."""
        self._reader.feed(text, drafted)
        next(self._steps, None)
        return self._take_output()

    def finish(self) -> list[_Output]:
        """Return the output held back at the end of the text."""
        self._reader.closed = True
        with contextlib.suppress(CutOff):
            next(self._steps, None)
        return self._take_output()

    def _take_output(self) -> list[_Output]:
        output, self._output = self._output, []
        return output


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
    """Streams text up to the stop sequence that ends first (the longest, if several do)."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Without stops all text passes at once. Raises UsageError for an empty stop."""
        if "" in stops:
            raise UsageError("a stop sequence needs at least one character, got an empty one")
        self._stops = tuple(stops)
        self.found = ""  # the stop sequence that ended the text
        super().__init__()

    def _parse(self) -> ParserSteps[None]:
        self.found = yield from self._reader.emit_until(self._stops, self._emit)


def find_first(text: str, literals: Sequence[str]) -> tuple[int, str]:
    """Return start and text of the literal that ends first (the longest of several), or (0, "")."""
    places = ((text.find(literal), literal) for literal in literals)
    ends = [(at + len(literal), -len(literal), literal) for at, literal in places if at >= 0]
    if not ends:
        return 0, ""
    end, _, first = min(ends)
    return end - len(first), first


def partial_match_length(text: str, literals: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin one of `literals`."""
    most = min(len(text), max(map(len, literals), default=1) - 1)
    lengths = range(most, 0, -1)
    return next((n for n in lengths if any(each.startswith(text[-n:]) for each in literals)), 0)
