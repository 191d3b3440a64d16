"""Brings a model that lies on this machine into the store: a folder or a GGUF file.

Owns the choice between the two, the name, and quantising on the way. Everything is checked before
anything is written; `install` makes the model visible once it is complete. Refuses names that are
taken (UsageError).
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.errors import UnknownModel, UnsupportedModel, UsageError
from akunu_py.models import store
from akunu_py.models.install import Facts, install
from akunu_py.models.mlx_directory import plan_folder
from akunu_py.models.progress import Report, no_report

GROUP_SIZE = 64  # mlx-lm's own choice
_BLOCK = 1 << 22


def import_model(
    source: Path,
    *,
    name: str | None = None,
    bits: int | None = None,
    progress: Report = no_report,
) -> store.StoredModel:
    """Imports the folder or GGUF file `source` under `name` (None: after the file).

    bits: quantise plain weights to so many. progress: hears a phase ("import", "copy", "quantise",
    "record"), the bytes done and in all.
    Raises UnknownModel where there is nothing, UsageError for a name that is taken or weights that
    are quantised already, UnsupportedModel and DamagedModel for what cannot be imported, and
    StoreError.
    """
    source = source.expanduser()
    if not source.exists():
        raise UnknownModel(f"expected a folder or a GGUF file at {source}, found nothing there")
    name = _free_name(source, name)
    make, need = (_from_folder if source.is_dir() else _from_gguf)(source, bits, progress)
    built = False

    def build(work: Path, folder: Path) -> Facts:
        nonlocal built
        built = True
        return make(work, folder)

    model = install(name, build, need, progress)
    if not built:  # another process took the name while we were checking
        raise _taken(name)
    return model


_Maker = Callable[[Path, Path], Facts]


def _free_name(source: Path, name: str | None) -> str:
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


def _from_folder(source: Path, bits: int | None, progress: Report) -> tuple[_Maker, int]:
    plan = plan_folder(source)
    if bits and plan.bits:
        raise UsageError(f"{source} is quantised already ({plan.quantisation}); omit --quantize")

    def make(work: Path, folder: Path) -> Facts:
        if bits:
            _copy([path for path in plan.copies if not _is_weights(path)], folder, progress)
            plan.write_settings(folder)
            _quantise(source, folder, bits, progress)
        else:
            _copy(plan.copies, folder, progress)
            plan.write_settings(folder)
        return Facts(
            source=f"folder {source.resolve()}",
            context_length=plan.context_length,
            parameters=plan.parameters,
            quantisation=_described(bits) if bits else plan.quantisation,
            licence=plan.licence,
        )

    return make, _quantised_bytes(plan.parameters, bits) if bits else plan.nbytes


def _from_gguf(source: Path, bits: int | None, progress: Report) -> tuple[_Maker, int]:
    from akunu_py.models.gguf.convert import plan_import

    if source.suffix.lower() != ".gguf":
        raise UnsupportedModel(
            f"{source.name} is not GGUF; akunu imports .gguf files and folders of safetensors "
            "with their config.json"
        )
    plan = plan_import(source)
    if bits and "quantization" in plan.config:
        raise UsageError(
            f"{source.name} is quantised already ({plan.facts.quantisation}); omit --quantize"
        )

    def make(work: Path, folder: Path) -> Facts:
        target = work if bits else folder
        plan.write(target, lambda done, total: progress("import", done, total))
        if bits:
            plain = [path for path in work.iterdir() if path.is_file() and not _is_weights(path)]
            _copy(plain, folder, progress)
            _quantise(work, folder, bits, progress)
        return Facts(
            source=f"file {source.resolve()}",
            context_length=plan.facts.context_length,
            parameters=plan.facts.parameters,
            quantisation=_described(bits) if bits else plan.facts.quantisation,
            licence=plan.facts.licence,
        )

    extra = _quantised_bytes(plan.facts.parameters, bits) if bits else 0
    return make, plan.nbytes + extra


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _described(bits: int) -> str:
    return f"{bits}-bit, groups of {GROUP_SIZE}"


def _quantised_bytes(parameters: int, bits: int) -> int:
    """A little more than `parameters` weights take with their scales and biases."""
    return int(parameters * (bits + 32 / GROUP_SIZE) / 8 * 1.1) + 1_000_000


def _copy(files: list[Path], folder: Path, progress: Report) -> None:
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        with path.open("rb") as source, (folder / path.name).open("xb") as target:
            while block := source.read(_BLOCK):
                target.write(block)
                done += len(block)
                progress("copy", done, total)


def _quantise(source: Path, folder: Path, bits: int, progress: Report) -> None:
    """Quantises the model in `source` with mlx-lm into `folder`, shard by shard."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    progress("quantise", 0, 0)
    model, config = load_model(source, lazy=True)
    _set_dtype(model, config)
    with contextlib.redirect_stdout(io.StringIO()):  # it says how many bits came out
        model, config = quantize_model(model, config, GROUP_SIZE, bits)
    if not any(hasattr(module, "bits") for _, module in model.named_modules()):
        raise UnsupportedModel(
            f"{source}: no matrix has rows of a multiple of {GROUP_SIZE} weights; import it "
            "without --quantize"
        )
    config.pop("auto_map", None)
    save_model(folder, model, donate_model=True)
    save_config(config, folder / "config.json")


def _set_dtype(model: Any, config: dict[str, Any]) -> None:
    """Casts to the type that the model is meant to run in, as mlx-lm's own conversion does."""
    import mlx.core as mx

    inner = config.get("text_config")
    wanted = config.get("dtype") or config.get("torch_dtype")
    if wanted is None and isinstance(inner, dict):
        wanted = inner.get("dtype") or inner.get("torch_dtype")
    if wanted in ("float16", "bfloat16"):
        model.set_dtype(getattr(mx, wanted))
