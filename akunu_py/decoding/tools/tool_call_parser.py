"""Parser of tool calls in the text of an answer, streamed or whole.

Emits text and calls as early as is certain, without the markup of calls and whitespace next to it.
A malformed or unfinished call becomes text behind MALFORMED or UNFINISHED. Its arguments may have
streamed by then, but it has no ToolCallFinished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from akunu_py.decoding.events import (
    Event,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.tools.formats import HERMES, ToolFormat
from akunu_py.decoding.tools.reader import (
    SPACE,
    CutOff,
    Malformed,
    ParserSteps,
    Reader,
    first_of,
    longest_beginning,
)
from akunu_py.decoding.tools.rendering import format_of
from akunu_py.decoding.tools.syntaxes import Calls
from akunu_py.types import Tool

MALFORMED = "[malformed tool call] "
UNFINISHED = "[unfinished tool call] "
REFUSED = "[refused tool call] "
_LEFTOVERS = SPACE + "]},;"  # characters that may follow the arguments of a call


def parser_for(
    tokenizer: Any, tools: Sequence[Tool], *, allowed: bool = True, either: bool = False
) -> ToolCallParser:
    """Return a parser for one answer, which must be generated with the parser's `markers`.

    allowed: otherwise calls become text behind REFUSED. either: the answer has calls or text, not
    both, so text is never searched for calls.
    """
    format = format_of(tokenizer) if tools else None
    return ToolCallParser(format, tools, allowed=allowed, either=either)


class ToolCallParser:
    """Text in, events out: Text, ToolCallStarted, ToolCallArguments, ToolCallFinished."""

    def __init__(
        self,
        format: ToolFormat | None,
        tools: Sequence[Tool],
        new_id: Callable[[], str] | None = None,
        *,
        allowed: bool = True,
        either: bool = False,
    ) -> None:
        """format: None if there are no calls. new_id: returns a new id for a call."""
        self._format, self._either = format, either
        self._reader = Reader()
        self._events: list[Event] = []
        self._blank = ""  # whitespace that is text only if text follows
        self._said = False  # whether there was text
        self._after_call = False
        make_id = new_id or (format or HERMES).new_id
        self._calls = Calls(tools, self._emit, make_id, allowed=allowed)
        self._running = self._run(format) if format else None

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the text must contain, see `GenerateOptions`."""
        return self._format.all_markers if self._format else ()

    def add(self, text: str) -> list[Event]:
        """Return what `text` made certain."""
        if self._running is None:
            return [TextDelta(text)] if text else []
        self._reader.feed(text)
        return self._resume()

    def finish(self) -> list[Event]:
        """Return what is still held back at the end of the answer."""
        if self._running is None:
            return []
        self._reader.closed = True
        events = self._resume()
        self._running = None
        return events

    def _resume(self) -> list[Event]:
        assert self._running is not None
        next(self._running, None)
        events, self._events = self._events, []
        return _joined(events)

    def _emit(self, event: Event) -> None:
        if isinstance(event, ToolCallStarted):
            self._blank = ""
            self._after_call = True
        elif isinstance(event, ToolCallFinished):
            self._reader.mark()
        self._events.append(event)

    def _say(self, text: str) -> None:
        """Emit text, without whitespace that may turn out to be next to a call."""
        text = self._blank + text
        if self._after_call:
            text = text.lstrip()
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            self._events.append(TextDelta(said))
            self._said, self._after_call = True, False

    def _run(self, format: ToolFormat) -> ParserSteps[None]:
        while True:
            opener = yield from self._text_before_call(format)
            if opener is None:
                break
            try:
                yield from self._block(format, opener)
            except Malformed:
                yield from self._spoiled(format, opener)
        if self._blank:
            self._events.append(TextDelta(self._blank))

    def _text_before_call(self, format: ToolFormat) -> ParserSteps[str | None]:
        """Emit the text before the next opener and return the opener.

        Returns None at the end of the answer, "" for a call that needs no opener.
        """
        reader = self._reader
        openers: tuple[str, ...] = (*format.openers, *format.dropped)
        while True:
            if format.bare and not self._said:
                yield from self._skip_blank()
                if reader.rest.startswith(format.bare):
                    reader.mark()
                    return ""
            rest = reader.rest
            at, opener = first_of(rest, openers)
            if self._either and (self._said or rest[:at].strip()):
                openers = format.dropped
                at, opener = first_of(rest, openers)
            if not opener:
                at = len(rest) if reader.closed else len(rest) - longest_beginning(rest, openers)
            self._say(reader.take(at))
            if opener:
                reader.mark()
                reader.take(len(opener))
                if opener not in format.dropped:
                    return opener
                continue
            if reader.closed:
                return None
            yield

    def _skip_blank(self) -> ParserSteps[None]:
        """Skip whitespace before a call without opener, and separators behind a call."""
        while True:
            rest = self._reader.rest
            more = rest.lstrip(SPACE + ";," if self._after_call else SPACE)
            blank = self._reader.take(len(rest) - len(more))
            self._say("" if self._after_call else blank)
            if more or self._reader.closed:
                return
            yield

    def _block(self, format: ToolFormat, opener: str) -> ParserSteps[None]:
        """Read the calls behind an opener, up to what closes them. Raises Malformed."""
        reader, closer = self._reader, format.openers.get(opener, "")
        self._calls.known_only = not opener
        while True:
            yield from format.syntax(reader, self._calls)
            if not closer:
                return
            if (yield from reader.accept(closer, skip=_LEFTOVERS)):
                return
            if reader.ended_within(closer):
                raise CutOff

    def _spoiled(self, format: ToolFormat, opener: str) -> ParserSteps[None]:
        """Emit a malformed call as text."""
        reader, closer = self._reader, format.openers.get(opener, "")
        if reader.closed:
            reader.take(len(reader.rest))
        text = reader.taken
        if opener and not self._calls.open and closer.startswith(text.strip(_LEFTOVERS)):
            return  # only the closer of complete calls is missing
        if not opener and not self._calls.open:  # the answer is JSON or a list
            self._said = True
            self._say(text)
            return
        self._calls.open = False
        if self._said or self._after_call:
            self._blank, self._after_call = "\n", False
        why = UNFINISHED if reader.closed else MALFORMED
        self._say((why if self._calls.allowed else REFUSED) + text)
        if closer and not reader.closed:
            with contextlib.suppress(CutOff):
                self._say((yield from reader.pass_until((closer,), self._say)))


def _joined(events: list[Event]) -> list[Event]:
    """Merge adjacent events of the same kind."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            joined[-1] = ToolCallArguments(last.text + event.text)
        else:
            joined.append(event)
    return joined
