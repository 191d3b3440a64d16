"""Reads a text that is not all there yet.

A format is written down as if the text were: as generators that stop wherever they need more of
it. So where the text is cut into pieces changes when something is found, but never what.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from akunu_py.decoding.tool_calls.json_scanner import JsonScanner, NotJson

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]  # yields where it needs more text
Emit = Callable[[str], None]

SPACE = " \t\r\n"


class Malformed(Exception):
    """The text does not go on as a call does."""


class CutOff(Malformed):
    """The text ends in the middle of a call."""


class Reader:
    """A text and how far it is read. `taken`: what was read since `mark`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._taken: list[str] = []
        self.closed = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """There is no more text."""
        self.closed = True

    def mark(self) -> None:
        self._taken.clear()

    @property
    def taken(self) -> str:
        return "".join(self._taken)

    @property
    def rest(self) -> str:
        """What is there and not read."""
        return self._text[self._at :]

    def take(self, count: int) -> str:
        """Reads `count` characters, which are there."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        self._taken.append(text)
        return text

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters, unread; fewer at the end of the text."""
        while len(self._text) - self._at < count and not self.closed:
            yield
        return self._text[self._at : self._at + count]

    def skip(self, characters: str = SPACE) -> Reading[None]:
        """Reads all `characters` that come next."""
        while True:
            rest = self.rest
            self.take(len(rest) - len(rest.lstrip(characters)))
            if self._at < len(self._text) or self.closed:
                return
            yield

    def accept(self, *literals: str) -> Reading[str]:
        """Reads the first of `literals` that comes next; "" where none does."""
        for literal in literals:
            while literal.startswith(rest := self.rest) and rest != literal and not self.closed:
                yield
            if rest.startswith(literal):
                return self.take(len(literal))
        return ""

    def expect(self, *literals: str) -> Reading[str]:
        """Reads one of `literals`, the first that comes next. Raises Malformed, CutOff."""
        found = yield from self.accept(*literals)
        if not found:
            rest = self.rest
            cut = self.closed and any(literal.startswith(rest) for literal in literals)
            raise CutOff if cut else Malformed
        return found

    def ended_within(self, literal: str) -> bool:
        """Whether the text ends where `literal` has begun at most."""
        return self.closed and literal.startswith(self.rest)

    def pass_until(self, ends: tuple[str, ...], emit: Emit) -> Reading[str]:
        """Reads up to the end of the first of `ends`, which it returns, and emits what is before
        it as soon as that is certain. Raises CutOff, with all emitted."""
        while True:
            rest = self.rest
            at, end = first_of(rest, ends)
            if not end:
                at = len(rest) if self.closed else len(rest) - longest_beginning(rest, ends)
            if at:
                emit(self.take(at))
            if end:
                return self.take(len(end))
            if self.closed:
                raise CutOff
            yield

    def until(self, *ends: str) -> Reading[tuple[str, str]]:
        """The text before the first of `ends`, and which one that is. Raises CutOff."""
        parts: list[str] = []
        end = yield from self.pass_until(ends, parts.append)
        return "".join(parts), end

    def json(self, emit: Emit) -> Reading[None]:
        """Reads a JSON value and emits it as it is, but for control characters in strings, which
        become escapes. Raises Malformed, CutOff."""
        scanner = JsonScanner()
        while True:
            used, text = 0, ""
            try:
                used, text = scanner.scan(self.rest)
            except NotJson as error:
                used, text = error.at, error.text
                raise Malformed from None
            finally:
                self.take(used)
                if text:
                    emit(text)
            if scanner.complete or (self.closed and scanner.complete_at_end()):
                return
            if self.closed:
                raise CutOff
            yield

    def json_text(self) -> Reading[str]:
        """A JSON value, whole."""
        parts: list[str] = []
        yield from self.json(parts.append)
        return "".join(parts)


def first_of(text: str, literals: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of `literals` begins and which it is, of several there the longest; "" where
    none is in `text`."""
    found = [(text.find(literal), -len(literal), literal) for literal in literals]
    at, _, literal = min((each for each in found if each[0] >= 0), default=(0, 0, ""))
    return at, literal


def longest_beginning(text: str, literals: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `literals`."""
    most = min(len(text), max(map(len, literals), default=1) - 1)
    return next(
        (
            length
            for length in range(most, 0, -1)
            if any(literal.startswith(text[-length:]) for literal in literals)
        ),
        0,
    )
