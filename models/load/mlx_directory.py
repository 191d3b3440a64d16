"""Checks a model directory in MLX's or transformers' format before anything of it is imported.

Finds out whether mlx-lm can load it and which of its files are wanted. Never reads pickle and never
runs code of the model's: only safetensors are taken, Python files stay behind, and what points to
them (`auto_map`) is removed from the settings.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from akunu_py import files
from akunu_py.errors import ModelError, UnsupportedModel
from akunu_py.models.load.model_files import (
    ModelFiles,
    boundary,
    head_files,
)
from akunu_py.models.manifest import ModelFacts

_SETTINGS = ("config.json", "tokenizer_config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_WANTED = (
    *_TOKENIZERS,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """A checked directory. settings: the files to write again, copies: those to copy as they are.

    bits: the width of its quantized weights, 0 where they are plain.
    """

    source: Path
    settings: dict[str, Any]
    copies: list[Path]
    bits: int
    facts: ModelFacts

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.copies)

    def write_settings(self, directory: Path, *names: str) -> None:
        """Writes config.json and tokenizer_config.json, or those of `names`, into `directory`."""
        for name in names or self.settings:
            text = json.dumps(self.settings[name], indent=2)
            (directory / name).write_text(text + "\n", "utf-8")


def plan_directory(source: Path) -> DirectoryPlan:
    """Checks the model in the directory `source`; reads headers and settings, not the weights.

    Raises UnknownModel where there is no model, UnsupportedModel, DamagedModel.
    """
    with boundary(f"{source} cannot be imported"):
        return _plan(source)


def _plan(source: Path) -> DirectoryPlan:
    from akunu_py.models.load.mlx_loader import open_model

    opened = open_model(source)
    found = opened.files
    small = [source / name for name in _WANTED if (source / name).is_file()]
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise UnsupportedModel(
            f"{source} has no tokenizer: expected tokenizer.json or tokenizer.model; fetch it from "
            "where the model came from"
        )
    names = [name for name in _SETTINGS if name in found.settings]
    quantization, bits = _quantization(found)
    plan = DirectoryPlan(
        source=source,
        settings={name: found.settings[name] for name in names},
        copies=[*found.weights, *head_files(source), *small],
        bits=bits,
        facts=ModelFacts(
            context_length=found.context,
            parameters=_parameters(found),
            quantization=quantization,
            licence=_licence(source),
        ),
    )
    _check_tokenizer(plan, found, small, opened.vocabulary)
    return plan


def _quantization(found: ModelFiles) -> tuple[str, int]:
    config, tensors = found.config, found.tensors
    settings = config.get("quantization")
    if isinstance(settings, dict) and isinstance(settings.get("bits"), int):
        return f"{settings['bits']}-bit, groups of {settings.get('group_size')}", settings["bits"]
    if isinstance(other := config.get("quantization_config"), dict):
        return f"{other.get('quant_method')!s:.40}", 4
    types = Counter(entry["dtype"] for entry in tensors.values() if len(entry["shape"]) > 1)
    return ", ".join(f"{name} x {count}" for name, count in types.most_common()), 0


def _parameters(found: ModelFiles) -> int:
    """The number of weights; packed words count for the weights inside them."""
    settings = found.config.get("quantization")
    settings = settings if isinstance(settings, dict) else {}
    total = 0
    for name, entry in found.tensors.items():
        module, _, part = name.rpartition(".")
        packed = part == "weight" and entry["dtype"] == "U32"
        if packed and isinstance(own := settings.get(module, settings), dict):
            total += math.prod(entry["shape"]) * 32 // (own.get("bits") or 32)
        elif part not in ("scales", "biases"):
            total += math.prod(entry["shape"])
    return total


def _licence(source: Path) -> str:
    """The licence in the model card's front matter, empty where it names none."""
    try:
        with files.open_regular(source / "README.md") as file:
            card = file.read(20_000).decode("utf-8", "replace")
    except OSError:
        return ""
    found = re.match(r"---\n(?:.*\n)*?license: *([\w.+-]{1,60}) *\n(?:.*\n)*?---", card)
    return found[1] if found else ""


def _check_tokenizer(
    plan: DirectoryPlan, found: ModelFiles, small: list[Path], vocabulary: int
) -> None:
    """Loads the tokenizer from a copy without code."""
    from akunu_py.models.load.mlx_loader import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="akunu-") as name:
        directory = Path(name)
        for path in small:
            (directory / path.name).symlink_to(path.resolve())
        plan.write_settings(directory)
        try:
            load_tokenizer(replace(found, path=directory), vocabulary)
        except ModelError as error:
            raise type(error)(str(error).replace(name, str(plan.source))) from error
