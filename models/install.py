"""Makes a model appear in the store all at once, or not at all.

A model is built in the temporary directory `.partial-NAME-PID` inside the store; a rename makes it
visible. Interrupts clean up; after a kill the next installation does. Of two processes that install
the same model the second waits, and finds the work done.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import Cancelled, DamagedModel, StoreError, UnknownModel
from akunu_py.models import store
from akunu_py.models.disk import ModelBusy, check_space, lock_model, store_errors
from akunu_py.models.manifest import Manifest, ModelFacts, record_files, write_manifest
from akunu_py.models.progress import ProgressCallback, no_callback

_POLL_S = 0.1

Builder = Callable[[Path, Path], ModelFacts]
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

    need_bytes: free space that the work takes at its peak. keep: whether an intact model of that
    name is returned as it is; otherwise it is replaced too. cancelled: polled while another process
    is at work on the model.
    Raises StoreError, Cancelled, and whatever `build` raises.
    """
    if not store.is_name(name):
        raise UnknownModel(f"{name[:80]!r} cannot name a model")
    root = paths.models_dir()
    with store_errors(f"cannot install model {name!r} in {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(name, progress, cancelled):
            if (model := installed(name)) and keep(model):
                return model
            _remove_stale(name)
            check_space(root, need_bytes)
            partial = store.partial_directory(name)
            try:
                _build(name, build, partial, progress)
                _publish(partial, root / name)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return store.get(name)


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


def _remove_stale(name: str) -> None:
    """Removes what killed processes left behind. Only the holder of a model's lock makes its
    partial directories, so those of a lock that can be had belong to no living process."""
    for owner, leftover in store.partial_directories():
        if owner == name:
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with suppress(StoreError), lock_model(owner, wait=False):
                shutil.rmtree(leftover, ignore_errors=True)
