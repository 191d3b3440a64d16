"""The files of a model's directory, checked before any library opens them.

`as_error` surrounds every library call that reads a model: all exceptions, including panics of
`tokenizers`, become errors that name the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py import files
from akunu_py.errors import AkunuError, DamagedModel, UnknownModel, UnsupportedModel, one_line
from akunu_py.models.load import safetensors
from akunu_py.text import did_you_mean

ADVICE = "pull the model again (akunu models rm, akunu models pull), or use another"
MAX_SETTINGS_BYTES = 16_000_000
MAX_TOKENIZER_BYTES = 48_000_000  # the largest known, of 262,000 tokens, have 33 MB
_LARGE_FILES = ("tokenizer.json", "tekken.json", "model.safetensors.index.json")
_JSON_OBJECTS = (  # besides config.json
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "hf_quant_config.json",
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_READ = (".json", ".jsonl", ".jinja", ".model", ".tiktoken", ".txt")  # by mlx-lm or transformers
_MOST_LAYERS = 4096  # the deepest known models have fewer than 200
_LAYERS = re.compile(r"n_layers?|num(_\w+)?_layers|\w+_num_layers")
_LAYER_LISTS = re.compile(r"\w*(layer|block|pattern)\w*")  # lists with one entry per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model, collected before its installation."""

    parameters: int  # number of weights
    quantized: bool
    quantization: str  # storage types and their numbers of matrices
    license: str = ""


@contextlib.contextmanager
def as_error(what: str, kind: type[AkunuError] = DamagedModel) -> Iterator[None]:
    """Turn any exception of the block into `kind`: "`what`: the reason; advice".

    Passes on AkunuError and exceptions that end the program. Rust libraries panic with a
    BaseException.
    """
    try:
        yield
    except AkunuError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {one_line(error)}; {ADVICE}") from error


