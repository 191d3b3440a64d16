"""The store: one directory per model under `paths.models_dir()`, each with its akunu.json.

Models are listed, found, checked and removed here; `install` adds them. A broken entry is listed as
damaged and never hides the others. Any directory that mlx-lm can load may be named by its path
instead.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.errors import DamagedModel, StoreError, UnknownModel
from akunu_py.models import catalogue, safetensors
from akunu_py.models.disk import lock_model, store_errors
from akunu_py.models.hub.api import parse_reference
from akunu_py.models.manifest import Manifest, read_manifest, sha256_file
from akunu_py.models.model_files import read_settings
from akunu_py.models.usage import forget_usage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,95}")
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk. `size` in bytes, `context_length` in tokens, 0 where it is not known.

    manifest: None for a directory outside the store. damaged: what is wrong, empty where nothing is
    known to be (`check` and `verify` look at the files themselves). repository, commit: where on
    the hub it is from; its files are in the hub's cache then, and `path` holds links to them.
    """

    name: str
    path: Path
    size: int = 0
    context_length: int = 0
    source: str = ""
    quantization: str = ""
    created: str = ""
    licence: str = ""
    damaged: str = ""
    repository: str = ""
    commit: str = ""
    manifest: Manifest | None = None


def list_models() -> list[StoredModel]:
    """All models of the store by name, damaged ones included. Raises StoreError."""
    root = paths.models_dir()
    with store_errors(f"cannot read {root}"):
        if not root.exists():
            return []
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return [_describe(name, root / name) for name in names if not name.startswith(".")]


def get(name: str) -> StoredModel:
    """The model of the store called `name`.

    Raises UnknownModel where there is none, DamagedModel where its manifest is unusable.
    """
    path = _path(name)
    if not path.is_dir():
        raise _unknown(name)
    model = _describe(name, path)
    if model.damaged:
        raise _damaged(model, model.damaged)
    return model


def resolve(name_or_path: str) -> StoredModel:
    """A model by its name in the store, by its repository on the hub (`owner/repo`) if it is in
    the store, or by the path of a directory that holds config.json.

    What contains a path separator or begins with `.` or `~` is a path where it leads to something.
    Raises UnknownModel or DamagedModel.
    """
    path = Path(name_or_path).expanduser()
    looks_like_path = os.sep in name_or_path or name_or_path.startswith((".", "~"))
    if not looks_like_path:
        in_store = is_name(name_or_path) and _path(name_or_path).is_dir()
        if in_store or not (path / "config.json").is_file():
            return get(name_or_path)
    if path.resolve().parent == paths.models_dir().resolve() and is_name(path.resolve().name):
        return get(path.resolve().name)
    if not path.exists() and (reference := parse_reference(name_or_path)):
        return _from_repository(*reference)
    if path.is_file():
        raise UnknownModel(f"expected a directory with config.json, found the file {path}")
    if not (path / "config.json").is_file():
        found = "no config.json there" if path.is_dir() else "nothing there"
        raise UnknownModel(f"expected a model directory at {path}, found {found}; {_HINT}")
    return _describe_directory(path)


def remove(name: str) -> int:
    """Removes a model, damaged or not. Returns the bytes that this freed.

    Files in the hub's cache stay: they are not the store's alone (see `hub.cache.delete`).
    Raises UnknownModel, or StoreError where the disk refuses or another process is at work on it.
    """
    path = _path(name)
    if not path.is_dir() and not path.is_symlink():
        raise _unknown(name)
    with store_errors(f"cannot remove {path}"), lock_model(name, wait=False):
        if path.is_symlink():
            path.unlink()
            return 0
        freed = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
        # One rename hides it at once; what an interrupt leaves behind is removed by the next pull.
        removed = partial_directory(name)
        path.rename(removed)
        shutil.rmtree(removed)
        forget_usage(name)
    return freed


def check(model: StoredModel) -> None:
    """A cheap look at the files before each load: are they there, of the right size, whole?

    Raises DamagedModel, which names the file and the repair.
    """
    if problem := _problem(model):
        raise _damaged(model, problem)


