"""The prompt cache file format: mlx-lm's safetensors with akunu's header and a digest.

Checkpoints follow the layers as further layers, which mlx-lm ignores. Needs neither a model nor
MLX.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from akunu_py.engine.model.token_ids import reusable_prefix, shared_prefix
from akunu_py.errors import DamagedCache, DamagedModel, StoreError, UsageError, one_line
from akunu_py.files import disk_errors as disk_errors
from akunu_py.files import open_regular, parse_json
from akunu_py.models.load.safetensors import Entry, read_header, write_safetensors

SUFFIX = ".safetensors"  # MLX selects the format by it
FORMAT = 3
MAX_CHECKPOINTS = 64  # far more than a history has
# Keys of mlx-lm's metadata: akunu's header, its digest, class names by layer.
_KEY, _DIGEST, _CLASSES = "akunu", "akunu_digest", "1."
_NO_DIGEST = "0" * 64
_DIGEST_PREFIX = f'"0.{_DIGEST}":"'.encode()
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

    def shared(self, prompt: Sequence[int]) -> int:
        """See `shared_prefix`."""
        return shared_prefix(self.tokens, prompt)

    def reach(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of `prompt` need no prefill if this file is loaded."""
        shared = self.shared(prompt)
        trims = self.trims or shared == len(self.tokens)
        return reusable_prefix(shared, self.checkpoints, trims=trims)


@dataclass(frozen=True, slots=True)
class CacheHeader:
    """A file's header."""

    metadata: CacheMetadata
    classes: list[str]
    tensors: list[str]  # names in the order of their bytes


def write(
    file: BinaryIO, metadata: CacheMetadata, mlx_metadata: Mapping[str, str],
    tensors: Sequence[Entry], stopped: Stopped,
) -> None:  # fmt: skip
    """Write a complete file. Raises SaveStopped if `stopped`, OSError."""
    akunu = json.dumps({"format": FORMAT, **asdict(metadata)})
    digest, head = hashlib.sha256(), b""

    def before(block: memoryview) -> None:
        nonlocal head
        if stopped():
            raise SaveStopped(file.tell())
        head = head or bytes(block)
        digest.update(block)

    own = {f"0.{_KEY}": akunu, f"0.{_DIGEST}": _NO_DIGEST}
    write_safetensors(file, {**own, **mlx_metadata}, tensors, before)
    file.seek(_digest_offset(head))
    file.write(digest.hexdigest().encode())
    file.flush()


def read(path: Path) -> CacheHeader:
    """Read a file's header.

    Raises StoreError if unreadable, DamagedCache if invalid, UsageError if of another version.
    """
    try:
        header = read_header(path)
        metadata = header.pop("__metadata__")
        tensors = sorted(header, key=lambda name: header[name]["data_offsets"])
        found = parse_json(metadata[f"0.{_KEY}"])
        version = found.pop("format")
        if type(version) is not int:
            raise TypeError("format")
        if version != FORMAT:
            raise UsageError(
                f"{path} was saved by another version of akunu (its format is not {FORMAT}); "
                "delete it, and it is made again"
            )
        layers = {
            int(key.removeprefix(_CLASSES)): value
            for key, value in metadata.items()
            if key.startswith(_CLASSES)
        }
        classes = [layers[at] for at in sorted(layers)]
        return CacheHeader(_parsed_metadata(found), classes, tensors)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except (DamagedModel, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCache(
            f"{path} is not a session that akunu saved, or is cut off; use another file"
        ) from error


def digest_in(metadata: Mapping[str, str]) -> str:
    """Return the digest in a file's metadata. Raises KeyError."""
    return metadata[f"0.{_DIGEST}"]


def damaged(path: Path) -> DamagedCache:
    """Return the error for a file with wrong bytes."""
    return DamagedCache(f"{path} is damaged; delete it, and it is made again")


class Verifier:
    """Compares the bytes of a file, in their order, with the digest in its header."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the header of `file`. Raises ValueError, struct.error or OSError."""
        length = struct.unpack("<Q", file.read(8))[0]
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError("it is cut off")
        head = struct.pack("<Q", length) + file.read(length)
        at = _digest_offset(head)
        self.expected = head[at : at + len(_NO_DIGEST)].decode()
        self._digest = hashlib.sha256(head[:at] + _NO_DIGEST.encode())
        self._digest.update(head[at + len(_NO_DIGEST) :])

    def add(self, block: bytes | memoryview) -> None:
        """Add bytes after the header."""
        self._digest.update(block)

    def check(self) -> None:
        """Raise ValueError unless the bytes so far are those of a complete file."""
        if self._digest.hexdigest() != self.expected:
            raise ValueError("other bytes than were written")


def verify(path: Path) -> None:
    """Check every byte. Raises DamagedCache or StoreError."""
    try:
        with open_regular(path) as file:
            verifier = Verifier(file)
            while block := file.read(_BLOCK_BYTES):
                verifier.add(block)
            verifier.check()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, struct.error) as error:
        raise damaged(path) from error


def _digest_offset(head: bytes) -> int:
    """Return the digest's offset. Raises ValueError unless there is exactly one."""
    at = head.index(_DIGEST_PREFIX) + len(_DIGEST_PREFIX)
    if head.find(_DIGEST_PREFIX, at) >= 0:
        raise ValueError("two digests")
    return at


def _parsed_metadata(found: Any) -> CacheMetadata:
    """Validate the header. Raises TypeError, KeyError or ValueError."""
    texts = ("model", "identity", "tokenizer", "weights", "conversation")
    kinds = dict.fromkeys(texts, str) | {"trims": bool, "requested_at": float}
    for name, kind in kinds.items():
        if type(found[name]) is not kind:
            raise TypeError(name)
    if found["kv_bits"] is not None and type(found["kv_bits"]) is not int:
        raise TypeError("kv_bits")
    for name in ("tokens", "pending", "checkpoints"):
        if type(found[name]) is not list or not all(type(each) is int for each in found[name]):
            raise TypeError(name)
    lengths = found["checkpoints"]
    if len(lengths) > MAX_CHECKPOINTS or lengths != sorted({*lengths}):
        raise ValueError("checkpoints")
    if lengths and not 0 < lengths[0] <= lengths[-1] <= len(found["tokens"]):
        raise ValueError("checkpoints")
    return CacheMetadata(**found | {"model": one_line(found["model"], 80)})