def read_settings(path: Path, limit: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Read a JSON object and remove its references to code. Raises DamagedModel."""
    try:
        value = files.read_json(path, limit, infinity=True)
        if not isinstance(value, dict):
            raise ValueError("expected an object")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DamagedModel(f"{path} is unreadable ({reason!s:.80}); {ADVICE}") from error
    value.pop("auto_map", None)
    return value


def write_settings(directory: Path, settings: dict[str, dict[str, Any]]) -> None:
    for name, value in settings.items():
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model's directory, read and checked once."""

    path: Path
    settings: dict[str, dict[str, Any]]  # JSON objects by file name
    weights: list[Path]
    tensors: dict[str, Any]  # the headers of `weights`, by the tensors' names

    @classmethod
    def read(cls, path: Path) -> ModelFiles:
        """Read settings and headers. Raises UnknownModel, UnsupportedModel, DamagedModel."""
        config = check_config(path)
        settings = {"config.json": config} | _read_other_settings(path)
        weights = weight_files(path)
        return cls(path, settings, weights, _read_tensors(path / "config.json", config, weights))

    @property
    def config(self) -> dict[str, Any]:
        return self.settings["config.json"]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration for text, or all of it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def context_length(config: dict[str, Any]) -> int:
    """Return a model's own context length in tokens, 0 if unknown."""
    for part in (text_config(config), config):
        found = part.get("max_position_embeddings")
        if isinstance(found, int) and found > 0:
            return found
    return 0


def _read_other_settings(source: Path) -> dict[str, dict[str, Any]]:
    """Return JSON settings besides config.json by file name; check all. Raises DamagedModel."""
    found = {}
    for path in sorted([*source.iterdir(), *source.glob("additional_chat_templates/*")]):
        if path.suffix not in _READ or path.is_dir() or not path.exists():
            continue
        if path.name in _JSON_OBJECTS:
            found[path.name] = read_settings(path)
            continue
        try:
            with files.open_regular(
                path, MAX_TOKENIZER_BYTES if path.name in _LARGE_FILES else MAX_SETTINGS_BYTES
            ):
                pass
        except OSError as error:
            raise DamagedModel(f"{path} is unreadable ({error.strerror}); {ADVICE}") from error
    return found


def known_architectures() -> list[str]:
    """Return the model types of mlx-lm: its modules and its aliases."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING

    names = {path.stem for path in Path(mlx_lm.models.__path__[0]).glob("*.py") if _is_model(path)}
    return sorted(names | {alias for alias, name in MODEL_REMAPPING.items() if name in names})


def _is_model(path: Path) -> bool:
    return path.is_file() and "\nclass Model(" in path.read_text("utf-8")


def check_config(source: Path) -> dict[str, Any]:
    """Return a supported model's config. Raises UnknownModel, UnsupportedModel, DamagedModel."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING

    if not (source / "config.json").is_file():
        if found := sorted(path.name for path in source.glob("*.gguf")):
            raise UnknownModel(
                f"expected config.json in {source}, found {len(found)} GGUF files; import one: "
                f"akunu models import {source / found[0]}"
            )
        raise UnknownModel(
            f"expected a model in {source}, found no config.json; use the directory that has it"
        )
    config = read_settings(source / "config.json")
    kind = config.get("model_type")
    module = MODEL_REMAPPING.get(kind, kind) if isinstance(kind, str) else ""
    if not module.isidentifier() or not _is_model(Path(mlx_lm.models.__path__[0]) / f"{module}.py"):
        known = known_architectures()
        hint = did_you_mean(kind, known) if isinstance(kind, str) else ""
        raise UnsupportedModel(
            f"{source} has the architecture {kind!r:.60}{hint}; mlx-lm supports {len(known)} "
            "others: use another model, or a newer mlx-lm"
        )
    if config.get("model_file") is not None:
        raise UnsupportedModel(
            f"{source} needs its own code ({config['model_file']!r:.60}), which akunu never runs"
        )
    return config


def _read_tensors(config_file: Path, config: dict[str, Any], weights: list[Path]) -> dict[str, Any]:
    """Return the headers of the weights by tensor name. Raises DamagedModel.

    A `config` with more layers than tensors is damaged too: mlx-lm would build a million layers
    before it reads the weights.
    """
    tensors: dict[str, Any] = {}
    for path in weights:
        tensors |= safetensors.read_header(path)[0]
    for key, value in _nested(config):
        listed = isinstance(value, list | str) and _LAYER_LISTS.fullmatch(key)
        count = len(value) if listed else value if _LAYERS.fullmatch(key) else 0
        if isinstance(count, int) and count > min(len(tensors), _MOST_LAYERS):
            raise DamagedModel(
                f"{config_file} sets {key} to {count!r:.20} layers, but there are only "
                f"{len(tensors)} tensors; {ADVICE}"
            )
    return tensors


def _nested(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        yield key, value
        if isinstance(value, dict):
            yield from _nested(value)


def head_files(source: Path) -> list[Path]:
    """Return the files of MTP heads in a model's directory."""
    return sorted(path for path in source.glob("mtp*.safetensors") if path.is_file())


def no_weights(
    where: object, names: Sequence[str], expected: str = "model*.safetensors"
) -> UnsupportedModel:
    """Return the error for a model without the `expected` files, which names what it has."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if any(name.endswith(".gguf") for name in names):
        reason = f"has GGUF files, but no {expected}; run `akunu models import FILE` with one"
    elif pickles:
        reason = (
            f"has its weights as pickle ({pickles[0][:60]}), which can run code; akunu reads "
            "safetensors only: use a repository that has them, or convert these if you trust them"
        )
    else:
        example = next((name for name in names if name.endswith(".safetensors")), "none")
        reason = f"has no weights: expected {expected}, found {example[:60]}; use another one"
    return UnsupportedModel(f"{where} {reason}")


def weight_files(source: Path) -> list[Path]:
    """Return the files of weights. Raises DamagedModel if the index names a missing one."""
    found = sorted(source.glob("model*.safetensors"))  # all of which mlx-lm opens
    if other := [path for path in found if not path.is_file()]:
        raise DamagedModel(f"{other[0]} is not a file; {ADVICE}")
    if not found:
        raise no_weights(source, os.listdir(source))
    index = source / "model.safetensors.index.json"
    if not index.exists():
        return found
    weight_map = read_settings(index, MAX_TOKENIZER_BYTES).get("weight_map")
    names = {str(file) for file in weight_map.values()} if isinstance(weight_map, dict) else set()
    if missing := sorted(names - {path.name for path in found}):
        raise DamagedModel(
            f"{source} is incomplete: {len(missing)} files of weights are missing, the first is "
            f"{missing[0][:80]!r}; download the model again"
        )
    return found
