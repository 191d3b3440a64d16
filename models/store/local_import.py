"""Imports a model on this machine into the store: a directory or a GGUF file, quantized if asked.

Everything is checked before anything is written; `install` makes the model visible once it is
complete.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.errors import DamagedModel, UnknownModel, UnsupportedModel, UsageError
from akunu_py.files import open_regular
from akunu_py.models.load.mlx_directory import plan_directory
from akunu_py.models.load.model_files import boundary
from akunu_py.models.manifest import ModelFacts
from akunu_py.models.store import store
from akunu_py.models.store.progress import ProgressCallback, no_callback
from akunu_py.models.store.store import Builder, install

GROUP_SIZE = 64  # mlx-lm's own choice
_BLOCK = 1 << 22


def import_model(
    source: Path,
    *,
    name: str | None = None,
    bits: int | None = None,
    progress: ProgressCallback = no_callback,
) -> store.StoredModel:
    """Imports the directory or GGUF file `source` under `name` (None: after the file).

    bits: quantize plain weights to so many. progress: called with a phase ("import", "copy",
    "quantize", "record"), the bytes done and in all.
    Raises UnknownModel where there is nothing, UsageError for a name that is taken or weights that
    are quantized already, UnsupportedModel and DamagedModel for what cannot be imported, and
    StoreError.
    """
    source = source.expanduser()
    if not source.exists():
        raise UnknownModel(f"expected a directory or a GGUF file at {source}, found nothing there")
    name = _new_name(source, name)
    build, need = (_from_directory if source.is_dir() else _from_gguf)(source, bits, progress)

    def refuse(model: store.StoredModel) -> bool:
        raise _taken(name)  # another process took the name while we were checking

    return install(name, build, need, progress, keep=refuse)


def _new_name(source: Path, name: str | None) -> str:
    chosen = name or re.sub(r"[^A-Za-z0-9._+-]+", "-", _stem(source)).strip("-.")[:96]
    if not store.is_name(chosen):
        raise UsageError(
            f"{chosen[:80]!r} cannot name a model (letters, digits, '.', '_', '+', '-'); give "
            "another with --name"
        )
    if (paths.models_dir() / chosen).exists():
        raise _taken(chosen)
    return chosen


def _stem(source: Path) -> str:
    source = source.resolve()
    stem = source.name if source.is_dir() else source.stem
    return re.sub(r"-\d{5}-of-\d{5}$", "", stem)


def _taken(name: str) -> UsageError:
    return UsageError(
        f"a model called {name!r} is here already; give another name with --name, or run "
        f"`akunu models rm {name}` first"
    )


def _from_directory(
    source: Path, bits: int | None, progress: ProgressCallback
) -> tuple[Builder, int]:
    plan = plan_directory(source)
    if bits and plan.bits:
        raise UsageError(
            f"{source} is quantized already ({plan.facts.quantization}); omit --quantize"
        )

    def build(work: Path, directory: Path) -> ModelFacts:
        if bits:
            _copy([path for path in plan.copies if not _is_weights(path)], directory, progress)
            plan.write_settings(directory)
            _quantize(source, directory, bits, progress)
        else:
            _copy(plan.copies, directory, progress)
            plan.write_settings(directory)
        return _facts(plan.facts, f"folder {source.resolve()}", bits)

    return build, _quantized_bytes(plan.facts.parameters, bits) if bits else plan.nbytes


def _from_gguf(source: Path, bits: int | None, progress: ProgressCallback) -> tuple[Builder, int]:
    from akunu_py.models.gguf.convert import plan_import

    if source.suffix.lower() != ".gguf":
        raise UnsupportedModel(
            f"{source.name} is not GGUF; akunu imports .gguf files and directories of safetensors "
            "with their config.json"
        )
    plan = plan_import(source)
    if bits and "quantization" in plan.config:
        raise UsageError(
            f"{source.name} is quantized already ({plan.facts.quantization}); omit --quantize"
        )

    def build(work: Path, directory: Path) -> ModelFacts:
        target = work if bits else directory
        plan.write(target, lambda done, total: progress("import", done, total))
        if bits:
            plain = [path for path in work.iterdir() if path.is_file() and not _is_weights(path)]
            _copy(plain, directory, progress)
            _quantize(work, directory, bits, progress)
        return _facts(plan.facts, f"file {source.resolve()}", bits)

    extra = _quantized_bytes(plan.facts.parameters, bits) if bits else 0
    return build, plan.nbytes + extra


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _facts(found: ModelFacts, source: str, bits: int | None) -> ModelFacts:
    quantization = f"{bits}-bit, groups of {GROUP_SIZE}" if bits else found.quantization
    return replace(found, source=source, quantization=quantization)


def _quantized_bytes(parameters: int, bits: int) -> int:
    """A little more than `parameters` weights take with their scales and biases."""
    return int(parameters * (bits + 32 / GROUP_SIZE) / 8 * 1.1) + 1_000_000


def _copy(files: list[Path], directory: Path, progress: ProgressCallback) -> None:
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        with open_regular(path) as source, (directory / path.name).open("xb") as target:
            while block := source.read(_BLOCK):
                target.write(block)
                done += len(block)
                progress("copy", done, total)
    if done != total:
        raise DamagedModel(f"{files[0].parent} changed while it was copied; import it again")


def _quantize(source: Path, directory: Path, bits: int, progress: ProgressCallback) -> None:
    """Quantizes the model in `source` with mlx-lm into `directory`, shard by shard; and its MTP
    head, which mlx-lm drops, into a file of its own."""
    from mlx_lm.utils import quantize_model, save_config, save_model

    from akunu_py.models import mtp
    from akunu_py.models.load.mlx_loader import open_model

    progress("quantize", 0, 0)
    opened = open_model(source)
    model, config = opened.model, opened.config
    _set_dtype(model, config)
    with (
        boundary(f"mlx-lm cannot quantize the model in {source}", UnsupportedModel),
        contextlib.redirect_stdout(io.StringIO()),  # it prints how many bits came out
    ):
        model, config = quantize_model(model, config, GROUP_SIZE, bits)
    if not any(hasattr(module, "bits") for _, module in model.named_modules()):
        raise UnsupportedModel(
            f"{source}: no matrix has rows of a multiple of {GROUP_SIZE} weights; import it "
            "without --quantize"
        )
    config.pop("auto_map", None)
    with boundary(f"{source} cannot be quantized"):  # its weights are read only now
        if head := mtp.load_head(source, model, config):
            mtp.write_head(head, directory / mtp.HEAD_FILE)
        save_model(directory, model, donate_model=True)
    save_config(config, directory / "config.json")


def _set_dtype(model: Any, config: dict[str, Any]) -> None:
    """Casts to the type that the model is meant to run in, as mlx-lm's own conversion does."""
    import mlx.core as mx

    inner = config.get("text_config")
    wanted = config.get("dtype") or config.get("torch_dtype")
    if wanted is None and isinstance(inner, dict):
        wanted = inner.get("dtype") or inner.get("torch_dtype")
    if wanted in ("float16", "bfloat16"):
        model.set_dtype(getattr(mx, wanted))
