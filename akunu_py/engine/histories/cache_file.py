"""The prompt cache file format: mlx-lm's safetensors with akunu's header and a digest.

Checkpoints follow the layers as further layers, which mlx-lm ignores. The last tensor is the digest
of all bytes before it. Needs neither a model nor MLX.
"""

import functools
import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from akunu_py.engine.model.token_ids import reusable_prefix, shared_prefix
from akunu_py.errors import DamagedCache, DamagedModel, UsageError, one_line
from akunu_py.files import disk_errors, open_regular, parse_json
from akunu_py.models.load.safetensors import Entry, read_header, write_safetensors

SUFFIX = ".safetensors"  # MLX selects the format by it
FORMAT = 4
_KEY = "0.akunu"  # of mlx-lm's metadata: akunu's header
_DIGEST_BYTES = 32
_BLOCK_BYTES = 4 << 20  # bytes per read

Stopped = Callable[[], bool]


class SaveStopped(Exception):
    """The save was aborted after `written` bytes."""

    def __init__(self, written: int) -> None:
        super().__init__(written)
        self.written = written


@dataclass(frozen=True, slots=True)
class CacheMetadata:
    """Contents of akunu's header."""

    model: str
    identity: str  # digest of weights, tokenizer and configuration
    tokenizer: str
    weights: str
    kv_bits: int | None
    trims: bool  # can be cut anywhere, not only at `checkpoints` (lengths)
    tokens: list[int]
    pending: list[int]
    checkpoints: list[int]
    conversation: str
    requested_at: float  # time of its last request

    def reach(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of `prompt` need no prefill if this file is loaded."""
        shared = shared_prefix(self.tokens, prompt)
        trims = self.trims or shared == len(self.tokens)
        return reusable_prefix(shared, self.checkpoints, trims=trims)


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # takes 0.15 s, and `akunu cache` imports this module

    return TypeAdapter(CacheMetadata)


def write(
    file: BinaryIO, metadata: CacheMetadata, mlx_metadata: Mapping[str, str],
    tensors: Sequence[Entry], digest_name: str, stopped: Stopped,
) -> None:  # fmt: skip
    """Write a complete file. Raises SaveStopped if `stopped`, OSError."""
    akunu = json.dumps({"format": FORMAT, **asdict(metadata)})
    digest = hashlib.sha256()

    def before(block: memoryview) -> None:
        if stopped():
            raise SaveStopped(file.tell())
        digest.update(block)

    last = Entry(digest_name, "U8", (_DIGEST_BYTES,), digest.digest)
    write_safetensors(file, {_KEY: akunu, **mlx_metadata}, [*tensors, last], before)
    file.flush()


def read(path: Path) -> tuple[CacheMetadata, list[str]]:
    """Return a file's metadata, and its tensors' names in file order; the last is the digest.

    Raises StoreError if unreadable, DamagedCache if invalid, UsageError if of another version.
    """
    try:
        with disk_errors(f"cannot read {path}"):
            entries, metadata = read_header(path)
        tensors = sorted(entries, key=lambda name: entries[name]["data_offsets"])
        if parse_json(metadata[_KEY])["format"] != FORMAT:
            raise UsageError(
                f"{path} was saved by another version of akunu (its format is not {FORMAT}); "
                "delete it, and it is made again"
            )
        return _parsed_metadata(metadata[_KEY]), tensors
    except (DamagedModel, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCache(
            f"{path} is not a prompt cache that akunu saved, or is cut off; use another file"
        ) from error


def damaged(path: Path) -> DamagedCache:
    """Return the error for a file with wrong bytes."""
    return DamagedCache(f"{path} is damaged; delete it, and it is made again")


def header_bytes(path: Path) -> bytes:
    """Return the bytes of a file before its first tensor. Raises struct.error and OSError."""
    with open_regular(path) as file:
        length = file.read(8)
        return length + file.read(struct.unpack("<Q", length)[0])


def verify(path: Path) -> None:
    """Check every byte. Raises DamagedCache or StoreError."""
    digest = hashlib.sha256()
    with disk_errors(f"cannot read {path}"), open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
        if file.read() != digest.digest():
            raise damaged(path)


def _parsed_metadata(header: str) -> CacheMetadata:
    """Validate the header. Raises ValueError."""
    metadata = _adapter().validate_json(header, strict=True)
    lengths, tokens = metadata.checkpoints, len(metadata.tokens)
    if lengths != sorted({*lengths}) or not all(0 < each <= tokens for each in lengths):
        raise ValueError("checkpoints")
    return replace(metadata, model=one_line(metadata.model, 80))
