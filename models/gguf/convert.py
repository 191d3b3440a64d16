"""Converts a GGUF file into a directory that mlx-lm loads.

`families` names the tensors' places, `weights` converts their values, `tokenizer` builds the
tokenizer. The conversion goes tensor by tensor, so memory stays bounded. Before anything is
written, an unknown architecture and any tensor or setting that we would have to ignore are
UnsupportedModel, a file that contradicts itself is DamagedModel.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf import weights
from akunu_py.models.gguf.families import (
    SETTING_TENSORS,
    Family,
    GgufSettings,
    Slot,
    common_config,
    family_of,
    sizes,
)
from akunu_py.models.gguf.file import GgufFile, Tensor, read_gguf
from akunu_py.models.gguf.tokenizer import TokenizerPlan, plan_tokenizer
from akunu_py.models.manifest import ModelFacts
from akunu_py.models.model_files import boundary
from akunu_py.models.safetensors import Entry, write_safetensors


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Everything checked and ready to be written."""

    file: GgufFile
    config: dict[str, Any]
    entries: list[Entry]
    tokenizer: TokenizerPlan
    facts: ModelFacts

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def write(
        self, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Writes the model into the existing, empty `directory`.

        progress: called with the bytes written and their total. Raises UnsupportedModel where a
        weight overflows its float type; OSError passes through.
        """
        total = self.nbytes
        path = directory / "model.safetensors"
        write_safetensors(path, self.entries, lambda done: progress(done, total))
        self.tokenizer.write(directory)
        (directory / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", "utf-8")


def import_gguf(
    source: Path, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> ModelFacts:
    """Converts the GGUF file `source` into the existing, empty `directory`.

    progress: called with the bytes written and their total.
    Raises UnsupportedModel or DamagedModel before anything is written; OSError passes through.
    """
    plan = plan_import(source)
    plan.write(directory, progress)
    return plan.facts


def plan_import(source: Path) -> ImportPlan:
    """Reads and checks everything but the weights' values."""
    with boundary(f"{source.name} cannot be imported"):
        return _plan(source)


def _plan(source: Path) -> ImportPlan:
    file = read_gguf(source)
    architecture, family = family_of(file)
    tokenizer = plan_tokenizer(file)
    settings = GgufSettings(file, architecture)
    settings.expect_nothing_else(set(family.reads))
    config: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.class_name]}
    config |= common_config(settings, tokenizer.size)
    config |= family.configure(settings, config)
    config |= tokenizer.config_ids()
    slots = _place_tensors(file, family, config)
    kept = [tensor for tensor in file.tensors.values() if tensor.name in slots]
    dtype = _float_type(kept, slots, family)
    bits = {
        slots[tensor.name].name.removesuffix(".weight"): weights.BITS[tensor.type.name]
        for tensor in kept
        if tensor.type.name in weights.BITS
    }
    if bits:
        config["quantization"] = _quantization(bits)
    entries = [
        entry for tensor in kept for entry in _entries(tensor, slots[tensor.name], config, dtype)
    ]
    types = Counter(tensor.type.name for tensor in kept if len(tensor.shape) > 1)
    licence = file.metadata.get("general.license")
    facts = ModelFacts(
        context_length=config["max_position_embeddings"],
        parameters=sum(math.prod(tensor.shape) for tensor in kept),
        quantization=", ".join(f"{name} x {count}" for name, count in types.most_common()),
        licence=licence if isinstance(licence, str) and len(licence) < 100 else "",
    )
    return ImportPlan(file, config, entries, tokenizer, facts)


def _place_tensors(file: GgufFile, family: Family, config: dict[str, Any]) -> dict[str, Slot]:
    """Checks the tensors against the settings. Returns each one's place in mlx-lm's model."""
    expected = family.top()
    if config["tie_word_embeddings"]:
        del expected["output.weight"]
    # More layers than tensors are a damaged number; do not spell out a billion names first.
    for layer in range(min(config["num_hidden_layers"], len(file.tensors))):
        for short, slot in family.layer.items():
            name = f"model.layers.{layer}.{slot.name}"
            expected[f"blk.{layer}.{short}"] = Slot(name, slot.shape, slot.heads, slot.shift)
    if missing := [name for name in expected if name not in file.tensors]:
        raise DamagedModel(
            f"{file.path.name} is damaged: {len(missing)} tensors are missing, the first is "
            f"{missing[0]}; fetch the file again"
        )
    known = sizes(config)
    used = set(expected)
    if config.get("rope_scaling"):
        used |= set(SETTING_TENSORS)
    for name, tensor in file.tensors.items():
        if name not in used and not _is_neutral(tensor):
            raise UnsupportedModel(
                f"{file.path.name} has a tensor {name[:80]!r} that akunu's import would ignore"
            )
        if name not in expected:
            continue
        shape = tuple(known[size] for size in expected[name].shape)
        if tensor.shape != shape:
            raise DamagedModel(
                f"{file.path.name}: expected the shape {list(shape)} for {name}, "
                f"found {list(tensor.shape)}; fetch the file again"
            )
        if len(shape) == 1 and tensor.type.name in weights.BITS:
            raise DamagedModel(
                f"{file.path.name}: expected plain numbers for {name}, found {tensor.type.name}; "
                "fetch the file again"
            )
    return expected


