"""The hub's own cache on this machine: its layout, what is in it, verifying and deleting.

`blobs/<digest>` holds the files, the names under `snapshots/<commit>/` link to them, and
`refs/<branch>` holds the commit of a branch. Every program that uses huggingface-hub shares it, so
nothing is deleted but by name, and a file counts only when size and hash are right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from akunu_py.errors import FetchError
from akunu_py.models.disk import store_errors
from akunu_py.models.hub.api import HubFile, HubModel, Retries, choose_files
from akunu_py.models.manifest import FileRecord, sha256_file
from akunu_py.models.progress import ProgressCallback


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
                if path.stat().st_size == file.size:
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
        with contextlib.suppress(OSError):
            commit = (self.root / "refs" / revision).read_text("utf-8").strip()
        plain = commit and all(part not in ("", ".", "..") for part in commit.split("/"))
        return commit if plain and (self.root / "snapshots" / commit).is_dir() else None

    def write_ref(self, model: HubModel) -> None:
        """Records which commit the branch is at, as the library does."""
        if model.revision != model.commit:
            reference = self.root / "refs" / model.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(model.commit, "utf-8")

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
        files.append(HubFile(name, (snapshot / name).stat().st_size, digest, len(digest) == 64))
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
    from huggingface_hub import scan_cache_dir

    cached = CachedRepository(repository)
    if not cached.root.exists():
        return 0
    with store_errors(f"cannot delete {cached.root}", "HF_HOME"):
        plan = scan_cache_dir(cached.root.parent).delete_revisions(commit)
        plan.execute()
    return int(plan.expected_freed_size)


def verify(
    file: HubFile, path: Path, progress: Callable[[int], None] = lambda done: None
) -> FileRecord:
    """The record of a file in the cache, read again. Raises FetchError where its hash is wrong."""
    if file.large:
        digest = found = sha256_file(path, progress)
    else:
        content = path.read_bytes()
        found = hasher_for(file, content).hexdigest()
        digest = hashlib.sha256(content).hexdigest()
    if found != file.digest:
        raise FetchError(
            f"{path} is not what the hub has: expected hash {file.digest[:16]}, found "
            f"{found[:16]}; delete it and pull again"
        )
    return FileRecord(path.stat().st_size, digest)


def hasher_for(file: HubFile, content: bytes = b"") -> Any:
    """SHA-256 of the content, or git's SHA-1 of it as an object."""
    if file.large:
        return hashlib.sha256(content)
    # Not for security: it is the name that the hub gives small files.
    return hashlib.sha1(b"blob %d\0" % file.size + content, usedforsecurity=False)
