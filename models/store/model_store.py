"""The store: one directory per model under `paths.models_dir()`, each with its akunu.json.

A broken entry is listed as damaged and never hides the others. `resolve` also accepts the path of
any directory that mlx-lm can load, and models that other programs downloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.errors import DamagedModel, StoreError, UnknownModel
from akunu_py.files import read_json, write_atomically
from akunu_py.models import catalog
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import context_length, read_settings
from akunu_py.models.manifest import (
    Manifest,
    ModelFacts,
    read_manifest,
    record_files,
    sha256_file,
    write_manifest,
)
from akunu_py.models.manifest import StoredModel as StoredModel
from akunu_py.models.store.directories import ModelBusy, check_space, lock_model, store_errors, sync
from akunu_py.models.store.external_models import find_models
from akunu_py.models.store.hub_cache import parse_reference
from akunu_py.models.store.progress import ProgressCallback, no_callback
from akunu_py.text import did_you_mean

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,95}")
_PARTIAL = ".partial-"


def list_models() -> list[StoredModel]:
    """Return all models of the store by name, including damaged ones. Raises StoreError."""
    root = paths.models_dir()
    with store_errors(f"cannot read {root}"):
        if not root.exists():
            return []
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return [_read_model(name, root / name) for name in names if not name.startswith(".")]


def all_models() -> list[StoredModel]:
    """Return the models of the store, then those of other programs. Raises StoreError."""
    stored = list_models()
    return [*stored, *external_models(stored)]


def external_models(stored: Sequence[StoredModel]) -> list[StoredModel]:
    """Return the models of other programs that are not among those of the store, by name."""
    repositories = {model.repository for model in stored}
    return [model for model in find_models() if model.name not in repositories]


def get(name: str) -> StoredModel:
    """Return the model called `name`. Raises UnknownModel, or DamagedModel for a bad manifest."""
    path = _model_path(name)
    if not path.is_dir():
        raise _unknown_error(name)
    model = _read_model(name, path)
    if model.damaged:
        raise _damaged_error(model, model.damaged)
    return model


def resolve(name_or_path: str) -> StoredModel:
    """Return a model by its name, its hub repository (`owner/repo`) or its path.

    A text with a path separator, or with a leading `.` or `~`, is a path if that exists. A path
    must lead to a directory with config.json. Raises UnknownModel or DamagedModel.
    """
    path = Path(name_or_path).expanduser()
    looks_like_path = os.sep in name_or_path or name_or_path.startswith((".", "~"))
    if not looks_like_path:
        in_store = is_name(name_or_path) and _model_path(name_or_path).is_dir()
        if in_store or not (path / "config.json").is_file():
            return get(name_or_path)
    if path.resolve().parent == paths.models_dir().resolve() and is_name(path.resolve().name):
        return get(path.resolve().name)
    if not path.exists() and (reference := parse_reference(name_or_path)):
        return _find_by_repository(*reference)
    if path.is_file():
        raise UnknownModel(f"expected a directory with config.json, found the file {path}")
    if not (path / "config.json").is_file():
        found = "no config.json there" if path.is_dir() else "nothing there"
        raise UnknownModel(f"expected a model directory at {path}, found {found}; {_HINT}")
    context = context_length(read_settings(path / "config.json"))
    return StoredModel(path.resolve().name, path, _size(path), context, source=f"folder {path}")


def remove(name: str) -> int:
    """Remove a model, damaged or not. Returns the bytes freed.

    Files in the hub's cache stay, because other programs share them (see `hub_cache.delete`).
    Raises UnknownModel, or StoreError if the disk refuses or another process is changing the model.
    """
    path = _model_path(name)
    if not path.is_dir() and not path.is_symlink():
        raise _unknown_error(name)
    with store_errors(f"cannot remove {path}"), lock_model(name):
        if path.is_symlink():
            path.unlink()
            return 0
        freed = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
        # One rename hides it at once. After an interrupt, the next pull removes the rest.
        removed = partial_directory(name)
        path.rename(removed)
        shutil.rmtree(removed)
        forget_usage(name)
    return freed


def check(model: StoredModel) -> None:
    """Check that the model's files exist in the right size. Raises DamagedModel with the repair."""
    if problem := _find_problem(model):
        raise _damaged_error(model, problem)


