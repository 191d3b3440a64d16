"""The bytes of a model's tokens in a trie, which grammars are held against.

llguidance takes them out of the tokenizer, which is half of the work. So they are kept on disk, and
checked: a file that is damaged, or of another tokenizer, is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from array import array
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from akunu_py.decoding.learned import directory_of
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.errors import UsageError
from akunu_py.files import read_bounded, write_atomically
from akunu_py.text import on_one_line

_MAGIC = b"akunu tokens 1\n"
_LARGEST = 1 << 26  # bytes of a file
_SPECIAL = 1 << 31  # in the length of a token
# What both ways to the tables must tokenize alike.
_SAMPLES = ('{"name": "A b", "c": [1, 2.5]}', '\n  "ä": {', ": ", "}")
_FORCED_SPECIAL = re.compile(rb"\xff\[([0-9]+)\]")
_built: dict[tuple[str, int, frozenset[int]], LLTokenizer] = {}  # the last model's


def token_tables(codec: TokenCodec) -> LLTokenizer:
    """Built once for a model. Raises UsageError for tokenizers that llguidance does not know."""
    key = codec.digest, codec.vocabulary, codec.stop_tokens
    if key not in _built:
        tables = _loaded(codec) or _made(codec)
        _built.clear()
        _built[key] = tables
    return _built[key]


def forced_tokens(tables: LLTokenizer, text: bytes) -> list[int]:
    """The tokens of a text that a matcher forces, in which special tokens stand by number."""
    parts = _FORCED_SPECIAL.split(text)
    tokens: list[int] = []
    for index, part in enumerate(parts):
        tokens += [int(part)] if index % 2 else tables.tokenize_bytes(part) if part else []
    return tokens


class _Tokens:
    """The tokenizer as llguidance wants one."""

    bos_token_id = None

    def __init__(self, codec: TokenCodec, tokens: list[bytes], special: list[int]) -> None:
        self.eos_token_id = min(codec.stop_tokens)
        self.tokens, self.special_token_ids = tokens, special
        self._encode = codec.tokenizer.backend_tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return list(self._encode(text, add_special_tokens=False).ids)


def _made(codec: TokenCodec) -> LLTokenizer:
    """From the tokenizer; kept on disk, if the disk does not refuse."""
    try:
        tables = LLTokenizer(
            codec.tokenizer.backend_tokenizer.to_str(),
            n_vocab=codec.vocabulary,
            eos_token=sorted(codec.stop_tokens),
        )
    except ValueError as error:
        raise UsageError(
            f"the tokenizer of {codec.name} is of a kind that answers cannot be constrained "
            f"with: {on_one_line(str(error))}"
        ) from error
    tokens = [tables.decode_bytes([token]) for token in range(codec.vocabulary)]
    special = [token for token in range(codec.vocabulary) if tables.is_special_token(token)]
    plain = _Tokens(codec, tokens, special)
    if all(plain(text) == tables.tokenize_str(text) for text in _SAMPLES):
        path = _file(codec)
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, _dumped(tokens, special))
    return tables


def _loaded(codec: TokenCodec) -> LLTokenizer | None:
    """From the file; None where there is none that can be used."""
    try:
        tokens, special = _parsed(read_bounded(_file(codec), _LARGEST))
    except (OSError, ValueError):
        return None
    if len(tokens) != codec.vocabulary:
        return None
    wrapped: Any = TokenizerWrapper(_Tokens(codec, tokens, special))
    return LLTokenizer(wrapped, n_vocab=codec.vocabulary, eos_token=sorted(codec.stop_tokens))


def _file(codec: TokenCodec) -> Any:
    digest = hashlib.sha256(codec.digest.encode()).hexdigest()[:12]
    return directory_of(codec.path) / f"tokens-{digest}"


def _dumped(tokens: list[bytes], special: list[int]) -> bytes:
    lengths = array("I", map(len, tokens))
    for token in special:
        lengths[token] |= _SPECIAL
    body = array("I", [len(tokens)]).tobytes() + lengths.tobytes() + b"".join(tokens)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _parsed(data: bytes) -> tuple[list[bytes], list[int]]:
    """The tokens, and which are special. Raises ValueError for what is no such file."""
    head = len(_MAGIC) + 32
    digest, body = data[len(_MAGIC) : head], data[head:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        raise ValueError("not the bytes of tokens")
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
