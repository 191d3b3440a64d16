"""Prompt text in the form in which an answer repeats it, to draft from.

Coding agents show files with line numbers, and their edits are JSON strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

_MIN_LINES = 3  # of a listing or JSON string; shorter ones are not rewritten
_MAX_TOKENS = 16_384  # of all rewrites; the last ones count
_UNREAD = 64  # tokens after which a longer prompt is rewritten again

_NUMBER = re.compile(r"^ *\d+[\t:|→]", re.MULTILINE)
_LISTING = re.compile(rf"(?:^ *\d+[\t:|→].*\n){{{_MIN_LINES},}}", re.MULTILINE)
_JSON_STRING = re.compile(r'"(?:[^"\\\n]++|\\.)*+"')


def rewrite(text: str) -> Iterator[str]:
    """Yield numbered listings as plain text and as JSON strings, and JSON strings as plain text."""
    if "\\n" in text:
        for match in _JSON_STRING.finditer(text):
            string = match.group()
            if string.count("\\n") >= _MIN_LINES:
                with suppress(ValueError):  # quotes that are not JSON
                    plain = json.loads(string, strict=False)
                    yield plain
                    yield from rewrite(plain)
    for match in _LISTING.finditer(text):
        plain = _NUMBER.sub("", match.group())
        yield plain
        yield json.dumps(plain, ensure_ascii=False)[1:-1]


class PromptRewrites:
    """The rewrites of a growing prompt, as token sequences."""

    def __init__(
        self, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
    ) -> None:
        """encode: without special tokens. decode: with special tokens."""
        self._encode, self._decode = encode, decode
        self._prompt: list[int] = []  # of the last call
        self._rewrites: list[list[int]] = []  # its rewrites, in its order
        self._encoded: dict[str, list[int]] = {}  # texts of them, and of one that is too long

    def of(self, prompt: Sequence[int]) -> list[list[int]]:
        """Return the rewrites of `prompt`, in its order; those before it may lack the last few."""
        known = len(self._prompt)
        if not known <= len(prompt) < known + _UNREAD or list(prompt[:known]) != self._prompt:
            self._prompt = list(prompt)
            before, self._encoded, self._rewrites = self._encoded, {}, []
            left = _MAX_TOKENS
            for text in reversed(list(rewrite(self._decode(self._prompt)))):
                is_new = text not in self._encoded
                if is_new:
                    self._encoded[text] = before.get(text) or self._encode(text)
                left -= len(self._encoded[text])
                if left < 0:
                    break
                if is_new:
                    self._rewrites.insert(0, self._encoded[text])
        return self._rewrites
