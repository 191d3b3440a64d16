"""The trie of a model's tokens as bytes, which llguidance matches grammars against."""

from __future__ import annotations

import re

from llguidance import LLTokenizer

from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.errors import UsageError
from akunu_py.text import on_one_line

_FORCED_SPECIAL = re.compile(rb"\xff\[([0-9]+)\]")
_cached_tables: dict[tuple[str, int, frozenset[int]], LLTokenizer] = {}  # of the last model only


def token_tables(codec: TokenCodec) -> LLTokenizer:
    """Return a model's tables. Raises UsageError for tokenizers that llguidance does not know."""
    key = tables_key(codec)
    if (tables := _cached_tables.get(key)) is None:
        text, ends = codec.tokenizer.backend_tokenizer.to_str(), sorted(codec.stop_tokens)
        try:
            tables = LLTokenizer(text, n_vocab=codec.vocabulary, eos_token=ends)
        except ValueError as error:
            reason = on_one_line(str(error))
            raise UsageError(
                f"constrained answers do not support the tokenizer of {codec.name}: {reason}"
            ) from error
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
