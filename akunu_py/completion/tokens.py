"""Source text to tokens, as completion needs it: in parts, nothing added, no text mistaken for a
special token, and token healing at the end of the prefix.
"""

from __future__ import annotations

import bisect
import re
from functools import lru_cache
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_CACHED = 512  # texts: windows of the buffer, and pieces of it and of other files
_MAX_HEALED = 64  # characters; a run of spaces may be one long token


class CodeTokens:
    """The tokenizer of a model, as completion uses it.

    vocabulary: how many tokens its weights have; a tokenizer may name more.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._vocabulary: dict[str, int] = {
            text: token for text, token in tokenizer.get_vocab().items() if token < vocabulary
        }
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        # Some tokenizers have added tokens for runs of spaces: those may stay what they are.
        self._markers = {text for text in added if len(text) > 1 and not text.isspace()}
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._byte_level = "Ġ" in self._vocabulary
        self._table: tuple[list[str], list[int]] | None = None
        self._sentinel = len(self._encode("☺"))
        self.opening = [int(token) for token in tokenizer.encode("")]
        self.encode = lru_cache(_CACHED)(self._encode_text)

    def __contains__(self, token: object) -> bool:
        return token in self._vocabulary

    def token(self, text: str) -> int:
        """The id of a token of the vocabulary."""
        return self._vocabulary[text]

    def marker_ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The ids of those of `texts` that are markers of this tokenizer, not plain words."""
        known = self._markers.intersection(texts, self._vocabulary)
        return frozenset(self._vocabulary[text] for text in known)

    def encode_bare(self, text: str) -> list[int]:
        """As `encode`, without the space that SentencePiece puts before a text.

        Source: the makers' own encode_infilling, which encodes behind a character and cuts it off.
        """
        return list(self.encode("☺" + text)[self._sentinel :]) if text else []

    def heal(self, text: str) -> tuple[tuple[int, ...], str]:
        """Token healing: the tokens of `text` but for its last, and the text of that one, which
        is to be sampled again.

        The end of a prefix was cut where the cursor is, not where a token ends; the model continues
        badly after a token that it would have chosen otherwise. The text is empty, and nothing is
        taken away, where no longer token begins as the last one does.
        """
        tokens = self.encode(text)
        if len(tokens) < 2 or not self._may_be_longer(tokens[-1], text):
            return tokens, ""
        start = max(0, len(text) - _MAX_HEALED)
        for last in range(len(tokens) - 1, max(0, len(tokens) - 4), -1):
            rest = self._decode(tokens[:last])
            if len(rest) >= start and text.startswith(rest):
                return tokens[:last], text[len(rest) :]
        return tokens, ""

    def _may_be_longer(self, last: int, text: str) -> bool:
        """Whether a token of the vocabulary is longer than `last`, the last of `text`, and begins
        with it. A word and spaces always may be; part of a character is none to ask for."""
        if text[-1].isalnum() or text[-1] == "_" or text[-1].isspace():
            return True
        piece = self.text(last)
        if not piece:
            return False
        texts, _ = self._table or self._make_table()
        after = bisect.bisect_right(texts, piece)
        return after < len(texts) and texts[after].startswith(piece)

    def compatible_tokens(self, text: str) -> tuple[int, ...]:
        """All tokens of whole characters that `text` begins with, or that begin with `text`."""
        texts, ids = self._table or self._make_table()
        spans = [(text, text + "\U0010ffff")]
        spans += [(text[:length], text[:length] + "\0") for length in range(1, len(text))]
        return tuple(
            token
            for first, last in spans
            for token in ids[bisect.bisect_left(texts, first) : bisect.bisect_left(texts, last)]
        )

    def text(self, token: int) -> str:
        """The text of one token as it stands inside a text; empty for a part of a character."""
        piece = self._backend.id_to_token(token)
        return self._piece_text(piece) if piece is not None else ""

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of `text` alone. What looks like a marker in it is text: it is encoded in two."""
        tokens: list[int] = []
        at = 0
        for found in self._marker.finditer(text):
            cut = found.start() + 1
            tokens += self._encode(text[at:cut])
            at = cut
        tokens += self._encode(text[at:])
        return tuple(tokens)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def _make_table(self) -> tuple[list[str], list[int]]:
        pairs = [
            (text, token)
            for piece, token in self._vocabulary.items()
            if piece not in self._markers and (text := self._piece_text(piece))
        ]
        pairs.sort()
        self._table = [text for text, _ in pairs], [token for _, token in pairs]
        return self._table

    def _piece_text(self, piece: str) -> str:
        if not self._byte_level:
            return piece.replace("▁", " ")
        try:
            return bytes(_BYTES[character] for character in piece).decode()
        except (KeyError, UnicodeDecodeError):  # not of bytes, or a part of a character
            return ""


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as (Radford et al. 2019): printable ones as
    themselves, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table


_BYTES = _byte_alphabet()
