"""Makes a model appear in the store all at once, or not at all.

Owns the temporary folder `.partial-NAME-PID` inside the store, the rename that makes a model
visible, and the removal of what dead processes left behind. Interrupts clean up; after a kill the
next installation does. Two processes that install the same model take turns, and the second finds
the work done. Refuses to begin without enough space (StoreError).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import DamagedModel, StoreError, UnknownModel
from akunu_py.models import store
from akunu_py.models.locking import lock_model, store_errors
from akunu_py.models.manifest import Manifest, record_files, write_manifest

Progress = Callable[[str, int, int], None]
"""Hears a phase's name, the bytes done and the bytes in all (0 where that is not known)."""

_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a builder found out about the model, for its manifest."""

    source: str
    context_length: int
    parameters: int
    quantisation: str
    licence: str


Builder = Callable[[Path, Path], Facts]
"""Fills the second folder with the model's files, using the first for anything temporary."""


def no_progress(phase: str, done_bytes: int, total_bytes: int) -> None:
    """A Progress that shows nothing."""


def installed(name: str) -> store.StoredModel | None:
    """The model `name` if it is in the store and passes `store.check`."""
    try:
        model = store.get(name)
        store.check(model)
    except (UnknownModel, DamagedModel):
        return None
    return model


def install(
    name: str, build: Builder, need_bytes: int, progress: Progress = no_progress
) -> store.StoredModel:
    """Builds the model `name` and makes it visible, replacing a damaged one of that name.

    need_bytes: free space that the work takes at its peak. A model that is there and healthy is
    returned as it is. Raises StoreError, and whatever `build` raises.
    """
    if not store.is_name(name):
        raise UnknownModel(f"{name[:80]!r} cannot name a model")
    root = paths.models_dir()
    with store_errors(f"cannot install model {name!r} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with _Turn(name, progress):
            if model := installed(name):
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


class _Turn:
    """Holds the model's lock; says so when it has to wait for another process."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress = name, progress

    def __enter__(self) -> None:
        try:
            self.lock = lock_model(self.name, wait=False)
            self.lock.__enter__()
        except StoreError:
            self.progress("waiting for another akunu", 0, 0)
            self.lock = lock_model(self.name)
            self.lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self.lock.__exit__(None, None, None)


def _build(name: str, build: Builder, partial: Path, progress: Progress) -> None:
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
        quantisation=facts.quantisation,
        licence=facts.licence,
        files=record_files(model, lambda done: progress("record", done, size)),
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
            "free some, or set XDG_DATA_HOME to a folder on another disk"
        )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _sweep(name: str) -> None:
    """Removes what earlier processes left behind. Only the holder of a model's lock makes its
    partial folders, so those of a lock that can be had belong to the dead."""
    for leftover in paths.models_dir().glob(f"{_PARTIAL}*"):
        owner = leftover.name.removeprefix(_PARTIAL).rpartition("-")[0]
        if owner == name:
            shutil.rmtree(leftover, ignore_errors=True)
        elif store.is_name(owner):
            with suppress(StoreError), lock_model(owner, wait=False):
                shutil.rmtree(leftover, ignore_errors=True)
