"""Reader of tool calls: JSON as it streams, and the text of a call that fails."""

import re

from akunu_py.engine.text.reader import CutOff, Emit, Malformed, ParserSteps, Reader

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_VALID = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_MAX_SCALAR = 400  # characters
_MAX_DEPTH = 200  # nested objects and arrays


class CallReader(Reader):
    """A reader of JSON that records what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[str] = []

    def start_recording(self) -> None:
        self._recorded.clear()

    @property
    def recorded(self) -> str:
        """The text that was read since `start_recording`."""
        return "".join(self._recorded)

    def consume(self, count: int) -> str:
        text = super().consume(count)
        self._recorded.append(text)
        return text

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
