"""Mutated headers of GGUF and safetensors files: a clear error each, and next to no memory."""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import strategies as st

from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError, DamagedModel
from akunu_py.models.gguf.convert import plan_import
from akunu_py.models.gguf.file import MAX_HEADER_BYTES, read_gguf
from akunu_py.models.load.safetensors import read_header
from tests.reliability.fuzz import clear, explore, lengths
from tests.support.tiny_gguf import TOKENIZER, Tiny, write_tiny

pytestmark = pytest.mark.rotating

GEOMETRY = [
    f"llama.{key}"
    for key in (
        "block_count", "context_length", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "rope.freq_base", "rope.scaling.type",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "attention.key_length",
        "expert_count", "attention.scale", "rope.scale_linear",
    )
]  # fmt: skip

MUTANTS = 320
CLEAR_ERRORS = 200
MEGABYTE = 1 << 20


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fails where Python and numpy together take more than `limit` bytes on the way."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


def mutate(whole: bytes, end: int, draw: random.Random) -> bytes:
    """`whole` with one to four places before `end` changed: bytes, lengths, or pieces moved."""
    mutated = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(end)
        kind = draw.randrange(5)
        if kind == 0:
            mutated[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            mutated[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**63, 2**64 - 1]))
        elif kind == 2:
            mutated[at : at + draw.randint(1, 8)] = draw.randbytes(draw.randint(0, 8))
        elif kind == 3:
            del mutated[at : at + draw.randint(1, 40)]
        else:
            other = draw.randrange(end)
            mutated[at:at] = mutated[other : other + draw.randint(1, 60)]
    return bytes(mutated)


def errors_of(check: Callable[[Path], None], path: Path, mutants: list[bytes]) -> list[str]:
    """The messages of the mutants that `check` refuses. Whatever else it raises fails the test."""
    messages = []
    for mutant in mutants:
        path.write_bytes(mutant)
        try:
            check(path)
        except AkunuError as error:
            messages.append(str(error))
    return messages


def assert_clear(messages: list[str]) -> None:
    assert len(messages) >= CLEAR_ERRORS
    assert not [message for message in messages if "\n" in message or len(message) > 600]
    assert len(set(messages)) > 30  # each says what is wrong


def test_mutated_gguf_headers(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    whole, draw = source.read_bytes(), random.Random(7)
    end = min(tensor.offset for tensor in read_gguf(source).tensors.values())
    mutants = [mutate(whole, end, draw) for _ in range(MUTANTS)]
    target = tmp_path / "target"
    target.mkdir()

    def check(path: Path) -> None:
        plan_import(path).write(target)

    def check_and_clean(path: Path) -> None:
        try:
            check(path)
        finally:
            for made in target.iterdir():
                made.unlink()

    with memory_below(20 * MEGABYTE):
        messages = errors_of(check_and_clean, tmp_path / "mutant.gguf", mutants)
    assert_clear(messages)
    inside = {"tiny.gguf", "mutant.gguf", "target"}
    assert {path.name for path in tmp_path.iterdir()} == inside


def safetensors_file(path: Path) -> bytes:
    arrays = {f"model.layers.{i}.weight": mx.ones((4, 8)) for i in range(12)}
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    return path.read_bytes()


def test_mutated_safetensors_headers(tmp_path: Path) -> None:
    whole, draw = safetensors_file(tmp_path / "whole.safetensors"), random.Random(8)
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    mutants = [mutate(whole, end, draw) for _ in range(MUTANTS)]

    def check(path: Path) -> None:
        read_header(path)
        mx.eval(mx.load(str(path)))  # what we let through, MLX can read

    with memory_below(20 * MEGABYTE):
        messages = errors_of(check, tmp_path / "mutant.safetensors", mutants)
    assert len(messages) >= CLEAR_ERRORS
    assert not [message for message in messages if "\n" in message or len(message) > 600]


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | changes


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": entry(shape=[2**62, 2**62])},
        {"a": entry(shape=[-2, -4])},
        {"a": entry(shape=[2.0, 4])},
        {"a": entry(shape=[True, 8])},
        {"a": entry(shape=[1] * 100 + [8])},
        {"a": entry(shape={"2": 4})},
        {"a": entry(dtype="F33")},
        {"a": entry(dtype=["F32"])},
        {"a": entry(data_offsets=[0, 31])},
        {"a": entry(data_offsets=[32, 0])},
        {"a": entry(data_offsets=[0, 32, 64])},
        {"a": entry(data_offsets=[2**64, 2**64 + 32])},
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(data_offsets=[40, 72])},
        {"a": None},
        {"a": "text"},
    ],
)
def test_safetensors_entries_that_contradict_themselves(tmp_path: Path, header: Any) -> None:
    path = tmp_path / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)
    with pytest.raises(DamagedModel):
        read_header(path)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":1,"a":2}', b"\xff{}", b'{"a":' + b"9" * 9000]
)
def test_safetensors_headers_that_are_no_headers(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(DamagedModel):
        read_header(path)


def test_sizes_that_the_file_could_hold_are_refused_without_allocating(tmp_path: Path) -> None:
    """The files are as large as they say, with holes, and what they say is absurd all the same."""
    key = struct.pack("<Q", 1) + b"k"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key
    claims = {
        "numbers": header + struct.pack("<IIQ", 9, 4, 1 << 30),
        "texts": header + struct.pack("<IIQ", 9, 8, 1 << 28),
        "text": header + struct.pack("<IQ", 8, 1 << 31),
        "name": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 32),
    }
    path = tmp_path / "large"
    for claim in claims.values():
        path.write_bytes(claim)
        os.truncate(path, 1 << 33)
        with memory_below(MEGABYTE), pytest.raises(DamagedModel):
            read_gguf(path)
    path.write_bytes(struct.pack("<Q", 1 << 32))
    os.truncate(path, 1 << 33)
    with memory_below(MEGABYTE), pytest.raises(DamagedModel):
        read_header(path)


def test_many_arrays_of_texts_share_one_limit(tmp_path: Path) -> None:
    """Empty texts take 8 bytes in the file and seven times that in memory."""
    path, count = tmp_path / "texts.gguf", 1_500_000
    array = struct.pack("<IIQ", 9, 8, count)
    body = b"".join(
        struct.pack("<Q", 1) + bytes([97 + number]) + array + bytes(8 * count)
        for number in range(4)
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 4) + body)
    assert path.stat().st_size < MAX_HEADER_BYTES
    with pytest.raises(DamagedModel, match="claims 1500000 strings"):
        read_gguf(path)


METADATA = (*TOKENIZER, *GEOMETRY, "general.architecture", "general.alignment", "split.count")
# One of every type that a header knows, and numbers that fit nowhere.
WRONG: list[Any] = [
    None, True, 0, 1, 3, 2**31, 2**32 - 1, 0.0, -1.0, 1e30, float("inf"), "", "llama", "\x1b[2J",
    "x" * 3_000, [0], [2**31 - 1, 5], [0.5, float("nan")], ["a", "b"], ["a b"] * 300, [True],
]  # fmt: skip


@lengths(40)
def test_metadata_of_wrong_types(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    def check(changes: dict[str, Any]) -> None:
        write_tiny(path, Tiny(metadata=changes))
        with tempfile.TemporaryDirectory(dir=tmp_path) as target, clear():
            plan_import(path).write(Path(target))
            Engine.load(Path(target))

    values = st.dictionaries(
        st.sampled_from(METADATA), st.sampled_from(WRONG), min_size=1, max_size=2
    )
    explore(check, examples, values)
