"""Prompt caches that somebody forged: their digest is right, and what they hold is not.

Every field of every kind of layer and every field about the file, replaced by generated values.
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
from akunu_py.errors import AkunuError, DamagedCache, StoreError
from akunu_py.types import GenerateOptions
from tests.reliability.fuzz import LONGEST, SCALARS, changed, explore, lengths
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


def engine_of(tiny: Engine, name: str) -> Engine:
    return altered(tiny, model=build(name), vocabulary=96)


def saved(engine: Engine, path: Path) -> Path:
    session = Session(engine)
    session.generate(PROMPT, OPTIONS).answer()
    session.save_prompt_cache(path)
    return path


ARRAYS = st.builds(
    lambda shape, dtype: mx.zeros(shape, dtype),
    st.lists(st.sampled_from([0, 1, 2, 4, 8, 13, 16, 64]), max_size=4),
    st.sampled_from([mx.float32, mx.float16, mx.uint32, mx.int64, mx.bool_]),
)
NUMBERS = st.integers(-3, 40) | st.sampled_from([2**31 - 1, 2**31, 2**62, -(2**62)])
PARTS = ARRAYS | NUMBERS | st.floats() | st.none() | st.booleans() | st.text(max_size=3)


def forge(entries: list[Any], draw: Any) -> None:
    """Replaces a part of a layer's state; lists and tuples may lose one too."""
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


def opened(engine: Engine, path: Path) -> str:
    """What became of it: a kind of error, or an answer."""
    session = Session(engine)
    said: AkunuError | None = None
    try:
        session.load_prompt_cache(path)
    except AkunuError as error:
        said = error
    if said is not None:
        assert 0 < len(str(said)) < LONGEST
        assert "\n" not in str(said)
        assert session.target.tokens == []
        return type(said).__name__
    answer = session.generate([*session.target.tokens, 5], OPTIONS).answer()
    assert all(0 <= token < engine.tokens.vocabulary for token in answer.tokens)
    return "answered"


@lengths(20)
@pytest.mark.parametrize("name", FAMILIES)
def test_forged_layers(name: str, examples: int, tiny: Engine, tmp_path: Path) -> None:
    engine = engine_of(tiny, name)
    path = saved(engine, tmp_path / "x.safetensors")
    about = cache_file.read(path).metadata
    entries = mlx_cache.load_prompt_cache(str(path))
    history = disk.load(engine, path)
    checkpoints = [
        disk._checkpoint_layers(each, kv_cache.leaves(history.cache))
        for each in history.checkpoints
    ]
    seen: Counter[str] = Counter({opened(engine, path): 1})
    assert seen["answered"]

    def check(data: Any) -> None:
        forged, places = kv_cache.compact(entries), [kv_cache.compact(each) for each in checkpoints]
        try:
            forge(data.draw(st.sampled_from([forged, forged, *filter(None, places)])), data.draw)
            disk.write(tmp_path / "y.safetensors", about, forged, places)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError):
            return  # not even mlx-lm can write it
        seen[opened(engine, tmp_path / "y.safetensors")] += 1

    explore(check, examples, st.data())
    print(name, dict(seen))
    assert seen["DamagedCache"] > examples / 4


@lengths(60)
def test_forged_words_about_the_file(examples: int, tiny: Engine, tmp_path: Path) -> None:
    """Each field, with a digest to match where one can be computed."""
    engine = engine_of(tiny, "llama")
    path = saved(engine, tmp_path / "x.safetensors")
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    about = json.loads(header["__metadata__"]["0.akunu"])
    seen: Counter[str] = Counter()

    def check(value: Any) -> None:
        words = {"0.akunu": json.dumps(value), "0.akunu_digest": "0" * 64}
        metadata = header["__metadata__"] | words
        text = json.dumps(header | {"__metadata__": metadata}, separators=(",", ":")).encode()
        whole = struct.pack("<Q", len(text)) + text + data[end:]
        digest = hashlib.sha256(whole).hexdigest()
        path.write_bytes(whole.replace(b"0" * 64, digest.encode(), 1))
        seen[opened(engine, path)] += 1

    fields = st.sampled_from(sorted(about))
    one = st.builds(lambda field, value: about | {field: value}, fields, SCALARS)
    tokens = st.lists(NUMBERS, min_size=len(about["tokens"]), max_size=len(about["tokens"]))
    others = tokens.map(lambda value: about | {"tokens": value})
    explore(check, examples, changed(about) | one | others)
    print(dict(seen))
    assert seen["DamagedCache"] > examples / 4


def test_what_is_no_regular_file_or_too_large_is_refused_at_once(
    tiny: Engine, tmp_path: Path
) -> None:
    session = Session(tiny)
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "directory.safetensors").mkdir()
    for name in ("fifo", "zero", "directory"):
        with pytest.raises(StoreError, match="cannot read"):
            session.load_prompt_cache(tmp_path / f"{name}.safetensors")
    path = saved(engine_of(tiny, "llama"), tmp_path / "x.safetensors")
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    # The last tensor claims 20 GB, and the file has as many, all holes.
    name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    begin = header[name]["data_offsets"][0]
    end_of_holes = begin + (20 << 30)
    header[name] = {"shape": [5 << 30], "dtype": "F32", "data_offsets": [begin, end_of_holes]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])
    os.truncate(path, 8 + len(text) + end_of_holes)
    with pytest.raises(DamagedCache):
        Session(engine_of(tiny, "llama")).load_prompt_cache(path)
