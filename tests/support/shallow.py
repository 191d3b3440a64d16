"""The starter with two of its layers, on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx


def write_shallow(starter: Path, directory: Path) -> None:
    """Fills the empty `directory` as the store would, from the starter's."""
    config = json.loads((starter / "config.json").read_text("utf-8"))
    renamed = {0: 0, config["num_hidden_layers"] - 1: 1}
    weights: dict[str, Any] = {}
    for name, array in mx.load(str(starter / "model.safetensors")).items():
        first, layers, rest = name.partition("model.layers.")
        number, _, rest = rest.partition(".")
        if not layers:
            weights[first] = array
        elif int(number) in renamed:
            weights[f"{layers}{renamed[int(number)]}.{rest}"] = array
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(starter / name, directory / name)
