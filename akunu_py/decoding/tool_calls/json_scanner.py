"""Where a JSON value ends in a text that comes in pieces, and whether it is one at all."""

from __future__ import annotations

import re
from typing import Literal

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_VALID = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_LONGEST_SCALAR = 400  # characters
_DEEPEST = 200
_State = Literal["value", "item", "key", "member", "colon", "after", "string", "scalar", "done"]


class NotJson(Exception):
    """at: how many characters of the last piece were still JSON. text: these, as JSON."""

    def __init__(self, at: int, text: str = "") -> None:
        super().__init__(at)
        self.at, self.text = at, text


class JsonScanner:
    """Follows one JSON value, from its first character on.

    Control characters in strings, which JSON forbids and models write, become escapes. State
    "item" is behind "[", "member" behind "{", "key" behind a comma in an object.
    """

    def __init__(self) -> None:
        self._state: _State = "value"
        self._open: list[str] = []  # closing brackets that are due
        self._is_key = False
        self._escape = ""  # an escape that has begun
        self._scalar = ""

    @property
    def complete(self) -> bool:
        return self._state == "done"

    def complete_at_end(self) -> bool:
        """Whether it is one where the text ends here."""
        if self._state == "scalar" and not self._open:
            return _VALID.fullmatch(self._scalar) is not None
        return self.complete

    def scan(self, text: str) -> tuple[int, str]:
        """How many characters of `text` belong to the value, and these as JSON. Raises NotJson."""
        parts: list[str] = []
        try:
            return self._scan(text, parts), "".join(parts)
        except NotJson as error:
            raise NotJson(error.at, "".join(parts)) from None

    def _scan(self, text: str, parts: list[str]) -> int:
        at = 0
        while at < len(text) and self._state != "done":
            if self._state == "string":
                at = self._string(text, at, parts)
            elif self._state == "scalar":
                at = self._more_scalar(text, at, parts)
            elif found := _SPACE.match(text, at):
                parts.append(found[0])
                at = found.end()
            else:
                at = self._structure(text, at, parts)
        return at

    def _string(self, text: str, at: int, parts: list[str]) -> int:
        if self._escape:
            return self._in_escape(text, at, parts)
        if found := _PLAIN.match(text, at):
            parts.append(found[0])
            return found.end()
        character = text[at]
        if character == '"':
            self._state = "colon" if self._is_key else self._after()
            parts.append(character)
        elif character == "\\":
            self._escape = character
        else:
            known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
            parts.append(known.get(character, f"\\u{ord(character):04x}"))
        return at + 1

    def _in_escape(self, text: str, at: int, parts: list[str]) -> int:
        """An escape is emitted whole."""
        character = text[at]
        if len(self._escape) > 1:
            fits = character in "0123456789abcdefABCDEF"
        else:
            fits = character in '"\\/bfnrtu'
        if not fits:
            raise NotJson(at)
        self._escape += character
        if len(self._escape) == 6 or (len(self._escape) == 2 and character != "u"):
            parts.append(self._escape)
            self._escape = ""
        return at + 1

    def _more_scalar(self, text: str, at: int, parts: list[str]) -> int:
        found = _SCALAR.match(text, at)
        if found:
            self._scalar += found[0]
            parts.append(found[0])
            at = found.end()
        if len(self._scalar) > _LONGEST_SCALAR:
            raise NotJson(at)
        if at < len(text):
            if not _VALID.fullmatch(self._scalar):
                raise NotJson(at)
            self._state = self._after()
        return at

    def _structure(self, text: str, at: int, parts: list[str]) -> int:
        character = text[at]
        state = self._state
        if state in ("after", "item", "member") and character == self._open[-1]:
            self._open.pop()
            self._state = self._after()
        elif state == "after" and character == ",":
            self._state = "key" if self._open[-1] == "}" else "value"
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state in ("key", "member") and character == '"':
            self._state, self._is_key = "string", True
        elif state in ("value", "item") and character == '"':
            self._state, self._is_key = "string", False
        elif state in ("value", "item") and character in "{[" and len(self._open) < _DEEPEST:
            self._open.append("}" if character == "{" else "]")
            self._state = "member" if character == "{" else "item"
        elif state in ("value", "item") and _SCALAR.match(character):
            self._state, self._scalar = "scalar", ""
            return at  # read as a whole
        else:
            raise NotJson(at)
        parts.append(character)
        return at + 1

    def _after(self) -> _State:
        return "after" if self._open else "done"
