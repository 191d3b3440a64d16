"""Prompt text as answers repeat it, to draft from: without line numbers, as JSON strings."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

_MIN_LINES = 3  # of a listing or JSON string; shorter ones are not rewritten
_MAX_TOKENS = 16_384  # of all rewrites; the last ones count
_CACHED_TEXTS = 256  # whose tokens are cached

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
    """Rewrites the text of prompts, as token sequences. Callable from any thread."""

    def __init__(
        self, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """encode: without special tokens. decode: with special tokens."""
        # The next prompt of a conversation repeats most texts of this one.
        self._encode = lru_cache(_CACHED_TEXTS)(encode)
        self._decode = decode

    def of(self, prompt: Sequence[int]) -> list[list[int]]:
        """Return the rewrites of `prompt`, in its order; of equal ones the last."""
        found: dict[str, list[int]] = {}
        left = _MAX_TOKENS
        for text in reversed(list(rewrite(self._decode(prompt)))):
            tokens = self._encode(text)
            left -= len(tokens)
            if left < 0:
                break
            found.setdefault(text, tokens)
        return list(found.values())[::-1]
