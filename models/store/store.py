"""The store: one directory per model under `paths.models_dir()`, each with its akunu.json.

Models are listed, found, checked and removed here; `install` adds them. A broken entry is listed as
damaged and never hides the others. Any directory that mlx-lm can load may be named by its path
instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.errors import Cancelled, DamagedModel, StoreError, UnknownModel
from akunu_py.files import read_json, write_atomically
from akunu_py.models import catalog
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import read_settings
from akunu_py.models.manifest import (
    Manifest,
    ModelFacts,
    read_manifest,
    record_files,
    sha256_file,
    write_manifest,
)
from akunu_py.models.store.disk import ModelBusy, check_space, lock_model, store_errors, sync
from akunu_py.models.store.hub_cache import parse_reference
from akunu_py.models.store.progress import ProgressCallback, no_callback
from akunu_py.text import did_you_mean

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
    if name in catalog.load_catalog():
        return UnknownModel(f"model {name!r} is not here yet; run `akunu models pull {name}`")
    try:
        here = [model.name for model in list_models()]
    except StoreError:
        here = []
    hint = did_you_mean(name, [*here, *catalog.load_catalog()])
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
"""Fills the second directory with the model's files, using the first for anything temporary."""


def installed(name: str) -> StoredModel | None:
    """The model `name` if it is in the store and passes `store.check`."""
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
    cancelled: Callable[[], bool] = lambda: False,
) -> StoredModel:
    """Builds the model `name` and makes it visible, replacing a damaged one of that name.

    need_bytes: free space that the work takes at its peak. keep: whether an intact model of that
    name is returned as it is; otherwise it is replaced too. cancelled: polled while another process
    is at work on the model.
    Raises StoreError, Cancelled, and whatever `build` raises.
    """
    if not is_name(name):
        raise UnknownModel(f"{name[:80]!r} cannot name a model")
    root = paths.models_dir()
    with store_errors(f"cannot install model {name!r} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(name, progress, cancelled):
            if (model := installed(name)) and keep(model):
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
def _locked(name: str, progress: ProgressCallback, cancelled: Callable[[], bool]) -> Iterator[None]:
    """Holds the model's lock; reports that it waits for another process."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_model(name, wait=False))
                break
            except ModelBusy:
                progress("waiting for another akunu", 0, 0)
                if cancelled():
                    raise Cancelled(f"cancelled; another akunu goes on with {name!r}") from None
                time.sleep(_POLL_S)
        yield


def _build(name: str, build: Builder, partial: Path, progress: ProgressCallback) -> None:
    work, model = partial / "work", partial / "model"
    partial.mkdir()  # not where somebody has put a link
    work.mkdir()
    model.mkdir()
    facts = build(work, model)
    shutil.rmtree(work)
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    found = {field.name: getattr(facts, field.name) for field in fields(facts)}
    found["files"] = record_files(model, lambda done: progress("record", done, size), facts.files)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_manifest(model, Manifest(name=name, created=created, **found))


def _publish(partial: Path, target: Path) -> None:
    """Renames the finished model into place; all its bytes are on disk before its name is."""
    model = partial / "model"
    for path in [*model.rglob("*"), model]:
        sync(path)
    if os.path.lexists(target):
        os.rename(target, partial / "replaced")
    os.rename(model, target)
    sync(target.parent)


def _remove_stale(name: str) -> None:
    """Removes what killed processes left behind. Only the holder of a model's lock makes its
    partial directories, so those of a lock that can be had belong to no living process."""
    for owner, leftover in partial_directories():
        if owner == name:
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with suppress(StoreError), lock_model(owner, wait=False):
                shutil.rmtree(leftover, ignore_errors=True)


USAGE = ".usage"
_LONGEST_USAGE = 10_000


@dataclass(frozen=True, slots=True)
class Usage:
    """What is recorded of a model. used: ISO 8601, UTC. weights: their format in words.

    In bytes: estimated_weights and measured_weights right after loading; estimated_peak and
    measured_peak over an answer, at `tokens` of context. 0 where nothing is known.
    """

    used: str = ""
    weights: str = ""
    estimated_weights: int = 0
    measured_weights: int = 0
    tokens: int = 0
    estimated_peak: int = 0
    measured_peak: int = 0


def read_usage(name: str) -> Usage:
    """What is known of the use of the model `name`."""
    with contextlib.suppress(OSError, ValueError):
        raw = read_json(_usage_path(name), _LONGEST_USAGE)
        if isinstance(raw, dict):
            known: dict[str, Any] = {
                field.name: raw.get(field.name)
                for field in fields(Usage)
                if type(raw.get(field.name)) is type(field.default)
            }
            return Usage(**known)
    return Usage()


def note_usage(name: str, **changes: Any) -> None:
    """Records `changes` of a Usage, and that the model is used now."""
    with contextlib.suppress(OSError):
        now = datetime.now(UTC).isoformat(timespec="seconds")
        usage = replace(read_usage(name), used=now, **changes)
        path = _usage_path(name)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(asdict(usage)).encode())


def forget_usage(name: str) -> None:
    """Removes what is recorded of the model `name`."""
    with contextlib.suppress(OSError):
        _usage_path(name).unlink()


def _usage_path(name: str) -> Path:
    return paths.models_dir() / USAGE / f"{name}.json"
