"""The identity of a loaded model: what its prompt caches depend on."""

from __future__ import annotations

import contextlib
import hashlib
from importlib.metadata import version
from pathlib import Path

from akunu_py.decoding import device
from akunu_py.files import open_regular, read_bounded
from akunu_py.models.load.model_files import MAX_TOKENIZER_BYTES
from akunu_py.models.load.safetensors import read_header

_SAMPLE_BYTES = 1024  # from the middle of each tensor


def model_digest(model: Path, weights: str) -> str:
    """Return a digest of what computes a KV cache. Call while the weights are loaded.

    It covers configuration, tokenizer, the header and a sample of each tensor, the format of the
    weights (`weights`), the device, and the versions of mlx and mlx-lm. Raises DamagedModel and
    OSError.
    """
    parts = weights, device.device_name(), version("mlx"), version("mlx-lm")
    digest = hashlib.sha256("\n".join(parts).encode())
    for name in ("config.json", "tokenizer.json"):
        with contextlib.suppress(FileNotFoundError):
            digest.update(read_bounded(model / name, MAX_TOKENIZER_BYTES))
    for file in sorted(model.glob("*.safetensors")):
        tensors = read_header(file)
        tensors.pop("__metadata__", None)
        with open_regular(file) as opened:
            data = 8 + int.from_bytes(opened.read(8), "little")
            for name, tensor in sorted(tensors.items()):
                begin, end = tensor["data_offsets"]
                opened.seek(data + max(begin, (begin + end - _SAMPLE_BYTES) // 2))
                digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
                digest.update(opened.read(min(_SAMPLE_BYTES, end - begin)))
    return digest.hexdigest()
