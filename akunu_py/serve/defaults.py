"""How a request is sampled that says nothing of it: as the model's makers recommend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from akunu_py.errors import DamagedModel
from akunu_py.models.load.model_files import read_settings
from akunu_py.types import SamplingOptions

_CLIENTS_EXPECT = 1.0  # OpenAI's default temperature
_RANGES = {  # what is read, and believed
    "temperature": (0.0, 5.0),
    "top_p": (0.01, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.5, 2.0),
}


def model_defaults(path: Path, sampling: SamplingOptions) -> SamplingOptions:
    """`sampling` with what generation_config.json in the directory of a model says, as vLLM and
    transformers do; temperature 1, as OpenAI's clients expect, where it says nothing."""
    try:
        found = read_settings(path / "generation_config.json")
    except DamagedModel:  # there is none
        found = {}
    given: dict[str, Any] = {"temperature": _CLIENTS_EXPECT}
    for name, (low, high) in _RANGES.items():
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            given[name] = int(value) if name == "top_k" else float(value)
    return replace(sampling, **given)
