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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.errors import DamagedModel, UnknownModel, UnsupportedModel, one_line
from akunu_py.models import safetensors
from akunu_py.models.manifest import ModelFacts

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
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_SETTINGS_BYTES = 16_000_000
_LAYERS = re.compile(r"n_layers?|num(_\w+)?_layers")


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
            text = json.dumps(self.settings[name], indent=2, ensure_ascii=False)
            (directory / name).write_text(text + "\n", "utf-8")


def plan_directory(source: Path) -> DirectoryPlan:
    """Checks the model in the directory `source`; reads headers and settings, not the weights.

    Raises UnknownModel where there is no model, UnsupportedModel, DamagedModel.
    """
    config = check_config(source)
    weights = _weight_files(source)
    headers = [safetensors.read_header(path) for path in weights]
    tensors = {name: entry for header in headers for name, entry in header.items()}
    tensors.pop("__metadata__", None)
    _check_counts(source, config, len(tensors))
    small = [source / name for name in _WANTED if (source / name).is_file()]
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise UnsupportedModel(
            f"{source} has no tokenizer: expected tokenizer.json or tokenizer.model; fetch it from "
            "where the model came from"
        )
    settings = {"config.json": config}
    if (source / "tokenizer_config.json").is_file():
        settings["tokenizer_config.json"] = _settings(source / "tokenizer_config.json")
    quantization, bits = _quantization(config, tensors)
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else config
    context = inner.get("max_position_embeddings")
    plan = DirectoryPlan(
        source=source,
        settings=settings,
        copies=[*weights, *small],
        bits=bits,
        facts=ModelFacts(
            context_length=context if isinstance(context, int) and context > 0 else 0,
            parameters=_parameters(config, tensors),
            quantization=quantization,
            licence=_licence(source),
        ),
    )
    _try_model(source)
    _try_tokenizer(plan, small)
    return plan


def known_architectures() -> list[str]:
    """The model types that mlx-lm has, by its files and its own aliases."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING

    files = Path(mlx_lm.models.__path__[0]).glob("*.py")
    own = {path.stem for path in files if "\nclass Model(" in path.read_text("utf-8")}
    return sorted(own | {alias for alias, name in MODEL_REMAPPING.items() if name in own})


def check_config(source: Path) -> dict[str, Any]:
    """The configuration of the model in `source`, of an architecture that mlx-lm has.

    Raises UnknownModel, UnsupportedModel, DamagedModel.
    """
    if not (source / "config.json").is_file():
        files = sorted(path.name for path in source.glob("*.gguf"))
        if files:
            raise UnknownModel(
                f"expected config.json in {source}, found {len(files)} GGUF files; name one of "
                f"them: akunu models import {source / files[0]}"
            )
        raise UnknownModel(
            f"expected a model in {source}, found no config.json; name the directory that holds it"
        )
    config = _settings(source / "config.json")
    kind = config.get("model_type")
    known = known_architectures()
    if kind not in known:
        raise UnsupportedModel(
            f"{source} has the architecture {kind!r:.60}; mlx-lm knows {', '.join(known)}"
        )
    if config.get("model_file") is not None:
        raise UnsupportedModel(
            f"{source} needs code of its own ({config['model_file']!r:.60}), which akunu never runs"
        )
    return config


def _settings(path: Path) -> dict[str, Any]:
    """A JSON object, without what points to code."""
    try:
        if path.stat().st_size > _MAX_SETTINGS_BYTES:
            raise ValueError("it is absurdly large")
        value = json.loads(path.read_text("utf-8"))
        if not isinstance(value, dict):
            raise ValueError("expected an object")
    except (ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} is unreadable ({error!s:.80}); fetch it again") from error
    value.pop("auto_map", None)
    return value


def _weight_files(source: Path) -> list[Path]:
    files = sorted(path for path in source.glob("model*.safetensors") if path.is_file())
    if not files:
        others = sorted(path.name for path in source.iterdir() if path.is_file())
        if pickles := [name for name in others if name.endswith(_PICKLES)]:
            raise UnsupportedModel(
                f"{source} has its weights as pickle ({pickles[0]}), which can run code; akunu "
                "reads safetensors: fetch those, or convert it where you trust it"
            )
        found = next((name for name in others if name.endswith(".safetensors")), "none")
        raise UnsupportedModel(f"{source}: expected model*.safetensors, found {found}")
    index = source / "model.safetensors.index.json"
    if not index.is_file():
        return files
    places = _settings(index).get("weight_map")
    names = set(places.values()) if isinstance(places, dict) else set()
    if missing := sorted(str(name) for name in names - {path.name for path in files}):
        raise DamagedModel(
            f"{source} is incomplete: {len(missing)} files of weights are missing, the first is "
            f"{missing[0][:80]!r}; fetch it again"
        )
    return files


def _check_counts(source: Path, config: dict[str, Any], tensors: int) -> None:
    """More layers than tensors are a damaged number; do not build a billion layers first."""
    inner = config.get("text_config")
    for settings in (config, inner if isinstance(inner, dict) else {}):
        for key, value in settings.items():
            if _LAYERS.fullmatch(key) and isinstance(value, int) and value > tensors:
                raise DamagedModel(
                    f"{source / 'config.json'} sets {key} to {value}, but there are only {tensors} "
                    "tensors; fetch it again"
                )


def _quantization(config: dict[str, Any], tensors: dict[str, Any]) -> tuple[str, int]:
    settings = config.get("quantization")
    if isinstance(settings, dict) and isinstance(settings.get("bits"), int):
        return f"{settings['bits']}-bit, groups of {settings.get('group_size')}", settings["bits"]
    if isinstance(found := config.get("quantization_config"), dict):
        return f"{found.get('quant_method')!s:.40}", 4
    types = Counter(entry["dtype"] for entry in tensors.values() if len(entry["shape"]) > 1)
    return ", ".join(f"{name} x {count}" for name, count in types.most_common()), 0


def _parameters(config: dict[str, Any], tensors: dict[str, Any]) -> int:
    """The number of weights; packed words count for the weights inside them."""
    settings = config.get("quantization")
    settings = settings if isinstance(settings, dict) else {}
    total = 0
    for name, entry in tensors.items():
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
        card = (source / "README.md").read_text("utf-8")[:20_000]
    except (OSError, UnicodeDecodeError):
        return ""
    found = re.match(r"---\n(?:.*\n)*?license: *([\w.+-]{1,60}) *\n(?:.*\n)*?---", card)
    return found[1] if found else ""


def _try_model(source: Path) -> None:
    """Builds the model without reading its weights: names and shapes are checked against it."""
    from mlx_lm.utils import load_model

    try:
        load_model(source, lazy=True)
    except Exception as error:  # mlx-lm's model classes raise whatever Python raises
        raise UnsupportedModel(
            f"mlx-lm cannot load the model in {source}: {one_line(error)}"
        ) from error


def _try_tokenizer(plan: DirectoryPlan, small: list[Path]) -> None:
    """Loads the tokenizer from a copy without code."""
    from mlx_lm.utils import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="akunu-") as name:
        directory = Path(name)
        for path in small:
            (directory / path.name).symlink_to(path.resolve())
        plan.write_settings(directory)
        try:
            load_tokenizer(directory, {"trust_remote_code": False, "local_files_only": True})
        except Exception as error:  # transformers and tokenizers raise whatever Python raises
            raise UnsupportedModel(
                f"the tokenizer in {plan.source} cannot be loaded: {one_line(error)}"
            ) from error
