"""Repositories of the Hugging Face hub, and the hub's own cache on this machine.

In the cache, `blobs/<digest>` are the files, `snapshots/<commit>/` contains links to them by name,
and `refs/<branch>` contains the commit of a branch. Other programs share the cache: nothing is
deleted except by name, and a file counts only if its size and hash are right.
"""

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from akunu_py.errors import FetchError, StoreError, UnsupportedModel
from akunu_py.files import open_regular, read_blocks, read_bounded
from akunu_py.models.load.model_files import no_weights
from akunu_py.models.store.directories import open_writable

_OWNER = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-]))*"
_REPOSITORY = re.compile(rf"({_OWNER}/{_OWNER})(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The files that mlx-lm and transformers read: no code, no subdirectories, no pickle.
_WEIGHTS = re.compile(r"model[A-Za-z0-9._-]*\.safetensors")
_HEADS = re.compile(r"mtp[A-Za-z0-9._-]*\.safetensors")  # MTP heads
_NEEDED = re.compile(
    rf"{_WEIGHTS.pattern}|{_HEADS.pattern}|(?:config|generation_config|hf_quant_config|model\.safetensors\.index"
    r"|tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|vocab)\.json"
    r"|chat_template\.jinja|tokenizer\.model|merges\.txt|vocab\.txt|[A-Za-z0-9_-]+\.tiktoken"
)
_MAX_WEIGHT_BYTES, _MAX_OTHER_BYTES = 1 << 50, 1 << 30
_MAX_REF_BYTES = 1000


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    size: int  # bytes
    digest: str  # in hex, SHA-256 if `large`, else git's SHA-1; the file's name in the cache
    large: bool  # in large file storage


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository at one commit."""

    repository: str
    revision: str  # as the user named it
    commit: str
    files: tuple[HubFile, ...]  # only those that a model needs
    license: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def parse_reference(reference: str) -> tuple[str, str | None] | None:
    """Parse `owner/repo[@revision]` to (repository, revision), None for other forms."""
    found = _REPOSITORY.fullmatch(reference)
    if not found or len(reference) > 200 or ".." in reference or "--" in found[1]:
        return None
    return found[1], found[2]


def choose_files(names: list[str]) -> list[str]:
    """Return the files that a model needs, whose names have no slash. Raises UnsupportedModel."""
    chosen = [name for name in names if _NEEDED.fullmatch(name)]
    if not any(_WEIGHTS.fullmatch(name) for name in chosen):
        raise no_weights("the repository", names)
    if "config.json" not in chosen:
        raise UnsupportedModel("the repository has no config.json; it is not a model for mlx-lm")
    if "tokenizer.json" in chosen:  # it includes these
        chosen = [name for name in chosen if name not in ("vocab.json", "merges.txt", "vocab.txt")]
    return chosen


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def is_valid_metadata(file: HubFile) -> bool:
    """Return True if size and digest are well-formed."""
    digest = _SHA256 if file.large else _COMMIT
    largest = _MAX_WEIGHT_BYTES if file.name.endswith(".safetensors") else _MAX_OTHER_BYTES
    sized = type(file.size) is int and 0 <= file.size <= largest
    return sized and digest.fullmatch(file.digest) is not None


class CachedRepository:
    """One repository in the hub's cache. cache: its directory (default: the library's)."""

    def __init__(self, repository: str, cache: Path | None = None) -> None:
        from huggingface_hub import constants

        self.repository = repository
        self.cache = cache or Path(constants.HF_HUB_CACHE)
        self.root = self.cache / f"models--{repository.replace('/', '--')}"

    def blob_path(self, file: HubFile) -> Path:
        return self.root / "blobs" / file.digest

    def partial_path(self, file: HubFile) -> Path:
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def snapshot_path(self, commit: str, name: str = "") -> Path:
        """Return the path of a commit's directory, or of the link to a file in it."""
        return self.root / "snapshots" / commit / name

    def has(self, model: HubModel, file: HubFile) -> bool:
        """Return True if the cache has the file in the right size."""
        for path in (self.snapshot_path(model.commit, file.name), self.blob_path(file)):
            with contextlib.suppress(OSError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode) and found.st_size == file.size:
                    return True
        return False

    def fetched_bytes(self, model: HubModel) -> int:
        """Return the bytes of the model's files, including partial downloads."""
        done = 0
        for file in model.files:
            if self.has(model, file):
                done += file.size
            else:
                with contextlib.suppress(OSError):
                    done += min(self.partial_path(file).stat().st_size, file.size)
        return done

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of `revision` when it was last fetched, None if its files are gone."""
        commit = revision
        with contextlib.suppress(OSError, ValueError):
            commit = read_bounded(self.root / "refs" / revision, _MAX_REF_BYTES).decode().strip()
        return commit if is_commit(commit) and (self.root / "snapshots" / commit).is_dir() else None

    def write_ref(self, model: HubModel) -> None:
        """Record the commit of the branch, as the library does."""
        if model.revision != model.commit and self.commit_of(model.revision) != model.commit:
            reference = self.root / "refs" / model.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            with open(open_writable(reference), "r+b") as file:
                file.truncate()
                file.write(model.commit.encode())

    def link(self, model: HubModel, file: HubFile) -> None:
        """Link the fetched file under its name in the snapshot."""
        link, blob = self.snapshot_path(model.commit, file.name), self.blob_path(file)
        with contextlib.suppress(OSError):
            if link.stat().st_size == file.size:
                return
        link.unlink(missing_ok=True)
        try:
            os.symlink(os.path.relpath(blob, link.parent), link)
        except FileExistsError:
            pass  # another process made the same one
        except OSError:  # a file system without links; the library moves the file, too
            os.replace(blob, link)

    def lock(self, file: HubFile) -> contextlib.AbstractContextManager[Any]:
        """Return the library's lock of the file, which other programs respect too."""
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        directory = self.cache / ".locks" / self.root.name
        directory.mkdir(parents=True, exist_ok=True)
        return WeakFileLock(directory / f"{file.digest}.lock")


