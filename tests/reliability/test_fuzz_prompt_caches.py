"""Saved sessions that were altered: refused in one clear line, or as good as a fresh one.

And tokens that a model does not have, wherever they come from.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError, DamagedModel
from akunu_py.types import GenerateOptions
from tests.reliability.fuzz import changed, damaged, explore, lengths
from tests.support.tiny_fim import byte_level, load_tiny, write_model

OPTIONS = GenerateOptions(max_tokens=6, draft="off")
PROMPT = list(b"akunu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])


@pytest.fixture(scope="module")
def talked(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    session = Session(tiny)
    session.generate(PROMPT, OPTIONS).answer()
    path = tmp_path_factory.mktemp("saved") / "talk.safetensors"
    session.save_prompt_cache(path)
    return path


def parts(path: Path) -> tuple[bytes, bytes]:
    """The header's text, and what follows it."""
    whole = path.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    return whole[8:end], whole[end:]


def reopen(engine: Engine, path: Path, data: bytes) -> bool:
    """Whether `data` is taken for a session; then it must go on as a fresh one would."""
    path.write_bytes(data)
    session = Session(engine)
    try:
        session.load_prompt_cache(path)
    except AkunuError as error:
        said = str(error)
        if not said or "\n" in said or len(said) > 500:
            raise
        return False
    again = session.generate(PROMPT, OPTIONS).answer()
    assert again.tokens == Session(engine).generate(PROMPT, OPTIONS).answer().tokens
    return True


@lengths(75)
def test_files_with_bytes_turned_over(
    examples: int, tiny: Engine, talked: Path, tmp_path: Path
) -> None:
    header, body = parts(talked)
    length = struct.pack("<Q", len(header))
    whole = damaged(length + header).map(lambda data: data + body)
    values = damaged(body).map(lambda data: length + header + data)

    def check(data: bytes) -> None:
        reopen(tiny, tmp_path / "x.safetensors", data)

    explore(check, examples, whole | values)


@lengths(75)
def test_headers_of_wrong_values(examples: int, tiny: Engine, talked: Path, tmp_path: Path) -> None:
    """What the file says of itself, and what MLX and mlx-lm read of it."""
    text, body = parts(talked)
    header = json.loads(text)
    about = json.loads(header["__metadata__"]["0.akunu"])

    def check(case: tuple[Any, Any]) -> None:
        changed_header, changed_about = case
        if changed_about is not None:
            metadata = header["__metadata__"] | {"0.akunu": json.dumps(changed_about)}
            changed_header = header | {"__metadata__": metadata}
        made = json.dumps(changed_header).encode()
        reopen(tiny, tmp_path / "x.safetensors", struct.pack("<Q", len(made)) + made + body)

    either = st.tuples(changed(header), st.none()) | st.tuples(st.just(header), changed(about))
    explore(check, examples, either)


def test_other_tokens_than_the_cache_holds_are_noticed(
    tiny: Engine, talked: Path, tmp_path: Path
) -> None:
    text, body = parts(talked)
    header = json.loads(text)
    about = json.loads(header["__metadata__"]["0.akunu"])
    assert reopen(tiny, tmp_path / "x.safetensors", talked.read_bytes())
    for change in (
        {"tokens": [*about["tokens"], 1]},
        {"tokens": [about["tokens"][0] + 1, *about["tokens"][1:]]},
        {"tokens": about["tokens"][:-1]},
        {"pending": [2**31]},
        {"pending": [*about["pending"], 5]},
    ):
        metadata = header["__metadata__"] | {"0.akunu": json.dumps(about | change)}
        made = json.dumps(header | {"__metadata__": metadata}).encode()
        data = struct.pack("<Q", len(made)) + made + body
        assert not reopen(tiny, tmp_path / "x.safetensors", data), change


def test_tokens_that_the_model_does_not_have_are_not_drafted(tiny: Engine) -> None:
    """A memory may come from anywhere; MLX would read behind its table of embeddings."""
    plain = Session(tiny).generate(PROMPT, OPTIONS).answer()
    for token in (len(tiny.tokens.tokenizer), 2**31, 2**32 - 2):
        draft_context = [[*PROMPT[-2:], *plain.tokens[:2], token, 7]]
        options = GenerateOptions(max_tokens=6, draft="fixed")
        answer = Session(tiny).generate(PROMPT, options, draft_context=draft_context).answer()
        assert answer.tokens == plain.tokens
        assert answer.stats.drafted > 0


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    directory = write_model(tmp_path, byte_level(["<|end|>"]), end="<|end|>")
    byte_level(["<|end|>", "<|new|>"]).save(str(directory / "tokenizer.json"))
    engine = Engine.load(directory)
    with pytest.raises(DamagedModel, match="its weights have only 257 tokens"):
        Session(engine).generate(engine.tokens.encode("a<|new|>"), OPTIONS)
