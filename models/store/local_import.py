"""Import a directory or a GGUF file into the store; everything is checked before a write."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from akunu_py import paths
from akunu_py.errors import DamagedModel, UnknownModel, UnsupportedModel, UsageError
from akunu_py.files import open_regular, read_blocks
from akunu_py.models.load.model_files import as_error, text_config, write_settings
from akunu_py.models.store import model_store
from akunu_py.models.store.cleanup import partial_models, remove_leftover
from akunu_py.models.store.directories import (
    check_space,
    is_name,
    lock_model,
    partial_directory,
    store_errors,
    sync,
)
from akunu_py.models.store.hub_cache import hash_file
from akunu_py.models.store.mlx_directory import DirectoryPlan, plan_directory
from akunu_py.models.store.names import NameEntry, save_entry
from akunu_py.models.store.progress import ProgressCallback, counting, no_callback

if TYPE_CHECKING:
    from akunu_py.models.gguf.convert import ImportPlan

GROUP_SIZE = 64  # mlx-lm's default

Builder = Callable[[Path, Path], NameEntry]
"""Writes the model's files to the second directory, and temporary files to the first."""


def install(
    name: str,
    build: Builder,
    need_bytes: int,
    progress: ProgressCallback = no_callback,
    *,
    existing: Literal["keep", "refuse", "replace"] = "keep",
) -> model_store.StoredModel:
    """Build the model `name` and make it visible.

    need_bytes: free space needed at the peak. existing: what happens to an intact model of that
    name. Raises UsageError, StoreError, and the exceptions of `build` and `progress`.
    """
    root = paths.models_dir()
    with store_errors(f"cannot install model {name!r} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        for leftover in partial_models():
            remove_leftover(leftover)
        with lock_model(name, lambda: progress("waiting for another akunu", 0, 0)):
            if existing != "replace" and (model := model_store.find_intact(name)):
                if existing == "refuse":  # another process installed the name meanwhile
                    raise _name_in_use(name)
                return model
            check_space(root, need_bytes)
            directory = partial_directory(name)
            try:
                save_entry(name, _build(build, directory, progress))
                _publish(directory, root / name)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    return model_store.get(name)


def _build(build: Builder, directory: Path, progress: ProgressCallback) -> NameEntry:
    work, model = directory / "work", directory / "model"
    directory.mkdir()  # fails if the path exists, for example as a link
    work.mkdir()
    model.mkdir()
    entry = build(work, model)
    shutil.rmtree(work)
    files = sorted(model.iterdir())
    count = counting(progress, "record", sum(path.stat().st_size for path in files))
    return replace(entry, sha256={path.name: hash_file(path, count) for path in files})


def _publish(directory: Path, target: Path) -> None:
    """Rename the finished model into place, after all its bytes are on disk."""
    model = directory / "model"
    for path in [*model.iterdir(), model]:
        sync(path)
    if os.path.lexists(target):
        os.rename(target, directory / "replaced")
    os.rename(model, target)
    sync(target.parent)


def import_model(
    source: Path,
    *,
    name: str | None = None,
    bits: int | None = None,
    progress: ProgressCallback = no_callback,
) -> model_store.StoredModel:
    """Import the directory or GGUF file `source` as `name` (default: derived from the file name).

    bits: quantize float weights to this width. Raises UnknownModel for a missing source, UsageError
    for a name in use or quantized weights, UnsupportedModel, DamagedModel, StoreError.
    """
    source = Path(os.path.expanduser(source))
    if not source.exists():
        raise UnknownModel(f"expected a directory or a GGUF file at {source}, found nothing there")
    name = _choose_name(source, name)
    plan = _plan(source)
    facts, in_place = plan.facts, isinstance(plan, DirectoryPlan)
    if bits and facts.quantized:
        raise UsageError(f"{source} is quantized already ({facts.quantization}); omit --quantize")
    need = 0 if bits and in_place else plan.nbytes
    if bits:  # an upper bound for quantized weights with their scales and biases
        need += int(facts.parameters * (bits + 32 / GROUP_SIZE) / 8 * 1.1) + 1_000_000
    origin = f"{'folder' if in_place else 'file'} {source.resolve()}"
    quantization = f"{bits}-bit, groups of {GROUP_SIZE}" if bits else facts.quantization

    def build(work: Path, directory: Path) -> NameEntry:
        if isinstance(plan, DirectoryPlan):
            plain, files = source, plan.copies
            write_settings(directory, plan.settings)
        else:
            plain = work if bits else directory
            plan.write(plain, partial(progress, "import"))
            files = list(work.iterdir())
        if bits:
            files = [path for path in files if path.suffix != ".safetensors"]
        _copy(files, directory, progress)
        if bits:
            _quantize(plain, directory, bits, progress)
        return NameEntry(source=origin, license=facts.license, quantization=quantization)

    return install(name, build, need, progress, existing="refuse")


def _choose_name(source: Path, name: str | None) -> str:
    path = source.resolve()
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.name if path.is_dir() else path.stem)
    target = name or re.sub(r"[^A-Za-z0-9._+-]+", "-", stem).strip("-.")[:96]
    if not is_name(target):
        raise UsageError(
            f"invalid model name {target[:80]!r} (use letters, digits, '.', '_', '+', '-'); choose "
            "another with --name"
        )
    if any(model.name == target for model in model_store.list_models()):
        raise _name_in_use(target)
    return target


