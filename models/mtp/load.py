"""Reads the MTP head of a model: from its checkpoint, or from a file of heads beside it.

mlx-lm drops these weights when it loads a model, and its conversions lack them. `mtp*.safetensors`
beside a model holds them then: as published, as mlx-vlm and MTPLX convert them, or as `write_head`
wrote them. Such a file belongs to a model if all its shapes do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from akunu_py.errors import UnsupportedModel
from akunu_py.models import safetensors
from akunu_py.models.model_files import boundary, head_files, weight_files
from akunu_py.models.mtp.families import FAMILIES, OWN, HeadFamily
from akunu_py.models.mtp.head import Head

HEAD_FILE = "mtp.safetensors"
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+)\.(\w+)")

Weights = dict[str, mx.array]


def load_head(directory: Path, model: Any, config: dict[str, Any]) -> Head | None:
    """The head that belongs to `model`, None where there is none; weights are read when they are
    needed, and quantized as the target's are.

    model, config: as `mlx_loader.open_model` returned them for `directory`. Raises
    UnsupportedModel, DamagedModel for a head that does not fit the model.
    """
    name = type(model).__module__.rpartition(".")[2]
    family = FAMILIES.get(name)
    if family is None:
        return None
    weights, raw = _find(directory, family, len(model.layers))
    if not weights:
        return None
    with boundary(f"the MTP head of {directory} does not belong to it", UnsupportedModel):
        text = config.get("text_config")
        head = Head(family, text if isinstance(text, dict) else config)
        weights = _converted(head, weights, deltas=family.deltas, raw=raw)
        quantize = _quantize_as(config.get("quantization"), head, weights)
        head.load_weights(list(weights.items()))
        head.eval()
        quantize()
    return head


def write_head(head: Head, path: Path) -> None:
    """Writes a file of the head alone, which `load_head` reads."""
    weights = {OWN + name: value for name, value in tree_flatten(head.parameters())}
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _find(directory: Path, family: HeadFamily, layers: int) -> tuple[Weights, bool]:
    """The head's weights by `Head`'s names, and whether those beside them are as published. A file
    of heads alone comes first: it may be a better one."""
    raw = False
    for files, alone in ((head_files(directory), True), (weight_files(directory), False)):
        found: Weights = {}
        for path in files:
            header = safetensors.read_header(path)
            raw |= any(
                name.endswith("conv1d.weight") and entry["shape"][-1] != 1
                for name, entry in header.items()
            )
            names = {name: family.own_name(name, layers, alone=alone) for name in header}
            names.pop("__metadata__", None)
            if any(names.values()):
                tensors = mx.load(str(path))
                found |= {own: tensors[name] for name, own in names.items() if own}
        if found:
            return found, raw
    return {}, raw


def _converted(head: Head, weights: Weights, *, deltas: bool, raw: bool) -> Weights:
    """Published weights as mlx-lm would convert them; converted ones stay as they are."""
    norms = {k: v for k, v in weights.items() if v.ndim == 1 and k.endswith("norm.weight")}
    # A gain is positive, and some of those of a head are below one. (mlx-lm converts the target's
    # only, and some conversions keep the head's as they were: jundot/omlx#1507.)
    if deltas and (
        raw or any(norm.astype(mx.float32).mean().item() < 0 for norm in norms.values())
    ):
        norms = {name: norm + 1.0 for name, norm in norms.items()}
    rest = {k.removeprefix("body."): v for k, v in weights.items() if k not in norms}
    for name in [name for name in rest if name.endswith(".experts.gate_up_proj")]:
        mlp = name.removesuffix(".experts.gate_up_proj")
        gate, up = mx.split(rest.pop(name), 2, axis=-2)
        rest[f"{mlp}.switch_mlp.gate_proj.weight"] = gate
        rest[f"{mlp}.switch_mlp.up_proj.weight"] = up
        rest[f"{mlp}.switch_mlp.down_proj.weight"] = rest.pop(f"{mlp}.experts.down_proj")
    rest = _stacked(head.body.sanitize(rest))
    return norms | {f"body.{k}" if k.startswith("model.") else k: v for k, v in rest.items()}


def _stacked(weights: Weights) -> Weights:
    """Experts that are tensors of their own, as one each: mlx-lm does it for some families."""
    experts: dict[str, dict[int, mx.array]] = {}
    stacked: Weights = {}
    for name, value in weights.items():
        if found := _EXPERT.fullmatch(name):
            mlp, number, module, part = found.groups()
            experts.setdefault(f"{mlp}.switch_mlp.{module}.{part}", {})[int(number)] = value
        else:
            stacked[name] = value
    for name, by_number in experts.items():
        stacked[name] = mx.stack([by_number[number] for number in range(len(by_number))])
    return stacked


def _quantize_as(settings: Any, head: Head, weights: Weights) -> Any:
    """Makes room in `head` for weights that are quantized already. Returns what quantizes it as
    `settings` say where none are, once it has them."""
    if any(name.endswith(".scales") for name in weights):

        def packed(path: str, module: Any) -> Any:
            if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
                return False
            return infer_quant_config(path, module, weights)

        nn.quantize(head, class_predicate=packed)
        return lambda: None
    if not isinstance(settings, dict) or not settings.get("bits"):
        return lambda: None
    group = int(settings["group_size"])
    own = getattr(head.body, "quant_predicate", None)

    def wanted(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        return own(path, module) if own else True

    mode = settings.get("mode", "affine")
    return lambda: nn.quantize(
        head, group, int(settings["bits"]), mode=mode, class_predicate=wanted
    )
