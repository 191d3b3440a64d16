"""Read headers of safetensors files, and write such files one tensor at a time."""

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from akunu_py.errors import DamagedModel
from akunu_py.files import open_regular, read_bounded

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4,
    "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write."""

    name: str
    dtype: str  # a key of _SIZES
    shape: tuple[int, ...]
    load: Callable[[], Any]  # returns a contiguous buffer; called once, when it is written

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


def write_safetensors(
    file: BinaryIO,
    metadata: dict[str, str],
    entries: Iterable[Entry],
    before: Callable[[memoryview], object] = lambda block: None,
) -> None:
    """Write `entries` in order. `before` is called with the header and each tensor's bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset, entries = 0, list(entries)
    for entry in entries:
        offsets = [offset, offset := offset + entry.nbytes]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(struct.pack("<Q", len(text)) + text)
    before(head)
    file.write(head)
    for entry in entries:
        block = memoryview(entry.load())
        if block.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name}: {block.nbytes} bytes instead of {entry.nbytes}")
        before(block)
        file.write(block)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries of a file's tensors by name, and its metadata.

    The safetensors library checks the header first, because MLX's own reader trusts it. Raises
    DamagedModel and OSError.
    """
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as file:
        try:
            with safe_open(path, framework="numpy"):
                pass
            tensors = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
        except (SafetensorError, ValueError, struct.error) as error:
            raise DamagedModel(f"{path} is damaged or no safetensors file: {error}") from error
    metadata = tensors.pop("__metadata__", {})
    return tensors, metadata


# Blocks of each tensor, evenly spread. Tensors up to 32 kB are covered whole.
_SAMPLES, _SAMPLE_BYTES = 8, 4096
_MAX_JSON_BYTES = 1 << 30


def files_digest(model: Path) -> str:
    """Return a digest of config, tokenizer and samples of tensors. Raises DamagedModel, OSError."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        with contextlib.suppress(FileNotFoundError):
            digest.update(read_bounded(model / name, _MAX_JSON_BYTES))
    for file in sorted(model.glob("*.safetensors")):
        tensors, _ = read_header(file)
        with open_regular(file) as opened:
            data = 8 + int.from_bytes(opened.read(8), "little")
            for name, tensor in sorted(tensors.items()):
                begin, end = tensor["data_offsets"]
                digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
                for at in range(begin, end, max(_SAMPLE_BYTES, -((begin - end) // _SAMPLES))):
                    size = min(_SAMPLE_BYTES, end - at)
                    digest.update(os.pread(opened.fileno(), size, data + at))
    return digest.hexdigest()