def cached_model(repository: str, revision: str) -> HubModel | None:
    """Return the model in the cache without a request, None if it is incomplete."""
    cached = CachedRepository(repository)
    commit = cached.commit_of(revision)
    if commit is None:
        return None
    files = []
    snapshot = cached.snapshot_path(commit)
    for name in choose_files(sorted(path.name for path in snapshot.iterdir() if path.is_file())):
        digest = digest_of(snapshot / name)
        size = (snapshot / name).stat().st_size
        files.append(HubFile(name, size, digest, len(digest) == 64))
    return HubModel(repository, revision, commit, tuple(files), "")


def digest_of(path: Path) -> str:
    """Return the digest in the name of a snapshot's file, empty if the file is not in blobs."""
    name = path.resolve().name if path.is_symlink() else ""
    return name if _SHA256.fullmatch(name) or _COMMIT.fullmatch(name) else ""


def delete(snapshot: Path) -> int:
    """Delete the files that only this commit has, for all programs. Return the bytes freed."""
    if not snapshot.is_dir():
        return 0
    from huggingface_hub import scan_cache_dir

    for link in [path for path in snapshot.iterdir() if not path.exists()]:
        link.unlink()  # the scan would skip the repository
    root = snapshot.parents[1].resolve()
    found = scan_cache_dir(root.parent)
    ours = frozenset(each for each in found.repos if each.repo_path == root)
    plan = replace(found, repos=ours).delete_revisions(snapshot.name)
    plan.execute()  # logs what it cannot delete
    if snapshot.exists():
        raise StoreError(f"cannot delete {snapshot}; check its permissions, and try again")
    return plan.expected_freed_size


def verify(file: HubFile, path: Path, progress: Callable[[int], None], advice: str = "") -> None:
    """Hash a file of the cache. Raises FetchError for a wrong hash."""
    if (found := hash_file(path, progress, git=not file.large)) != file.digest:
        raise FetchError(
            f"{file.name} was altered: expected hash {file.digest[:16]}, found {found[:16]}; "
            + (advice or f"delete {path.resolve()} and pull again")
        )


def hash_file(path: Path, progress: Callable[[int], None], *, git: bool = False) -> str:
    """Return a file's SHA-256, or git's SHA-1, as the hub has it of small files. Raises OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        git_digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        digest = git_digest if git else hashlib.sha256()
        for block in read_blocks(file, progress):
            digest.update(block)
    return digest.hexdigest()
