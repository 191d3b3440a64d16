"""Keys of a JSON object that a grammar leaves open: none is written twice.

A grammar cannot remember names, and small models repeat members without end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

_QUOTE, _BACKSLASH, _OPEN, _CLOSE = b'"', b"\\", b"{[", b"}]"


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys in a JSON text so far."""

    # Of each open container: the keys of an object, None for an array.
    open: tuple[frozenset[bytes] | None, ...] = ()
    expected: bool = False  # the next string is a key
    text: bytes | None = None  # of the open string
    escaped: bool = False
    repeated: bool = False  # an object has the same key twice


class KeyTokens:
    """The tokens of a vocabulary that can end a key."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """texts: of all tokens."""
        self.texts = texts
        self._tokens = [token for token, text in enumerate(texts) if _QUOTE in text]
        self._tokens.sort(key=texts.__getitem__)
        self._sorted = [texts[token] for token in self._tokens]
        self._whole: dict[bytes, list[int]] = defaultdict(list)  # by a string that is in the token
        for place, text in enumerate(self._sorted):
            for inner in text.split(_QUOTE)[1:-1]:
                self._whole[inner].append(place)

    def repeating(self, state: _Keys) -> list[int]:
        """Return the tokens that would repeat a key."""
        fresh, places = replace(state, repeated=False), set[int]()
        for used in {key for keys in state.open if keys for key in keys}:
            places.update(self._whole.get(used, ()))
            if state.expected and state.text is not None and used.startswith(state.text):
                rest = used[len(state.text) :] + _QUOTE
                first = bisect_left(self._sorted, rest)
                last = bisect_left(self._sorted, rest[:-1] + b"#")  # the byte after the quote
                places.update(range(first, last))
        return [self._tokens[at] for at in places if advanced(fresh, self._sorted[at]).repeated]


def advanced(state: _Keys, text: bytes) -> _Keys:
    """Return the state after more text."""
    opened, expected, string, escaped, repeated = (
        state.open, state.expected, state.text, state.escaped, state.repeated,
    )  # fmt: skip
    for at in range(len(text)):
        byte = text[at : at + 1]
        if string is not None and (escaped or byte != _QUOTE):
            string, escaped = string + byte, not escaped and byte == _BACKSLASH
        elif string is not None:
            keys = opened[-1] if opened else None
            if expected and keys is not None:
                repeated = repeated or string in keys
                opened, expected = (*opened[:-1], keys | {string}), False
            string = None
        elif byte == _QUOTE:
            string = b""
        elif byte in _OPEN:
            opened = (*opened, frozenset() if byte == b"{" else None)
            expected = byte == b"{"
        elif byte in _CLOSE:
            opened, expected = opened[:-1], False
        elif byte == b",":
            expected = bool(opened) and opened[-1] is not None
    return replace(
        state, open=opened, expected=expected, text=string, escaped=escaped, repeated=repeated
    )


NO_KEYS = _Keys()