def _is_neutral(tensor: Tensor) -> bool:
    """Whether `tensor` is a table of rotary frequencies that changes nothing."""
    return (
        tensor.name == "rope_freqs.weight"
        and tensor.type.name == "F32"
        and bool((tensor.read().view("<f4") == 1).all())
    )


def _float_type(tensors: list[Tensor], slots: dict[str, Slot], family: Family) -> str:
    """The one float type of all that is not codes: MLX computes in the widest that it meets, so a
    single float32 norm would make the whole model slow."""
    matrices = {tensor.type.name for tensor in tensors if len(tensor.shape) > 1}
    if matrices == {"F32"}:
        return "F32"
    if family.bfloat or "BF16" in matrices:
        return "BF16"
    fits = all(
        np.isfinite(weights.round_to(_vector(tensor, slots[tensor.name].shift), "F16")).all()
        for tensor in tensors
        if len(tensor.shape) == 1
    )
    return "F16" if fits else "BF16"


def _vector(tensor: Tensor, shift: float) -> weights.Array:
    """A norm's or a bias' values: float32."""
    values = weights.load(weights.convert_float(tensor, tensor.type.name), tensor.type.name)
    shifted: weights.Array = values - np.float32(shift)
    return shifted


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """mlx-lm's quantization settings: the commonest width, and every module that differs."""
    common = Counter(bits.values()).most_common(1)[0][0]
    settings: dict[str, Any] = {
        "group_size": weights.GROUP_SIZE,
        "bits": common,
        "mode": "affine",
    }
    for module, width in bits.items():
        if width != common:
            settings[module] = {"group_size": weights.GROUP_SIZE, "bits": width}
    return settings


def _entries(tensor: Tensor, slot: Slot, config: dict[str, Any], dtype: str) -> list[Entry]:
    """What a tensor becomes in model.safetensors; floats are stored as `dtype`."""

    def ordered(values: weights.Array) -> weights.Array:
        return weights.unpermute(values, config[slot.heads]) if slot.heads else values

    if tensor.type.name in weights.BITS:
        module = slot.name.removesuffix(".weight")
        *rows, columns = tensor.shape
        words = columns * weights.BITS[tensor.type.name] // 32
        groups = (*rows, columns // weights.GROUP_SIZE)
        conversion = _Conversion(tensor, dtype)
        shapes = {"weight": ("U32", (*rows, words)), "scales": (dtype, groups)}
        shapes["biases"] = (dtype, groups)
        return [
            Entry(f"{module}.{part}", kind, shape, lambda part=part: ordered(conversion.take(part)))  # type: ignore[misc]
            for part, (kind, shape) in shapes.items()
        ]
    if len(tensor.shape) == 1:
        return [Entry(slot.name, dtype, tensor.shape, partial(_shifted, tensor, slot.shift, dtype))]
    return [
        Entry(slot.name, dtype, tensor.shape, lambda: ordered(weights.convert_float(tensor, dtype)))
    ]


def _shifted(tensor: Tensor, shift: float, dtype: str) -> weights.Array:
    return weights.store(weights.round_to(_vector(tensor, shift), dtype), dtype)


class _Conversion:
    """Converts a tensor once for the three entries it becomes; drops it after the last."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.tensor, self.dtype = tensor, dtype
        self.parts: dict[str, weights.Array] = {}

    def take(self, part: str) -> weights.Array:
        if not self.parts:
            made = weights.convert_quantized(self.tensor, self.dtype)
            self.parts = {"weight": made.packed, "scales": made.scales, "biases": made.biases}
        return self.parts.pop(part)