def _name_in_use(name: str) -> UsageError:
    return UsageError(
        f"model {name!r} is already installed; choose another name with --name, or run "
        f"`akunu models rm {name}` first"
    )


def _plan(source: Path) -> DirectoryPlan | ImportPlan:
    if source.is_dir():
        return plan_directory(source)
    from akunu_py.models.gguf.convert import plan_import

    if source.suffix.lower() != ".gguf":
        raise UnsupportedModel(
            f"{source.name} is not GGUF; akunu imports .gguf files and directories of safetensors "
            "with their config.json"
        )
    return plan_import(source)


def _copy(files: list[Path], directory: Path, progress: ProgressCallback) -> None:
    expected, copied = sum(path.stat().st_size for path in files), 0
    count = counting(progress, "copy", expected)
    for path in files:
        with open_regular(path) as source, (directory / path.name).open("xb") as target:
            target.writelines(read_blocks(source, count))
            copied += source.tell()
    if copied != expected:
        raise DamagedModel(f"{files[0].parent} changed during the copy; import it again")


def _quantize(source: Path, directory: Path, bits: int, progress: ProgressCallback) -> None:
    """Quantize a model with mlx-lm. Its MTP head, which mlx-lm drops, goes into its own file."""
    from mlx_lm.utils import quantize_model, save_config, save_model

    from akunu_py.models import mtp
    from akunu_py.models.load.mlx_loader import open_directory

    progress("quantize", 0, 0)
    opened = open_directory(source)
    model, config = opened.model, opened.config
    _set_dtype(model, config)
    with (
        as_error(f"mlx-lm cannot quantize the model in {source}", UnsupportedModel),
        contextlib.redirect_stdout(io.StringIO()),  # it prints the resulting width
    ):
        model, config = quantize_model(model, config, GROUP_SIZE, bits)
    if not any(hasattr(module, "bits") for _, module in model.named_modules()):
        raise UnsupportedModel(
            f"{source}: no matrix has rows of a multiple of {GROUP_SIZE} weights; omit --quantize"
        )
    config.pop("auto_map", None)
    with as_error(f"{source} cannot be quantized"):  # this reads the weights
        if heads := mtp.load_heads(source, model, config):
            mtp.write_heads(heads, directory / mtp.HEAD_FILE)
        save_model(directory, model, donate_model=True)
    save_config(config, directory / "config.json")


def _set_dtype(model: Any, config: dict[str, Any]) -> None:
    """Cast to the model's own float type, as mlx-lm's conversion does."""
    import mlx.core as mx

    parts, keys = (config, text_config(config)), ("dtype", "torch_dtype")
    types = (part.get(key) for part in parts for key in keys)
    if (dtype := next(filter(None, types), None)) in ("float16", "bfloat16"):
        model.set_dtype(getattr(mx, dtype))