def verify(
    model: StoredModel, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Reads all files again and compares their hashes.

    progress: called with the bytes done and in all. Raises DamagedModel. A directory outside the
    store has no hashes: only `check` applies to it.
    """
    check(model)
    done = 0
    for name, record in model.manifest.files.items() if model.manifest else ():

        def report(read: int, base: int = done) -> None:
            progress(base + read, model.size)

        try:
            digest = sha256_file(model.path / name, report)
        except OSError as error:
            raise _damaged(model, f"{name} is unreadable ({error.strerror})") from error
        if digest != record.sha256:
            raise _damaged(model, f"{name} was altered")
        done += record.size


def is_name(name: str) -> bool:
    """Whether `name` can name a model of the store."""
    return _NAME.fullmatch(name) is not None


def partial_directory(name: str) -> Path:
    """Where this process makes or removes the model `name`."""
    return paths.models_dir() / f"{_PARTIAL}{name}-{os.getpid()}"


def partial_directories() -> Iterator[tuple[str, Path]]:
    """The partial directories of all processes, each behind the name of its model."""
    for path in sorted(paths.models_dir().glob(f"{_PARTIAL}*")):
        name = path.name.removeprefix(_PARTIAL).rpartition("-")[0]
        if is_name(name):
            yield name, path


_HINT = "run `akunu models list` to see what is here"


def _path(name: str) -> Path:
    if not is_name(name):
        raise UnknownModel(
            f"{name[:80]!r} cannot name a model (letters, digits, '.', '_', '+', '-'); {_HINT}"
        )
    return paths.models_dir() / name


def _from_repository(repository: str, revision: str | None) -> StoredModel:
    """The model of the store that is from `repository`, at `revision` where that is named."""
    for model in list_models():
        if model.repository == repository and revision in (None, model.commit):
            return model
    reference = repository + (f"@{revision}" if revision else "")
    raise UnknownModel(
        f"nothing at {repository}, and no model from that repository of the hub is here; run "
        f"`akunu models pull {reference}`, or `akunu models list` to see what is here"
    )


def _unknown(name: str) -> UnknownModel:
    if name in catalogue.load_catalogue():
        return UnknownModel(f"model {name!r} is not here yet; run `akunu models pull {name}`")
    try:
        here = [model.name for model in list_models()]
    except StoreError:
        here = []
    hint = catalogue.did_you_mean(name, [*here, *catalogue.load_catalogue()])
    if not here:
        return UnknownModel(
            f"no model called {name!r}{hint}, the store is empty; run `akunu models pull starter`"
        )
    shown = ", ".join(here[:8]) + (", ..." if len(here) > 8 else "")
    return UnknownModel(
        f"no model called {name!r}{hint}; here: {shown}; run `akunu models list`, or "
        "`akunu models pull starter` for the starter"
    )


def _describe(name: str, path: Path) -> StoredModel:
    try:
        if not is_name(name):
            raise DamagedModel("its name is none that akunu gives")
        manifest = read_manifest(path)
    except DamagedModel as error:
        return StoredModel(name, path, size=_size(path), damaged=str(error))
    return StoredModel(
        name=name,
        path=path,
        size=manifest.size,
        context_length=manifest.context_length,
        source=manifest.source,
        quantization=manifest.quantization,
        created=manifest.created,
        licence=manifest.licence,
        repository=manifest.repository,
        commit=manifest.commit,
        manifest=manifest,
    )


def _describe_directory(path: Path) -> StoredModel:
    """A directory outside the store, from what its config.json says."""
    name = path.resolve().name
    config = read_settings(path / "config.json")
    context = _context(config) or _context(config.get("text_config"))
    return StoredModel(name, path, _size(path), context, source=f"folder {path}")


def _context(config: Any) -> int:
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return value if isinstance(value, int) and value > 0 else 0


def _size(path: Path) -> int:
    try:
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    except OSError:
        return 0


def _problem(model: StoredModel) -> str:
    if model.damaged:
        return model.damaged
    try:
        if model.manifest is None:
            files = sorted(model.path.glob("model*.safetensors"))
            if not files:
                return f"{model.path} holds no model*.safetensors"
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


def _damaged(model: StoredModel, problem: str) -> DamagedModel:
    return DamagedModel(f"model {model.name!r} is damaged: {problem}; {_advice(model)}")


def _advice(model: StoredModel) -> str:
    """How to have a damaged model whole again."""
    if model.manifest is None and model.path.parent != paths.models_dir():
        return "fetch that file again"
    remove = f"akunu models rm {model.name}"
    if model.name in catalogue.load_catalogue():
        return f"run `{remove} && akunu models pull {model.name}`"
    if model.repository:
        default = model.repository.endswith(f"/{model.name}")
        name = "" if default else f" --name {model.name}"
        return f"run `akunu models pull {model.repository}{name}`"
    kind, _, origin = model.source.partition(" ")
    if kind in ("file", "folder"):  # as imports record it
        return f"run `{remove} && akunu models import {shlex.quote(origin)} --name {model.name}`"
    return f"run `{remove}`, then pull or import it again"
