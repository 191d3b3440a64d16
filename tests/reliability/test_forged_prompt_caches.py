"""Damaged and forged prompt caches are refused in one line, or continue as a fresh session would.

Damage changes bytes or values at random. A forged file has a right digest and wrong contents.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_cache

from akunu_py.decoding import kv_cache
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache import cache_file, disk
from akunu_py.errors import DamagedCache, StoreError
from akunu_py.types import GenerateOptions
from tests.reliability.fuzz import SCALARS, changed, clear, damaged, explore, lengths
from tests.support.engines import altered
from tests.support.families import build
from tests.support.tiny_fim import load_tiny

OPTIONS = GenerateOptions(max_tokens=3, draft="off")
PROMPT = list(range(1, 12))
# Every kind of layer, and layers inside a CacheList.
FAMILIES = ("llama", "llama-kv8", "llama-concatenate", "gpt_oss", "llama4", "falcon_h1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])


@pytest.fixture
def name() -> str:
    return "llama"


@pytest.fixture
def engine(tiny: Engine, name: str) -> Engine:
    return altered(tiny, model=build(name), vocabulary=96)


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    session = Session(engine)
    session.generate(PROMPT, OPTIONS).answer()
    path = tmp_path / "saved.safetensors"
    session.save_prompt_cache(path)
    return path


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the tensors of a file."""
    whole = path.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    return json.loads(whole[8:end]), whole[end:]


def joined(header: Any, tensors: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def opened(engine: Engine, path: Path, *, compare: bool = False) -> str:
    """Return the kind of error, or "answered". compare: with a fresh session's answer."""
    session = Session(engine)
    with clear() as errors:
        session.load_prompt_cache(path)
    if errors:
        assert session.target.tokens == []
        return type(errors[0]).__name__
    prompt = PROMPT if compare else [*session.target.tokens, 5]
    tokens = session.generate(prompt, OPTIONS).answer().tokens
    assert all(0 <= token < engine.tokens.vocabulary for token in tokens)
    assert not compare or tokens == Session(engine).generate(prompt, OPTIONS).answer().tokens
    return "answered"


@lengths(75)
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


ARRAYS = st.builds(
    lambda shape, dtype: mx.zeros(shape, dtype),
    st.lists(st.sampled_from([0, 1, 2, 4, 8, 13, 16, 64]), max_size=4),
    st.sampled_from([mx.float32, mx.float16, mx.uint32, mx.int64, mx.bool_]),
)
NUMBERS = st.integers(-3, 40) | st.sampled_from([2**31 - 1, 2**31, 2**62, -(2**62)])
PARTS = ARRAYS | NUMBERS | st.floats() | st.none() | st.booleans() | st.text(max_size=3)


def forge(entries: list[Any], draw: Any) -> None:
    """Replace a part of a layer's state, or shorten a list in it."""
    entry = draw(st.sampled_from(kv_cache.leaves(entries)))
    state = list(entry.state)
    at = draw(st.integers(0, len(state) - 1))
    if isinstance(state[at], list | tuple) and draw(st.booleans()):
        inner = list(state[at])
        inner[draw(st.integers(0, len(inner) - 1))] = draw(PARTS)
        state[at] = inner[: draw(st.integers(1, len(inner)))]
    else:
        state[at] = draw(PARTS)
    entry.state = state


@lengths(20)
@pytest.mark.parametrize("name", FAMILIES)
def test_forged_layers_are_refused(
    name: str, examples: int, engine: Engine, saved: Path, tmp_path: Path
) -> None:
    path, about = tmp_path / "forged.safetensors", cache_file.read(saved).metadata
    entries = mlx_cache.load_prompt_cache(str(saved))
    history = disk.load(engine, saved)
    layers = kv_cache.leaves(history.cache)
    checkpoints = [disk.checkpoint_layers(each, layers) for each in history.checkpoints]
    assert opened(engine, saved) == "answered"
    seen: Counter[str] = Counter()

    def check(data: Any) -> None:
        forged, places = kv_cache.compact(entries), [kv_cache.compact(each) for each in checkpoints]
        try:
            forge(data.draw(st.sampled_from([forged, forged, *filter(None, places)])), data.draw)
            disk.write(path, about, forged, places)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError):
            return  # not even mlx-lm can write it
        seen[opened(engine, path)] += 1

    explore(check, examples, st.data())
    assert seen["DamagedCache"] > examples / 4, seen


@lengths(60)
def test_forged_metadata_is_refused(examples: int, engine: Engine, saved: Path) -> None:
    header, tensors = parts(saved)
    about = json.loads(header["__metadata__"]["0.akunu"])
    seen: Counter[str] = Counter()

    def check(value: Any) -> None:
        no_digest = "0" * 64
        words = {"0.akunu": json.dumps(value), "0.akunu_digest": no_digest}
        whole = joined(header | {"__metadata__": header["__metadata__"] | words}, tensors)
        digest = hashlib.sha256(whole).hexdigest()
        saved.write_bytes(whole.replace(no_digest.encode(), digest.encode(), 1))
        seen[opened(engine, saved)] += 1

    fields = st.sampled_from(sorted(about))
    one = st.builds(lambda field, value: about | {field: value}, fields, SCALARS)
    tokens = st.lists(NUMBERS, min_size=len(about["tokens"]), max_size=len(about["tokens"]))
    others = tokens.map(lambda value: about | {"tokens": value})
    explore(check, examples, changed(about) | one | others)
    assert seen["DamagedCache"] > examples / 4, seen


def test_special_and_huge_files_are_refused_at_once(
    engine: Engine, saved: Path, tmp_path: Path
) -> None:
    session = Session(engine)
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "directory.safetensors").mkdir()
    for name in ("fifo", "zero", "directory"):
        with pytest.raises(StoreError, match="cannot read"):
            session.load_prompt_cache(tmp_path / f"{name}.safetensors")
    header, tensors = parts(saved)
    # The last tensor claims 20 GB, and the file has them: a hole.
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    begin = header[last]["data_offsets"][0]
    end = begin + (20 << 30)
    header[last] = {"shape": [5 << 30], "dtype": "F32", "data_offsets": [begin, end]}
    data = joined(header, tensors)
    saved.write_bytes(data)
    os.truncate(saved, len(data) - len(tensors) + end)
    with pytest.raises(DamagedCache):
        session.load_prompt_cache(saved)
