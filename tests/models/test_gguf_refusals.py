"""Damaged and unsupported GGUF files are rejected before anything is written."""

import itertools
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf.convert import plan_import
from akunu_py.models.gguf.file import GgufFile, read_gguf
from akunu_py.models.gguf.tokenizer import plan_tokenizer
from tests.reliability.fuzz import MEGABYTE, memory_below
from tests.support.tiny_gguf import TOKENIZER, Tiny, write_tiny


@pytest.mark.parametrize(("change", "unsupported"), [  # None: the file contradicts itself
    ({"metadata": {"llama.expert_count": 8}}, "expert_count"),
    ({"metadata": {"llama.rope.scaling.type": "spiral"}}, "scaling"),
    ({"metadata": {"llama.attention.sliding_window": 64}}, "sliding_window"),
    ({"metadata": {"llama.attention.scale": 0.5}}, "attention.scale"),
    ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer"),
    ({"metadata": {"tokenizer.ggml.pre": "default"}}, "pre-tokenizer"),
    ({"metadata": {"tokenizer.ggml.pre": None}}, "pre-tokenizer"),
    ({"metadata": {"tokenizer.ggml.add_eos_token": True}}, "add_eos_token"),
    ({"extra": {"x": np.ones(32, np.int32)}}, "I32"),
    ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "attn_q.bias"),
    ({"without": {"blk.1.ffn_up.weight"}}, None),
    ({"without": {"token_embd.weight"}}, None),
    ({"metadata": {"llama.block_count": 2_000_000_000}}, None),
    ({"metadata": {"llama.block_count": 0}}, None),
    ({"metadata": {"llama.embedding_length": "many"}}, None),
    ({"metadata": {"llama.attention.head_count": 1_000}}, None),
    ({"metadata": {"llama.context_length": None}}, None),
    ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, None),
    ({"metadata": {"tokenizer.ggml.eos_token_id": 100_000}}, None),
    ({"metadata": {"tokenizer.ggml.eos_token_id": None}}, None),
    ({"metadata": {"tokenizer.ggml.merges": ["no such", "h e"]}}, None),
    ({"metadata": {"tokenizer.ggml.tokens": ["a", "a"]}}, None),
    ({"metadata": {"general.alignment": 48}}, None),
    ({"metadata": {"split.count": 70_000}}, None),
    ({"metadata": {"tokenizer.ggml.tokens": "x"}}, None),
    ({"metadata": {"llama.rope.scaling.type": "linear"}}, None),
    ({"metadata": {"tokenizer.ggml.model": "llama"}}, None),
    ({"metadata": {"tokenizer.ggml.add_bos_token": "yes"}}, None),
    ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, None),
    ({"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, None),
])  # fmt: skip
def test_refusals_come_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], unsupported: str | None
) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", Tiny(**change))
    directory = tmp_path / "model"
    directory.mkdir()
    kind = UnsupportedModel if unsupported else DamagedModel
    with pytest.raises(kind, match=unsupported) as caught:
        plan_import(source).write(directory)
    assert "\n" not in str(caught.value)
    assert not list(directory.iterdir())


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_a_file_cut_off_while_it_is_imported(kind: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", Tiny(kind=kind))
    whole = source.read_bytes()
    begin = min(tensor.offset for tensor in read_gguf(source).tensors.values())
    for number, length in enumerate([0, 10, begin, *range(begin + 1, len(whole), 20_011)]):
        source.write_bytes(whole)
        plan = plan_import(source)
        source.write_bytes(whole[:length])
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(DamagedModel, match=r"tensor '.*' is cut off"):
            plan.write(directory)


def _named(path: Path, name: str) -> int:
    """Return the position of a tensor's offset in the file: after name, shape and type."""
    at = path.read_bytes().index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    dimensions: int = struct.unpack_from("<I", path.read_bytes(), at)[0]
    return at + 4 + 8 * dimensions + 4


@pytest.mark.parametrize("shift", [0, 32, -32])
def test_tensors_that_overlap(shift: int, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    tensors = sorted(read_gguf(source).tensors.values(), key=lambda tensor: tensor.offset)
    begin = tensors[0].offset
    for before, after in itertools.pairwise(tensors[:6]):
        data = bytearray(source.read_bytes())
        place = before.offset + shift if shift >= 0 else after.offset + shift
        struct.pack_into("<Q", data, _named(source, after.name), place - begin)
        changed = tmp_path / "changed.gguf"
        changed.write_bytes(data)
        with pytest.raises(DamagedModel, match="overlap"):
            read_gguf(changed)


@pytest.mark.parametrize(("length", "count"), [(10**6, 1), (513, 1), (500, 20_000)])
def test_pieces_too_long_to_split_are_rejected(length: int, count: int, tmp_path: Path) -> None:
    pieces = [str(number).rjust(length, "a") for number in range(count)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = TOKENIZER | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3, 3] + [6] * 256 + [1] * count),
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "general.architecture": "llama",
    }
    with pytest.raises(DamagedModel, match="pieces of more than 512 characters"):
        plan_tokenizer(GgufFile(tmp_path / "x.gguf", metadata, {}))


def test_absurd_counts_cost_nothing(tmp_path: Path) -> None:
    """Also in files as large as they claim, with holes."""
    path, huge = tmp_path / "absurd.gguf", 2**63
    for kinds, *values in (  # numbers of tensors and of values, then the first value or tensor
        ("", huge, 0), ("", 0, huge), ("Q", 0, 1, huge), ("Q", 0, 1, 1 << 32),
        ("QcIQ", 0, 1, 1, b"k", 8, huge), ("QcIQ", 0, 1, 1, b"k", 8, 1 << 31),
        ("QcIIQ", 0, 1, 1, b"k", 9, 4, huge), ("QcIIQ", 0, 1, 1, b"k", 9, 4, 1 << 30),
        ("QcIIQ", 0, 1, 1, b"k", 9, 8, huge), ("QcIIQ", 0, 1, 1, b"k", 9, 8, 1 << 28),
        ("QcIIQ", 0, 1, 1, b"k", 9, 9, 1), ("QcI", 1, 0, 1, b"k", 2**31),
        ("QcIQIQ", 1, 0, 1, b"k", 1, huge, 0, 0), ("QcIQIQ", 1, 0, 1, b"k", 1, 32, 0, huge),
    ):  # fmt: skip
        for size in (100, 1 << 33):
            path.write_bytes(b"GGUF" + struct.pack(f"<IQQ{kinds}", 3, *values))
            os.truncate(path, size)
            with memory_below(MEGABYTE), pytest.raises(DamagedModel):
                read_gguf(path)


@pytest.mark.parametrize(("head", "named"), [("<IQQ", "v1"), (">IQQ", "big-endian")])
def test_error_names_an_unsupported_version(tmp_path: Path, head: str, named: str) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + struct.pack(head, 1 if named == "v1" else 3, 0, 0))
    with pytest.raises(UnsupportedModel, match=named):
        read_gguf(path)
