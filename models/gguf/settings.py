"""Typed access to the metadata of a GGUF file, with errors that name the key.

Owns the rule that nothing in the metadata goes unheeded: what a family does not read must have the
value at which it does nothing (UnsupportedModel).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf.file import GgufFile

# GgufSettings that some families of llama.cpp have, and the value at which they do nothing.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,  # softmax
    "final_logit_softcapping": 0.0,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "residual_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


class GgufSettings:
    """The keys of `architecture` in the metadata of `file`, without the architecture's name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 2**31 - 1."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.wrong(key, "a positive number", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a positive real number", value)
        # GGUF keeps float32: the shortest decimal that means the same one is what was meant.
        return float(str(np.float32(value)))

    def expect(self, key: str, value: object) -> None:
        """Raises UnsupportedModel if the metadata sets `key` to anything but `value`."""
        found = self.get(key)
        if found is None:
            return
        if isinstance(value, float) and isinstance(found, float):
            same = math.isclose(found, value, rel_tol=1e-5)
        else:
            same = type(found) is type(value) and found == value
        if not same:
            raise UnsupportedModel(
                f"{self.file.path.name} sets {self.architecture}.{key} to {found!r:.60}; akunu "
                f"imports {self.architecture} models with {value!r}"
            )

    def expect_nothing_else(self, read: set[str]) -> None:
        """Raises UnsupportedModel for a setting outside `read` that would have to be ignored."""
        for key, value in _NEUTRAL.items():
            if key not in read:
                self.expect(key, value)

    def wrong(self, key: str, expected: str, found: object) -> DamagedModel:
        shown = "nothing" if found is None else repr(found)[:60]
        return DamagedModel(
            f"{self.file.path.name}: expected {expected} for {self.architecture}.{key}, found "
            f"{shown}; fetch the file again"
        )
