"""The settings of stretched rotary positions, from GGUF's to mlx-lm's.

Owns linear, YaRN and Llama 3.1's scaling, and tables of one factor for each frequency. Refuses any
other kind (UnsupportedModel).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf.file import Tensor
from akunu_py.models.gguf.settings import GgufSettings

Config = dict[str, Any]


def rope_scaling(settings: GgufSettings, config: Config) -> Config | None:
    """mlx-lm's settings for stretched rotary positions."""
    kind = settings.get("rope.scaling.type") or "none"
    table = settings.file.tensors.get("rope_freqs.weight")
    if table is not None and kind == "none":
        divisors = factors(table, config["head_dim"] // 2)
        return None if set(divisors) == {1.0} else _frequency_scaling(divisors, config)
    if kind == "none":
        factor = settings.get("rope.scale_linear")
        return None if factor in (None, 1.0) else {
            "type": "linear", "factor": settings.real("rope.scale_linear")
        }  # fmt: skip
    if kind == "linear" and table is None:
        return {"type": "linear", "factor": settings.real("rope.scaling.factor")}
    if kind == "yarn" and table is None:
        return {
            "type": "yarn",
            "factor": settings.real("rope.scaling.factor"),
            "original_max_position_embeddings": settings.count(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": settings.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": settings.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnsupportedModel(
        f"{settings.file.path.name} has rope scaling of type {kind!r:.40}; akunu imports none, "
        "linear, yarn and tables of frequencies"
    )


def _frequency_scaling(divisors: list[float], config: Config) -> Config:
    """Llama 3.1's scaling, which GGUF keeps as one divisor for each frequency."""
    scaling: Config = {
        "rope_type": "llama3",
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if np.allclose(divisors, _llama3_factors(config, scaling), rtol=1e-4):
        return scaling
    # Other numbers than Meta's: the table itself, under the type that takes one.
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": config["max_position_embeddings"],
        "short_factor": divisors,
        "long_factor": divisors,
    }


def _llama3_factors(config: Config, scaling: Config) -> list[float]:
    """What `scaling` divides each frequency by (the Llama 3.1 release's apply_scaling)."""
    half, divisors = config["head_dim"] // 2, []
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for index in range(half):
        wavelength = 2 * math.pi * config["rope_theta"] ** (index / half)
        turns = scaling["original_max_position_embeddings"] / wavelength
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / scaling["factor"] + share))
    return divisors


def factors(tensor: Tensor, count: int) -> list[float]:
    """The `count` positive values of a table. Raises DamagedModel."""
    if tensor.type.name != "F32" or tensor.shape != (count,):
        raise DamagedModel(
            f"{tensor.path.name}: expected {count} F32 values in {tensor.name}, found "
            f"{tensor.type.name} of {list(tensor.shape)}; fetch the file again"
        )
    values = tensor.raw().view("<f4")[:, 0]
    if not np.isfinite(values).all() or values.min() <= 0:
        raise DamagedModel(f"{tensor.path.name}: {tensor.name} is not positive; fetch it again")
    return [float(str(value)) for value in values]
