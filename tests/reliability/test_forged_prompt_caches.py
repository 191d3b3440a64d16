"""Damaged and forged prompt caches are refused in one line, or continue as a fresh loop would.

Damage changes bytes or values at random. A forged file has a right digest and a wrong header.
"""

import hashlib
import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from akunu_py.engine.engine import Engine
from akunu_py.engine.histories import disk
from akunu_py.engine.loop import StepLoop
from akunu_py.errors import StoreError
from akunu_py.types import GenerateOptions
from tests.reliability.fuzz import SCALARS, changed, clear, damaged, explore, lengths
from tests.support.engines import altered
from tests.support.families import build
from tests.support.targets import last_tokens
from tests.support.tiny_fim import load_tiny

OPTIONS = GenerateOptions(max_tokens=3, draft="off")
PROMPT = list(range(1, 12))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    tiny = load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])
    return altered(tiny, model=build("llama"), vocabulary=96)


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    loop = StepLoop(engine)
    loop.answer(PROMPT, OPTIONS)
    path = tmp_path / "saved.safetensors"
    disk.save(loop.runner.caches.last, loop.engine, path)
    return path


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the tensors of a file."""
    whole = path.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    return json.loads(whole[8:end]), whole[end:]


def joined(header: Any, tensors: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def signed(whole: bytes) -> bytes:
    """Return a file with a right digest, which is its last tensor."""
    return whole[:-32] + hashlib.sha256(whole[:-32]).digest()


def opened(engine: Engine, path: Path, *, compare: bool = False) -> str:
    """Return the kind of error, or "answered". compare: with a fresh session's answer."""
    loop = StepLoop(engine)
    with clear() as errors:
        loop.runner.caches.release(disk.load(loop.engine, path))
    if errors:
        assert last_tokens(loop) == []
        return type(errors[0]).__name__
    prompt = PROMPT if compare else [*last_tokens(loop), 5]
    tokens = loop.answer(prompt, OPTIONS).tokens
    assert all(0 <= token < engine.tokens.vocabulary for token in tokens)
    assert not compare or tokens == StepLoop(engine).answer(prompt, OPTIONS).tokens
    return "answered"


@lengths(30)
def test_damaged_files_are_refused_or_as_good_as_new(
    examples: int, engine: Engine, saved: Path
) -> None:
    header, tensors = parts(saved)
    whole, start = saved.read_bytes(), len(saved.read_bytes()) - len(tensors)

    def check(data: bytes) -> None:
        saved.write_bytes(data)
        opened(engine, saved, compare=True)

    headers = damaged(whole[:start]).map(lambda data: data + tensors)
    bodies = damaged(tensors).map(lambda data: whole[:start] + data)
    explore(check, examples, headers | bodies | changed(header).map(lambda h: joined(h, tensors)))


def test_tokens_that_differ_from_the_cache_are_noticed(engine: Engine, saved: Path) -> None:
    header, tensors = parts(saved)
    about = json.loads(header["__metadata__"]["0.akunu"])
    tokens, pending = about["tokens"], about["pending"]
    assert opened(engine, saved, compare=True) == "answered"
    for change in (
        {"tokens": [*tokens, 1]},
        {"tokens": [tokens[0] + 1, *tokens[1:]]},
        {"tokens": tokens[:-1]},
        {"pending": [2**31]},
        {"pending": [*pending, 5]},
    ):
        metadata = header["__metadata__"] | {"0.akunu": json.dumps(about | change)}
        saved.write_bytes(joined(header | {"__metadata__": metadata}, tensors))
        assert opened(engine, saved) == "DamagedCache", change


NUMBERS = st.integers(-3, 40) | st.sampled_from([2**31 - 1, 2**31, 2**62, -(2**62)])


@lengths(25)
def test_forged_metadata_is_refused(examples: int, engine: Engine, saved: Path) -> None:
    header, tensors = parts(saved)
    about = json.loads(header["__metadata__"]["0.akunu"])
    seen: Counter[str] = Counter()

    def check(value: Any) -> None:
        metadata = header["__metadata__"] | {"0.akunu": json.dumps(value)}
        saved.write_bytes(signed(joined(header | {"__metadata__": metadata}, tensors)))
        seen[opened(engine, saved)] += 1

    fields = st.sampled_from(sorted(about))
    one = st.builds(lambda field, value: about | {field: value}, fields, SCALARS)
    tokens = st.lists(NUMBERS, min_size=len(about["tokens"]), max_size=len(about["tokens"]))
    others = tokens.map(lambda value: about | {"tokens": value})
    explore(check, examples, changed(about) | one | others)
    assert seen["DamagedCache"] > examples / 4, seen


def test_special_files_are_refused_at_once(engine: Engine, tmp_path: Path) -> None:
    loop = StepLoop(engine)
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "directory.safetensors").mkdir()
    for name in ("fifo", "zero", "directory"):
        with pytest.raises(StoreError, match="cannot read"):
            loop.runner.caches.release(disk.load(loop.engine, tmp_path / f"{name}.safetensors"))
