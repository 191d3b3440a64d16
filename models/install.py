"""Makes a model appear in the store all at once, or not at all.

Owns the temporary directory `.partial-NAME-PID` inside the store, the rename that makes a model
visible, and the removal of what dead processes left behind. Interrupts clean up; after a kill the
next installation does. Two processes that install the same model take turns, and the second finds
the work done. Refuses to begin without enough space (StoreError).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import Cancelled, DamagedModel, StoreError, UnknownModel
from akunu_py.models import store
from akunu_py.models.locking import lock_model, store_errors
from akunu_py.models.manifest import FileRecord, Manifest, record_files, write_manifest
from akunu_py.models.progress import ProgressCallback, no_callback

_PARTIAL = ".partial-"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Facts:
    """What a builder found out about the model, for its manifest. files: those it has read."""

    source: str
    context_length: int
    parameters: int
    quantization: str
    licence: str
    repository: str = ""
    commit: str = ""
    files: dict[str, FileRecord] = field(default_factory=dict)


Builder = Callable[[Path, Path], Facts]
"""Fills the second directory with the model's files, using the first for anything temporary."""


def installed(name: str) -> store.StoredModel | None:
    """The model `name` if it is in the store and passes `store.check`."""
    try:
        model = store.get(name)
        store.check(model)
    except (UnknownModel, DamagedModel):
        return None
    return model


def install(
    name: str,
    build: Builder,
    need_bytes: int,
    progress: ProgressCallback = no_callback,
    keep: Callable[[store.StoredModel], bool] = lambda model: True,
    cancelled: Callable[[], bool] = lambda: False,
) -> store.StoredModel:
    """Builds the model `name` and makes it visible, replacing a damaged one of that name.

    need_bytes: free space that the work takes at its peak. keep: whether a model of that name
    which is there and healthy is returned as it is; otherwise it is replaced too. cancelled: asked
    while another process is at work on the model.
    Raises StoreError, Cancelled, and whatever `build` raises.
    """
    if not store.is_name(name):
        raise UnknownModel(f"{name[:80]!r} cannot name a model")
    root = paths.models_dir()
    with store_errors(f"cannot install model {name!r} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with _turn(name, progress, cancelled):
            if (model := installed(name)) and keep(model):
                return model
            _sweep(name)
            _check_space(root, need_bytes)
            partial = root / f"{_PARTIAL}{name}-{os.getpid()}"
            try:
                _build(name, build, partial, progress)
                _publish(partial, root / name)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return store.get(name)


@contextmanager
def _turn(name: str, progress: ProgressCallback, cancelled: Callable[[], bool]) -> Iterator[None]:
    """Holds the model's lock; says so while it has to wait for another process."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_model(name, wait=False))
                break
            except StoreError:
                progress("waiting for another akunu", 0, 0)
                if cancelled():
                    raise Cancelled(f"cancelled; another akunu goes on with {name!r}") from None
                time.sleep(_POLL_S)
        yield


def _build(name: str, build: Builder, partial: Path, progress: ProgressCallback) -> None:
    work, model = partial / "work", partial / "model"
    work.mkdir(parents=True)
    model.mkdir()
    facts = build(work, model)
    shutil.rmtree(work)
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    manifest = Manifest(
        name=name,
        source=facts.source,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        context_length=facts.context_length,
        parameters=facts.parameters,
        quantization=facts.quantization,
        licence=facts.licence,
        files=record_files(model, lambda done: progress("record", done, size), facts.files),
        repository=facts.repository,
        commit=facts.commit,
    )
    write_manifest(model, manifest)


def _publish(partial: Path, target: Path) -> None:
    """Renames the finished model into place; all its bytes are on disk before its name is."""
    model = partial / "model"
    for path in [*model.rglob("*"), model]:
        _sync(path)
    if os.path.lexists(target):
        os.rename(target, partial / "replaced")
    os.rename(model, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(root: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < need_bytes:
        raise StoreError(
            f"not enough space in {root}: expected {_mb(need_bytes)} free, found {_mb(free)}; "
            "free some, or set XDG_DATA_HOME to a directory on another disk"
        )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _sweep(name: str) -> None:
    """Removes what earlier processes left behind. Only the holder of a model's lock makes its
    partial directories, so those of a lock that can be had belong to the dead."""
    for leftover in paths.models_dir().glob(f"{_PARTIAL}*"):
        owner = leftover.name.removeprefix(_PARTIAL).rpartition("-")[0]
        if owner == name:
            shutil.rmtree(leftover, ignore_errors=True)
        elif store.is_name(owner):
            with suppress(StoreError), lock_model(owner, wait=False):
                shutil.rmtree(leftover, ignore_errors=True)
