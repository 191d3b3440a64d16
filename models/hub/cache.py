"""The hub's own cache on this machine: its layout, what is in it, verifying and deleting.

`blobs/<digest>` holds the files, the names under `snapshots/<commit>/` link to them, and
`refs/<branch>` holds the commit of a branch. Every program that uses huggingface-hub shares it, so
nothing is deleted but by name, and a file counts only when size and hash are right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from akunu_py.errors import FetchError
from akunu_py.files import open_regular, read_bounded
from akunu_py.models.disk import open_own, store_errors
from akunu_py.models.hub.api import HubFile, HubModel, choose_files, is_commit, is_valid_file
from akunu_py.models.hub.request import Retries
from akunu_py.models.manifest import FileRecord
from akunu_py.models.progress import ProgressCallback

_LONGEST_REF = 1000  # bytes


class CachedRepository:
    """One repository in the hub's cache."""

    def __init__(self, repository: str) -> None:
        from huggingface_hub import constants

        self.repository = repository
        self.root = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
        self._locks = Path(constants.HF_HUB_CACHE) / ".locks" / self.root.name

    def blob_path(self, file: HubFile) -> Path:
        return self.root / "blobs" / file.digest

    def partial_path(self, file: HubFile) -> Path:
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def snapshot_path(self, commit: str, name: str) -> Path:
        """The link to the file under its own name."""
        return self.root / "snapshots" / commit / name

    def has(self, model: HubModel, file: HubFile) -> bool:
        """Whether the file is in the cache, of the right size."""
        for path in (self.snapshot_path(model.commit, file.name), self.blob_path(file)):
            with contextlib.suppress(OSError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode) and found.st_size == file.size:
                    return True
        return False

    def fetched_bytes(self, model: HubModel, file: HubFile) -> int:
        """Bytes of it that are here, whole or in part."""
        if self.has(model, file):
            return file.size
        with contextlib.suppress(OSError):
            return min(self.partial_path(file).stat().st_size, file.size)
        return 0

    def commit_of(self, revision: str) -> str | None:
        """The commit that `revision` was when it was last fetched, where its files are here."""
        commit = revision
        with contextlib.suppress(OSError, ValueError):
            commit = read_bounded(self.root / "refs" / revision, _LONGEST_REF).decode().strip()
        return commit if is_commit(commit) and (self.root / "snapshots" / commit).is_dir() else None

    def write_ref(self, model: HubModel) -> None:
        """Records which commit the branch is at, as the library does."""
        if model.revision != model.commit:
            reference = self.root / "refs" / model.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            with open_own(reference) as file:
                file.truncate()
                file.write(model.commit.encode())

    def link(self, model: HubModel, file: HubFile) -> None:
        """Gives the file, which is here, its own name."""
        link, blob = self.snapshot_path(model.commit, file.name), self.blob_path(file)
        with contextlib.suppress(OSError):
            if link.stat().st_size == file.size:
                return
        link.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # another process made the same one
            os.symlink(os.path.relpath(blob, link.parent), link)

    @contextlib.contextmanager
    def locked(self, file: HubFile, retries: Retries, progress: ProgressCallback) -> Iterator[None]:
        """Holds the library's lock of the file, which other programs respect too."""
        from filelock import Timeout
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        self._locks.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            while True:
                retries.raise_if_cancelled()
                try:
                    lock = WeakFileLock(self._locks / f"{file.digest}.lock", timeout=0.5)
                    stack.enter_context(lock)
                    break
                except Timeout:
                    progress("waiting for another program", 0, 0)
            yield


def cached_model(repository: str, revision: str) -> HubModel | None:
    """What the cache alone knows of a repository: for when the hub must not or cannot be asked.

    Files have the digest by which the cache names them. None where no whole model is there.
    """
    cached = CachedRepository(repository)
    commit = cached.commit_of(revision)
    if commit is None:
        return None
    files = []
    snapshot = cached.root / "snapshots" / commit
    for name in choose_files(sorted(path.name for path in snapshot.iterdir() if path.is_file())):
        digest = (snapshot / name).resolve().name
        size = (snapshot / name).stat().st_size
        files.append(HubFile(name, size, digest, len(digest) == 64))
    if not all(is_valid_file(file) for file in files):
        return None
    return HubModel(repository, revision, commit, tuple(files), "")


def linked_bytes(directory: Path) -> int:
    """Bytes in the hub's cache that the model of the store in `directory` links to."""
    size = 0
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            size += path.stat().st_size if path.is_symlink() else 0
    return size


def delete(repository: str, commit: str) -> int:
    """Deletes a repository's files at `commit` from the hub's cache, for all programs.

    Files that other commits have too stay. Returns the bytes that this freed. Raises StoreError.
    """
    cached = CachedRepository(repository)
    snapshot = cached.root / "snapshots" / commit
    if not is_commit(commit) or not snapshot.is_dir():
        return 0
    with store_errors(f"cannot delete {cached.root}", "HF_HOME"):
        others = [path for path in snapshot.parent.iterdir() if path != snapshot]
        kept = {path.resolve() for other in others for path in other.rglob("*")}
        blobs = [path for path in cached.root.glob("blobs/*") if path.resolve() not in kept]
        if others:  # what none of the commits has is still being fetched
            ours = {path.resolve() for path in snapshot.rglob("*")}
            blobs = [path for path in blobs if path.resolve() in ours]
        freed = sum(path.lstat().st_size for path in blobs)
        if not others:
            shutil.rmtree(cached.root)
            return freed
        for reference in (cached.root / "refs").rglob("*"):
            with contextlib.suppress(OSError, ValueError):
                if read_bounded(reference, _LONGEST_REF).decode().strip() == commit:
                    reference.unlink()
        shutil.rmtree(snapshot)
        for path in blobs:
            path.unlink()
    return freed


def verify(
    file: HubFile, path: Path, progress: Callable[[int], None] = lambda done: None
) -> FileRecord:
    """The record of a file in the cache, read again. Raises FetchError where its hash is wrong."""
    named, sha256, done = hasher_for(file), hashlib.sha256(), 0
    with open_regular(path) as content:
        while block := content.read(1 << 20):
            sha256.update(block)
            named.update(block)
            done += len(block)
            progress(done)
    found = named.hexdigest()
    if found != file.digest:
        raise FetchError(
            f"{path} is not what the hub has: expected hash {file.digest[:16]}, found "
            f"{found[:16]}; delete it and pull again"
        )
    return FileRecord(done, sha256.hexdigest())


def hasher_for(file: HubFile) -> Any:
    """SHA-256, or git's SHA-1 of the file as an object: what the hub names it by."""
    if file.large:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