def verify(
    model: StoredModel, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Read all files again and compare their hashes. Raises DamagedModel.

    progress: called with the bytes done and in total. A directory outside the store has no hashes,
    so it only passes `check`.
    """
    check(model)
    done = 0
    for name, record in model.manifest.files.items() if model.manifest else ():

        def report(read: int, base: int = done) -> None:
            progress(base + read, model.size)

        try:
            digest = sha256_file(model.path / name, report)
        except OSError as error:
            raise _damaged_error(model, f"{name} is unreadable ({error.strerror})") from error
        if digest != record.sha256:
            raise _damaged_error(model, f"{name} was altered")
        done += record.size


def is_name(name: str) -> bool:
    """Return True if `name` is a valid model name."""
    return _NAME.fullmatch(name) is not None


def partial_directory(name: str) -> Path:
    """Return the directory where this process creates or removes the model `name`."""
    return paths.models_dir() / f"{_PARTIAL}{name}-{os.getpid()}"


def partial_directories() -> Iterator[tuple[str, Path]]:
    """Yield the model name and path of the partial directories of all processes."""
    for path in sorted(paths.models_dir().glob(f"{_PARTIAL}*")):
        name = path.name.removeprefix(_PARTIAL).rpartition("-")[0]
        if is_name(name):
            yield name, path


_HINT = "run `akunu models list` to see the installed models"


def _model_path(name: str) -> Path:
    if not is_name(name):
        raise UnknownModel(
            f"invalid model name {name[:80]!r} (use letters, digits, '.', '_', '+', '-'); {_HINT}"
        )
    return paths.models_dir() / name


def _find_by_repository(repository: str, revision: str | None) -> StoredModel:
    """Return the model from `repository`, at `revision` unless that is None; the store's first."""
    stored = list_models()
    for model in stored:
        if model.repository == repository and revision in (None, model.commit):
            return model
    for model in external_models(stored):
        if model.name == repository and revision in (None, model.commit):
            return model
    reference = repository + (f"@{revision}" if revision else "")
    raise UnknownModel(
        f"no directory {repository}, and no model from that hub repository is on this machine; run "
        f"`akunu models pull {reference}`, or `akunu models list` to see the installed models"
    )


def _unknown_error(name: str) -> UnknownModel:
    if name in catalog.load_catalog():
        return UnknownModel(f"model {name!r} is not installed; run `akunu models pull {name}`")
    try:
        installed_names = [model.name for model in list_models()]
    except StoreError:
        installed_names = []
    hint = did_you_mean(name, [*installed_names, *catalog.load_catalog()])
    if not installed_names:
        return UnknownModel(
            f"no model called {name!r}{hint}, the store is empty; run `akunu models pull starter`"
        )
    shown = ", ".join(installed_names[:8]) + (", ..." if len(installed_names) > 8 else "")
    return UnknownModel(
        f"no model called {name!r}{hint}; installed: {shown}; run `akunu models list`, or "
        "`akunu models pull starter` for the starter"
    )


def _read_model(name: str, path: Path) -> StoredModel:
    try:
        if not is_name(name):
            raise DamagedModel(f"invalid model name {name[:80]!r}")
        manifest = read_manifest(path)
    except DamagedModel as error:
        return StoredModel(name, path, size=_size(path), damaged=str(error))
    names = {each.name for each in fields(StoredModel)} - {"name"}
    facts = {key: getattr(manifest, key) for key in names if hasattr(manifest, key)}
    return StoredModel(name, path, manifest=manifest, **facts)


def _size(path: Path) -> int:
    try:
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    except OSError:
        return 0


def _find_problem(model: StoredModel) -> str:
    """Return why a model cannot be used, judging by its file sizes; "" if it can."""
    if model.damaged:
        return model.damaged
    try:
        if model.manifest is None:
            files = sorted(model.path.glob("model*.safetensors"))
            if not files:
                return f"{model.path} contains no model*.safetensors"
            for file in files:
                safetensors.read_header(file)
            return ""
        for name, record in model.manifest.files.items():
            size = (model.path / name).stat().st_size
            if size != record.size:
                return f"{name}: expected {record.size} bytes, found {size}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except DamagedModel as error:
        return str(error)
    return ""


def _damaged_error(model: StoredModel, problem: str) -> DamagedModel:
    return DamagedModel(f"model {model.name!r} is damaged: {problem}; {_repair_advice(model)}")


def _repair_advice(model: StoredModel) -> str:
    """Return how to repair a damaged model."""
    if model.manifest is None and model.path.parent != paths.models_dir():
        return "download that file again"
    remove = f"akunu models rm {model.name}"
    if model.name in catalog.load_catalog():
        return f"run `{remove} && akunu models pull {model.name}`"
    if model.repository:
        default = model.repository.endswith(f"/{model.name}")
        name = "" if default else f" --name {model.name}"
        return f"run `akunu models pull {model.repository}{name}`"
    kind, _, origin = model.source.partition(" ")
    if kind in ("file", "folder"):  # as imports record it
        return f"run `{remove} && akunu models import {shlex.quote(origin)} --name {model.name}`"
    return f"run `{remove}`, then pull or import it again"


_POLL_S = 0.1
Builder = Callable[[Path, Path], ModelFacts]
"""Writes the model's files to the second directory, and temporary files to the first."""


def find_intact(name: str) -> StoredModel | None:
    """Return the model `name` if it is in the store and passes `check`."""
    try:
        model = get(name)
        check(model)
    except (UnknownModel, DamagedModel):
        return None
    return model


def install(
    name: str,
    build: Builder,
    need_bytes: int,
    progress: ProgressCallback = no_callback,
    keep: Callable[[StoredModel], bool] = lambda model: True,
) -> StoredModel:
    """Build the model `name` and make it visible, replacing a damaged one of that name.

    need_bytes: free space needed at the peak. keep: return an intact model of that name as it is,
    instead of replacing it. Raises StoreError, and the exceptions of `build` and `progress`.
    """
    if not is_name(name):
        raise UnknownModel(f"invalid model name {name[:80]!r}")
    root = paths.models_dir()
    with store_errors(f"cannot install model {name!r} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with _lock(name, progress):
            if (model := find_intact(name)) and keep(model):
                return model
            _remove_stale(name)
            check_space(root, need_bytes)
            partial = partial_directory(name)
            try:
                _build(name, build, partial, progress)
                _publish(partial, root / name)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return get(name)


@contextmanager
def _lock(name: str, progress: ProgressCallback) -> Iterator[None]:
    """Hold the model's lock; report the wait for another process."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_model(name))
                break
            except ModelBusy:
                progress("waiting for another akunu", 0, 0)
                time.sleep(_POLL_S)
        yield


def _build(name: str, build: Builder, partial: Path, progress: ProgressCallback) -> None:
    work, model = partial / "work", partial / "model"
    partial.mkdir()  # fails if the path exists, for example as a link
    work.mkdir()
    model.mkdir()
    facts = build(work, model)
    shutil.rmtree(work)
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    values["files"] = record_files(model, lambda done: progress("record", done, size), facts.files)
    write_manifest(model, Manifest(name=name, created=_now(), **values))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _publish(partial: Path, target: Path) -> None:
    """Rename the finished model into place, after all its bytes are on disk."""
    model = partial / "model"
    for path in [*model.rglob("*"), model]:
        sync(path)
    if os.path.lexists(target):
        os.rename(target, partial / "replaced")
    os.rename(model, target)
    sync(target.parent)


def _remove_stale(name: str) -> None:
    """Remove the partial directories of killed processes.

    Only the holder of a model's lock creates them, so a free lock means that no process uses them.
    """
    for owner, leftover in partial_directories():
        if owner == name:
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with suppress(StoreError), lock_model(owner):
                shutil.rmtree(leftover, ignore_errors=True)


USAGE = ".usage"
_MAX_USAGE_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Usage:
    """A model's last use and its memory in bytes. Unknown numbers are 0."""

    used: str = ""  # ISO 8601, UTC
    weights: str = ""  # their format, for display
    estimated_weights: int = 0  # right after loading
    measured_weights: int = 0
    tokens: int = 0  # of context, at the peaks
    estimated_peak: int = 0  # while answering
    measured_peak: int = 0


def read_usage(name: str) -> Usage:
    """Return the recorded usage of the model `name`."""
    with contextlib.suppress(OSError, ValueError):
        raw = read_json(_usage_path(name), _MAX_USAGE_BYTES)
        if isinstance(raw, dict):
            valid: dict[str, Any] = {
                field.name: raw.get(field.name)
                for field in fields(Usage)
                if type(raw.get(field.name)) is type(field.default)
            }
            return Usage(**valid)
    return Usage()


def note_usage(name: str, **changes: Any) -> None:
    """Record `changes` of the model's Usage, and the current time as its last use."""
    with contextlib.suppress(OSError):
        usage = replace(read_usage(name), used=_now(), **changes)
        path = _usage_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(usage)).encode())


def forget_usage(name: str) -> None:
    """Remove the recorded usage of the model `name`."""
    with contextlib.suppress(OSError):
        _usage_path(name).unlink()


def _usage_path(name: str) -> Path:
    return paths.models_dir() / USAGE / f"{name}.json"
