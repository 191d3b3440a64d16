"""Parser of tool calls in the text of an answer, streamed or whole.

Emits text and calls as early as is certain, without the markup of calls and whitespace next to it.
A malformed or unfinished call becomes text behind MALFORMED or UNFINISHED. Its arguments may have
streamed by then, but it has no ToolCallFinished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from akunu_py.engine.events import (
    Event,
    Span,
    TextDelta,
    ToolCallFinished,
    ToolCallStarted,
    append_event,
)
from akunu_py.engine.text.reader import (
    SPACE,
    CutOff,
    Malformed,
    ParserSteps,
    StreamParser,
    find_first,
    partial_match_length,
)
from akunu_py.engine.tools.call_reader import CallReader
from akunu_py.engine.tools.formats import HERMES, ToolFormat
from akunu_py.engine.tools.rendering import format_of
from akunu_py.engine.tools.syntaxes import Calls
from akunu_py.types import Tool

MALFORMED = "[malformed tool call] "
UNFINISHED = "[unfinished tool call] "
REFUSED = "[refused tool call] "
_TRAILING = SPACE + "]},;"  # characters that may follow the arguments of a call


def parser_for(
    tokenizer: Any, tools: Sequence[Tool], *, allowed: bool = True, exclusive: bool = False
) -> ToolCallParser:
    """Return a parser for one answer, which must be generated with the parser's `markers`.

    allowed: otherwise calls become text behind REFUSED. exclusive: the answer has calls or text,
    not both, so text is never searched for calls.
    """
    format = format_of(tokenizer) if tools else None
    return ToolCallParser(format, tools, allowed=allowed, exclusive=exclusive)


class ToolCallParser(StreamParser[Event]):
    """Text in, events out: Text, ToolCallStarted, ToolCallArguments, ToolCallFinished."""

    _reader: CallReader

    def __init__(
        self,
        format: ToolFormat | None,
        tools: Sequence[Tool],
        *,
        allowed: bool = True,
        exclusive: bool = False,
    ) -> None:
        """format: None if there are no calls."""
        super().__init__(CallReader())
        self._format, self._exclusive = format, exclusive
        self._whitespace = ""  # whitespace that is text only if text follows
        self._had_text = False  # whether there was text
        self._after_call = False
        self._opened = format is not None and format.opened
        new_id = (format or HERMES).new_id
        self._calls = Calls({tool.name: tool for tool in tools}, self._emit, new_id, allowed)

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the text must contain, for `GenerateOptions.markers`."""
        return self._format.all_markers if self._format else ()

    def add(self, text: str, drafted: Sequence[Span] = ()) -> list[Event]:
        if self._format is not None:
            return super().add(text, drafted)
        return [TextDelta(text, tuple(drafted))] if text else []

    def _emit(self, event: Event) -> None:
        if isinstance(event, ToolCallStarted):
            self._whitespace = ""
            self._after_call = True
        elif isinstance(event, ToolCallFinished):
            self._reader.start_recording()
        append_event(self._output, event)

    def _emit_text(self, text: str, *, marks_drafts: bool = True) -> None:
        """Emit text that was just read, without whitespace that may be next to a call."""
        text = self._whitespace + text
        if self._after_call:
            text = text.lstrip()
        stripped = text.rstrip()
        self._whitespace = text[len(stripped) :]
        if stripped:
            drafted = self._reader.drafted(len(text), len(stripped)) if marks_drafts else ()
            append_event(self._output, TextDelta(stripped, drafted))
            self._had_text, self._after_call = True, False

    def _parse(self) -> ParserSteps[None]:
        if (format := self._format) is None:
            return
        while True:
            opener = yield from self._text_before_call(format)
            if opener is None:
                break
            try:
                yield from self._read_block(format, opener)
            except Malformed:
                yield from self._emit_malformed(format, opener)
        if self._whitespace:
            append_event(self._output, TextDelta(self._whitespace))

    def _text_before_call(self, format: ToolFormat) -> ParserSteps[str | None]:
        """Emit text, then return the next opener: "" for a bare call, None at the end."""
        reader = self._reader
        if self._opened:
            self._opened = False
            reader.start_recording()
            return ""
        bare = filter(None, [format.bare_call])
        openers: tuple[str, ...] = (*format.openers, *format.text_markup, *bare)
        while True:
            if format.bare_opener and not self._had_text:
                if self._after_call:
                    yield from reader.skip(SPACE + ";,")
                else:
                    yield from reader.skip(emit=self._emit_text)
                if reader.unread.startswith(format.bare_opener):
                    reader.start_recording()
                    return ""
            rest = reader.unread
            at, opener = find_first(rest, openers)
            if self._exclusive and (self._had_text or rest[:at].strip()):
                openers = format.text_markup
                at, opener = find_first(rest, openers)
            if not opener:
                at = len(rest) if reader.closed else len(rest) - partial_match_length(rest, openers)
            self._emit_text(reader.consume(at))
            if opener:
                reader.start_recording()
                if opener == format.bare_call:
                    return ""
                reader.consume(len(opener))
                if opener not in format.text_markup:
                    return opener
                continue
            if reader.closed:
                return None
            yield

    def _read_block(self, format: ToolFormat, opener: str) -> ParserSteps[None]:
        """Read the calls after an opener, up to their closer. Raises Malformed."""
        reader, closer = self._reader, format.openers.get(opener, "")
        self._calls.known_only = not opener
        while True:
            yield from format.syntax(reader, self._calls)
            if not opener and format.bare_call:
                ends = tuple(format.openers.values())
                yield from reader.accept(*ends, skip=SPACE)
                if any(map(reader.cut_off_in, ends)):
                    reader.consume(len(reader.unread))
            if not closer:
                return
            if (yield from reader.accept(closer, skip=_TRAILING.replace(closer[0], ""))):
                return
            if reader.cut_off_in(closer):
                raise CutOff

    def _emit_malformed(self, format: ToolFormat, opener: str) -> ParserSteps[None]:
        reader, closer = self._reader, format.openers.get(opener, "")
        if reader.closed:
            reader.consume(len(reader.unread))
        text = reader.recorded
        if opener and not self._calls.in_call and closer.startswith(text.strip(_TRAILING)):
            return  # only the closer of complete calls is missing
        if not opener and not self._calls.in_call:  # the answer is JSON or a list
            self._had_text = True
            self._emit_text(text)
            return
        self._calls.in_call = False
        if self._had_text or self._after_call:
            self._whitespace, self._after_call = "\n", False
        why = UNFINISHED if reader.closed else MALFORMED
        why = why if self._calls.allowed else REFUSED
        self._emit_text(why + text, marks_drafts=False)
        if closer and not reader.closed:
            with contextlib.suppress(CutOff):
                self._emit_text((yield from reader.emit_until((closer,), self._emit_text)))
