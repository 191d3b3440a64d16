"""The tables of a tokenizer: the same from the file as from the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from akunu_py.decoding.constraint import token_tables as module
from akunu_py.decoding.constraint.token_tables import token_tables
from akunu_py.decoding.model.engine import Engine
from tests.support.engines import altered

pytestmark = pytest.mark.usefixtures("own_directories")

GRAMMARS = [r'start: /"[^"]*"/', r"start: /[a-z ]{3,}[0-9]+/", 'start: "{" /[ \\n]*/ "é€😀"']


class Untold:
    """A tokenizer that does not say what it holds."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = tokenizer.encode

    def to_str(self) -> str:
        raise AssertionError("the file should have been read")


def fresh(engine: Engine) -> LLTokenizer:
    module._cached_tables.clear()
    return token_tables(engine.tokens)


def masks(tables: LLTokenizer, engine: Engine) -> list[bytes]:
    found: list[bytes] = []
    for grammar in GRAMMARS:
        matcher = LLMatcher(tables, LLMatcher.grammar_from_lark(grammar))
        while not matcher.is_stopped() and len(found) % 20 != 19:
            mask = matcher.compute_bitmask()
            found.append(mask)
            bits = (byte >> bit & 1 for byte in mask for bit in range(8))
            allowed = [token for token, bit in enumerate(bits) if bit]
            assert matcher.consume_token(allowed[len(found) * 37 % len(allowed)])
    return found


def test_from_the_file_they_are_the_same(starter_engine: Engine) -> None:
    class Wrapped:
        backend_tokenizer = Untold(starter_engine.tokens.tokenizer.backend_tokenizer)

    made = fresh(starter_engine)
    loaded = fresh(altered(starter_engine, tokenizer=Wrapped()))
    assert masks(loaded, starter_engine) == masks(made, starter_engine)
    assert loaded.eos_tokens == made.eos_tokens
    for text in ('{"a": "b c",\n  "d": 12.5}', "é€😀 \ttext", ""):
        assert loaded.tokenize_str(text) == made.tokenize_str(text)
    data = 'ends within "ä'.encode()[:-1]
    assert loaded.tokenize_bytes(data) == made.tokenize_bytes(data)
    special = range(starter_engine.tokens.vocabulary)
    assert [loaded.is_special_token(each) for each in special] == [
        made.is_special_token(each) for each in special
    ]


def test_a_damaged_or_foreign_file_is_made_again(starter_engine: Engine) -> None:
    fresh(starter_engine)
    file = module._tables_path(starter_engine.tokens)
    whole = file.read_bytes()
    damaged = [whole[:-1], whole[:20], b"", b"x" * 100, whole[:5000] + b"?" + whole[5001:]]
    for data in damaged:
        file.write_bytes(data)
        assert module._loaded(starter_engine.tokens) is None
    assert module._loaded(altered(starter_engine, vocabulary=99).tokens) is None
    fresh(starter_engine)
    assert file.read_bytes() == whole


def test_a_disk_that_refuses_is_no_reason_to_fail(
    starter_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "write_atomically", refuse)
    assert fresh(starter_engine).vocab_size == starter_engine.tokens.vocabulary
