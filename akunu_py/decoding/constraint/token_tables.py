"""The trie of a model's tokens as bytes, which llguidance matches grammars against.

Extracting the bytes from the tokenizer takes half of the time, so a file stores them. A damaged
file is rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from array import array
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from akunu_py.decoding.learned_state import directory_of
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.errors import UsageError
from akunu_py.files import read_bounded, write_atomically
from akunu_py.text import on_one_line

_MAGIC = b"akunu tokens 1\n"
_MAX_FILE_BYTES = 1 << 26
_SPECIAL = 1 << 31  # in the length of a token
# Tables from the tokenizer and from the file must tokenize these texts alike.
_SAMPLES = ('{"name": "A b", "c": [1, 2.5]}', '\n  "ä": {', ": ", "}")
_FORCED_SPECIAL = re.compile(rb"\xff\[([0-9]+)\]")
_cached_tables: dict[tuple[str, int, frozenset[int]], LLTokenizer] = {}  # of the last model only


def token_tables(codec: TokenCodec) -> LLTokenizer:
    """Return a model's tables. Raises UsageError for tokenizers that llguidance does not know."""
    key = tables_key(codec)
    if (tables := _cached_tables.get(key)) is None:
        tables = _loaded(codec) or _extracted(codec)
        _cached_tables.clear()
        _cached_tables[key] = tables
    return tables


def tables_key(codec: TokenCodec) -> tuple[str, int, frozenset[int]]:
    """Return what identifies a model's tables."""
    return codec.digest, codec.vocabulary, codec.stop_tokens


def forced_tokens(tables: LLTokenizer, text: bytes) -> list[int]:
    """Return the tokens of a matcher's forced text, which names special tokens by id."""
    tokens: list[int] = []
    for index, part in enumerate(_FORCED_SPECIAL.split(text)):
        tokens += [int(part)] if index % 2 else tables.tokenize_bytes(part) if part else []
    return tokens


class _Tokens:
    """A tokenizer with the interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, codec: TokenCodec, tokens: list[bytes], special: list[int]) -> None:
        self.eos_token_id = min(codec.stop_tokens)
        self.tokens, self.special_token_ids = tokens, special
        self._encode = codec.tokenizer.backend_tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return list(self._encode(text, add_special_tokens=False).ids)


def _extracted(codec: TokenCodec) -> LLTokenizer:
    """Build the tables from the tokenizer, and save them if possible."""
    text, ends = codec.tokenizer.backend_tokenizer.to_str(), sorted(codec.stop_tokens)
    try:
        tables = LLTokenizer(text, n_vocab=codec.vocabulary, eos_token=ends)
    except ValueError as error:
        reason = on_one_line(str(error))
        raise UsageError(
            f"constrained answers do not support the tokenizer of {codec.name}: {reason}"
        ) from error
    tokens = [tables.decode_bytes([token]) for token in range(codec.vocabulary)]
    special = [token for token in range(codec.vocabulary) if tables.is_special_token(token)]
    plain = _Tokens(codec, tokens, special)
    if all(plain(text) == tables.tokenize_str(text) for text in _SAMPLES):
        path = _tables_path(codec)
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, _encoded(tokens, special))
    return tables


def _loaded(codec: TokenCodec) -> LLTokenizer | None:
    """Load the tables from the file; return None without a valid one."""
    try:
        tokens, special = _parsed(read_bounded(_tables_path(codec), _MAX_FILE_BYTES))
    except (OSError, ValueError):
        return None
    if len(tokens) != codec.vocabulary:
        return None
    wrapped: Any = TokenizerWrapper(_Tokens(codec, tokens, special))
    return LLTokenizer(wrapped, n_vocab=codec.vocabulary, eos_token=sorted(codec.stop_tokens))


def _tables_path(codec: TokenCodec) -> Any:
    digest = hashlib.sha256(codec.digest.encode()).hexdigest()[:12]
    return directory_of(codec.path) / f"tokens-{digest}"


def _encoded(tokens: list[bytes], special: list[int]) -> bytes:
    lengths = array("I", map(len, tokens))
    for token in special:
        lengths[token] |= _SPECIAL
    body = array("I", [len(tokens)]).tobytes() + lengths.tobytes() + b"".join(tokens)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _parsed(data: bytes) -> tuple[list[bytes], list[int]]:
    """Return all tokens and the ids of special ones. Raises ValueError for an invalid file."""
    head = len(_MAGIC) + 32
    digest, body = data[len(_MAGIC) : head], data[head:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        raise ValueError("damaged token tables")
    count = int.from_bytes(body[:4], "little")
    lengths = array("I", body[4 : 4 + 4 * count])
    tokens, special, at = [], [], 4 + 4 * count
    for token, length in enumerate(lengths):
        size = length & ~_SPECIAL
        tokens.append(body[at : at + size])
        at += size
        if length & _SPECIAL:
            special.append(token)
    return tokens, special
