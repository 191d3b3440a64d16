"""Incremental reader of a text that arrives in pieces.

Syntaxes are generators that yield wherever they need more text, so where the text is cut changes
when events come, but never which.
"""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from akunu_py.engine.text.stop_sequences import partial_match_length

_Result = TypeVar("_Result")
ParserSteps = Generator[None, None, _Result]  # yields where it needs more text
Emit = Callable[[str], None]

SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_VALID = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_MAX_SCALAR = 400  # characters
_MAX_DEPTH = 200  # nested objects and arrays


class Malformed(Exception):
    """The text does not continue as a call."""


class CutOff(Malformed):
    """The text ends in the middle of a call."""


class Reader:
    """A text and the position in it."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._recorded: list[str] = []
        self._begin = 0  # of the available text, in the whole text
        self._drafted = deque[tuple[int, int]]()  # ranges of the whole text
        self.closed = False  # no more text follows

    def feed(self, text: str, drafted: Iterable[tuple[int, int]] = ()) -> None:
        """Add text. drafted: its ranges from accepted drafts."""
        self._begin += self._at
        self._text = self._text[self._at :] + text
        self._at = 0
        end = self._begin + len(self._text) - len(text)
        self._drafted += ((end + first, end + last) for first, last in drafted)

    def drafted(self, back: int, count: int) -> tuple[tuple[int, int], ...]:
        """Return the drafted ranges of `count` characters that begin `back` before the position.

        Forgets the ranges before them.
        """
        begin = self._begin + self._at - back
        while self._drafted and self._drafted[0][1] <= begin:
            self._drafted.popleft()
        spans = ((max(0, at - begin), min(count, end - begin)) for at, end in self._drafted)
        return tuple((at, end) for at, end in spans if at < end)

    def start_recording(self) -> None:
        self._recorded.clear()

    @property
    def recorded(self) -> str:
        """The text that was read since `start_recording`."""
        return "".join(self._recorded)

    @property
    def unread(self) -> str:
        """The available text that is not read yet."""
        return self._text[self._at :]

    def consume(self, count: int) -> str:
        """Read `count` available characters."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        self._recorded.append(text)
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
            rest = self.unread
            cut = self.closed and any(literal.startswith(rest) for literal in literals)
            raise CutOff if cut else Malformed
        return found

    def cut_off_in(self, literal: str) -> bool:
        """Return whether the text ends before or within `literal`."""
        return self.closed and literal.startswith(self.unread)

    def emit_until(self, ends: tuple[str, ...], emit: Emit) -> ParserSteps[str]:
        """Read to the end of the first of `ends` and return that end.

        Emits the text before it as early as is certain. Raises CutOff after emitting everything.
        """
        while True:
            rest = self.unread
            at, end = find_first(rest, ends)
            if not end:
                at = len(rest) if self.closed else len(rest) - partial_match_length(rest, ends)
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

    def read_json_text(self) -> ParserSteps[str]:
        """Read a whole JSON value. Raises Malformed, CutOff."""
        parts: list[str] = []
        yield from self.read_json(parts.append)
        return "".join(parts)

    def read_json(self, emit: Emit, depth: int = _MAX_DEPTH) -> ParserSteps[None]:
        """Read a JSON value and emit it as it arrives. Raises Malformed, CutOff.

        Models write control characters in strings, which JSON forbids: these become escapes.
        """
        bracket = yield from self.skip(emit=emit)
        if bracket == '"':
            yield from self._read_string(emit)
            return
        if bracket not in ("{", "[") or not depth:
            yield from self._scalar(emit)
            return
        emit(self.consume(1))
        close = "}" if bracket == "{" else "]"
        yield from self.skip(emit=emit)
        if end := (yield from self.accept(close)):
            emit(end)
        while end != close:
            if bracket == "{":
                yield from self.skip(emit=emit)
                yield from self._read_string(emit)
                yield from self.skip(emit=emit)
                emit((yield from self.expect(":")))
            yield from self.read_json(emit, depth - 1)
            yield from self.skip(emit=emit)
            end = yield from self.expect(",", close)
            emit(end)

    def _read_string(self, emit: Emit) -> ParserSteps[None]:
        emit((yield from self.expect('"')))
        while (character := (yield from self.peek())) != '"':
            if not character:
                raise CutOff
            if character == "\\":
                emit((yield from self._read_escape()))
            elif found := _PLAIN.match(self._text, self._at):
                emit(self.consume(len(found[0])))
            else:
                known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
                emit(known.get(self.consume(1), f"\\u{ord(character):04x}"))
        emit(self.consume(1))

    def _read_escape(self) -> ParserSteps[str]:
        escape = self.consume(1)
        while len(escape) < (6 if escape.startswith("\\u") else 2):
            character = yield from self.peek()
            if not character:
                raise CutOff
            if character not in ('"\\/bfnrtu' if len(escape) == 1 else "0123456789abcdefABCDEF"):
                raise Malformed
            escape += self.consume(1)
        return escape

    def _scalar(self, emit: Emit) -> ParserSteps[None]:
        """Read a number, true, false or null."""
        scalar = ""
        while True:
            if found := _SCALAR.match(self._text, self._at):
                emit(self.consume(len(found[0])))
                scalar += found[0]
            if len(scalar) > _MAX_SCALAR:
                raise Malformed
            if self.unread or self.closed:
                break
            yield
        if not _VALID.fullmatch(scalar):
            raise Malformed if self.unread else CutOff


def find_first(text: str, literals: tuple[str, ...]) -> tuple[int, str]:
    """Return where the first of `literals` begins, and the longest there; (0, "") if none does."""
    found = [(text.find(literal), -len(literal), literal) for literal in literals]
    at, _, literal = min((each for each in found if each[0] >= 0), default=(0, 0, ""))
    return at, literal
