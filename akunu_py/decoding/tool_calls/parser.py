"""Finds the calls of tools in the text of an answer, streamed or whole.

What is text and what is a call comes apart as early as is certain. The markup of calls is no part
of the text, nor is whitespace next to it. A call that does not go on as its format wants, or that
the end of the answer cuts off, is not lost: what the model wrote of it is text, behind MALFORMED
or UNFINISHED. Its arguments may have streamed by then; that call has no CallEnded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from akunu_py.decoding.generate.events import CallArguments, CallBegun, CallEnded, Event, Text
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.decoding.tool_calls.calls import Calls
from akunu_py.decoding.tool_calls.families import HERMES, Family, family_of
from akunu_py.decoding.tool_calls.reader import (
    SPACE,
    CutOff,
    Malformed,
    Reader,
    Reading,
    first_of,
    longest_beginning,
)
from akunu_py.types import Tool

MALFORMED = "[malformed tool call] "
UNFINISHED = "[unfinished tool call] "
REFUSED = "[refused tool call] "
_LEFT = SPACE + "]},;"  # what may be left behind the arguments of a call


def parser_for(
    codec: TokenCodec, tools: Sequence[Tool], *, allowed: bool = True, either: bool = False
) -> ToolCallParser:
    """For an answer of this model; without tools all of it is text. The answer must be generated
    with the parser's `markers`. allowed: whether there may be calls; one is text behind REFUSED
    otherwise. either: whether it has calls or text, so that no text holds any."""
    family = family_of(codec.tokenizer) if tools else None
    return ToolCallParser(family, tools, allowed=allowed, either=either)


class ToolCallParser:
    """Text in, events out: Text, CallBegun, CallArguments, CallEnded."""

    def __init__(
        self,
        family: Family | None,
        tools: Sequence[Tool],
        new_id: Callable[[], str] | None = None,
        *,
        allowed: bool = True,
        either: bool = False,
    ) -> None:
        """family: in whose format calls are; None where there are none. new_id: makes the ids of
        calls."""
        self._family, self._either = family, either
        self._reader = Reader()
        self._events: list[Event] = []
        self._blank = ""  # whitespace that is text only if text follows
        self._said = False  # whether there was text
        self._after_call = False
        make_id = new_id or (family or HERMES).new_id
        self._calls = Calls(tools, self._emit, make_id, allowed=allowed)
        self._running = self._run(family) if family else None

    @property
    def markers(self) -> tuple[str, ...]:
        """What the text must show though it may be special tokens: see `GenerateOptions`."""
        return self._family.all_markers if self._family else ()

    def add(self, text: str) -> list[Event]:
        """What `text` made certain."""
        if self._running is None:
            return [Text(text)] if text else []
        self._reader.feed(text)
        return self._resume()

    def finish(self) -> list[Event]:
        """What is still held back at the end of the answer."""
        if self._running is None:
            return []
        self._reader.close()
        events = self._resume()
        self._running = None
        return events

    def _resume(self) -> list[Event]:
        assert self._running is not None
        next(self._running, None)
        events, self._events = self._events, []
        return _joined(events)

    def _emit(self, event: Event) -> None:
        if isinstance(event, CallBegun):
            self._blank = ""
            self._after_call = True
        elif isinstance(event, CallEnded):
            self._reader.mark()
        self._events.append(event)

    def _say(self, text: str) -> None:
        """Text, but for whitespace at its end that may stand before a call, or behind one."""
        text = self._blank + text
        if self._after_call:
            text = text.lstrip()
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            self._events.append(Text(said))
            self._said, self._after_call = True, False

    def _run(self, family: Family) -> Reading[None]:
        while True:
            opener = yield from self._text_before_call(family)
            if opener is None:
                break
            try:
                yield from self._block(family, opener)
            except Malformed:
                yield from self._spoiled(family, opener)
        if self._blank:
            self._events.append(Text(self._blank))

    def _text_before_call(self, family: Family) -> Reading[str | None]:
        """Says the text before the next opener and returns that; None at the end of the answer,
        "" for a call that needs none."""
        reader = self._reader
        openers: tuple[str, ...] = (*family.openers, *family.dropped)
        while True:
            if family.bare and not self._said:
                yield from self._skip_blank()
                if reader.rest.startswith(family.bare):
                    reader.mark()
                    return ""
            rest = reader.rest
            at, opener = first_of(rest, openers)
            if self._either and (self._said or rest[:at].strip()):
                openers = family.dropped
                at, opener = first_of(rest, openers)
            if not opener:
                at = len(rest) if reader.closed else len(rest) - longest_beginning(rest, openers)
            self._say(reader.take(at))
            if opener:
                reader.mark()
                reader.take(len(opener))
                if opener not in family.dropped:
                    return opener
                continue
            if reader.closed:
                return None
            yield

    def _skip_blank(self) -> Reading[None]:
        """Whitespace before a call that needs no opener; behind a call, what separates them too."""
        while True:
            rest = self._reader.rest
            more = rest.lstrip(SPACE + ";," if self._after_call else SPACE)
            blank = self._reader.take(len(rest) - len(more))
            self._say("" if self._after_call else blank)
            if more or self._reader.closed:
                return
            yield

    def _block(self, family: Family, opener: str) -> Reading[None]:
        """The calls behind an opener, up to what closes them. Raises Malformed."""
        reader, closer = self._reader, family.openers.get(opener, "")
        self._calls.known_only = not opener
        while True:
            yield from family.body(reader, self._calls)
            if not closer:
                return
            yield from reader.skip(_LEFT)
            if (yield from reader.accept(closer)):
                return
            if reader.ended_within(closer):
                raise CutOff

    def _spoiled(self, family: Family, opener: str) -> Reading[None]:
        """A call that is none, as text."""
        reader, closer = self._reader, family.openers.get(opener, "")
        if reader.closed:
            reader.take(len(reader.rest))
        text = reader.taken
        if opener and not self._calls.open and closer.startswith(text.strip(_LEFT)):
            return  # all that is missing is what closes calls that are complete
        if not opener and not self._calls.open:  # JSON, or a list, that is simply the answer
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
    """The same with as few events as possible."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(last.text + event.text)
        else:
            joined.append(event)
    return joined
