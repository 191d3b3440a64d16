"""Repositories of the Hugging Face hub, and the hub's own cache on this machine.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to every program that uses
huggingface-hub. File names that lead out of a directory and weights as pickle are never accepted.

In the cache `blobs/<digest>` holds the files, the names under `snapshots/<commit>/` link to them,
and `refs/<branch>` holds the commit of a branch. Every program that uses huggingface-hub shares it,
so nothing is deleted but by name, and a file counts only when size and hash are right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from akunu_py.errors import FetchError, UnsupportedModel
from akunu_py.files import open_regular, read_bounded
from akunu_py.models.manifest import FileRecord
from akunu_py.models.store.disk import open_own, store_errors
from akunu_py.text import on_one_line

_OWNER = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-]))*"
_REPOSITORY = re.compile(rf"({_OWNER}/{_OWNER})(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What mlx-lm and transformers read of a model; no directory below, no code, nothing else.
_WEIGHTS = re.compile(r"model[A-Za-z0-9._-]*\.safetensors")
_HEADS = re.compile(r"mtp[A-Za-z0-9._-]*\.safetensors")  # what drafts for them
_WANTED = re.compile(
    rf"{_WEIGHTS.pattern}|{_HEADS.pattern}|(?:config|generation_config|hf_quant_config|model\.safetensors\.index"
    r"|tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|vocab)\.json"
    r"|chat_template\.jinja|tokenizer\.model|merges\.txt|vocab\.txt|[A-Za-z0-9_-]+\.tiktoken"
)
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST = 1 << 50  # bytes
_LARGEST_SETTING = 1 << 30  # of all but weights
NOT_THE_HUB = (
    "is it the hub that answers? check the network (does it want you to sign in?) and HF_ENDPOINT"
)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: `size` in bytes; `digest` in hex, its SHA-256 where `large` (it lies
    in large file storage), otherwise git's SHA-1 of it. It is also the file's name in the cache."""

    name: str
    size: int
    digest: str
    large: bool


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository at one commit, and those of its files that are needed.

    revision: as the user named it.
    """

    repository: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]
    licence: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def parse_reference(reference: str) -> tuple[str, str | None] | None:
    """(repository, revision) of `owner/repo[@revision]`, None for what is not of that form."""
    found = _REPOSITORY.fullmatch(reference)
    if not found or len(reference) > 200 or ".." in reference or "--" in found[1]:
        return None
    return found[1], found[2]


def choose_files(names: list[str]) -> list[str]:
    """The files of a repository that a model needs.

    Raises FetchError for a name that leads out of the directory, UnsupportedModel where there are
    no safetensors, which names what there is instead.
    """
    for name in names:
        parts = PurePosixPath(name).parts
        if name.startswith(("/", "~")) or ".." in parts or "\\" in name or "\0" in name:
            raise FetchError(
                f"the repository names a file outside its directory: {name[:80]!r}; "
                "do not use it, and tell the hub"
            )
    wanted = [name for name in names if _WANTED.fullmatch(name)]
    if not any(_WEIGHTS.fullmatch(name) for name in wanted):
        raise UnsupportedModel(_no_weights(names))
    if "config.json" not in wanted:
        raise UnsupportedModel("the repository holds no config.json; it is not a model for mlx-lm")
    if "tokenizer.json" in wanted:  # it holds all that these do
        wanted = [name for name in wanted if name not in ("vocab.json", "merges.txt", "vocab.txt")]
    return wanted


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def is_valid_file(file: HubFile) -> bool:
    """Whether its name, size and digest are what they should be, and safe as names of files."""
    if not isinstance(file.name, str) or not isinstance(file.digest, str) or len(file.name) > 200:
        return False
    form = _SHA256 if file.large else _COMMIT
    plain = _WANTED.fullmatch(file.name) and form.fullmatch(file.digest)
    largest = _LARGEST if file.name.endswith(".safetensors") else _LARGEST_SETTING
    return bool(plain) and type(file.size) is int and 0 <= file.size <= largest


def read_listing(repository: str, revision: str | None, listing: Any) -> HubModel:
    """The hub's answer, after a check that every field that is used is valid."""
    listing = listing if isinstance(listing, dict) else {}
    commit, siblings = listing.get("sha"), listing.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise FetchError(f"the hub names no commit of {repository}; {NOT_THE_HUB}")
    if not isinstance(siblings, list) or not all(map(_is_named, siblings)):
        raise FetchError(f"the hub does not list the files of {repository}; {NOT_THE_HUB}")
    listed = {sibling["rfilename"]: sibling for sibling in siblings}
    files = []
    for name in choose_files(list(listed)):
        sibling = listed[name]
        large = sibling.get("lfs")
        digest = large.get("sha256") if isinstance(large, dict) else sibling.get("blobId")
        size = (large if isinstance(large, dict) else sibling).get("size")
        file = HubFile(name, size, digest, bool(large))  # type: ignore[arg-type]
        if not is_valid_file(file):
            raise FetchError(
                f"the hub gives no size and hash of {name} in {repository}; {NOT_THE_HUB}"
            )
        files.append(file)
    return HubModel(repository, revision or "main", commit, tuple(files), _licence(listing))


def _is_named(sibling: Any) -> bool:
    return isinstance(sibling, dict) and isinstance(sibling.get("rfilename"), str)


def _licence(listing: dict[str, Any]) -> str:
    """What the model card says, "" where it says nothing that is a name."""
    card = listing.get("cardData")
    card = card if isinstance(card, dict) else {}
    named = card.get("license_name") if card.get("license") == "other" else card.get("license")
    return on_one_line(named)[:100] if isinstance(named, str) else ""


def _no_weights(names: list[str]) -> str:
    if any(name.endswith(".gguf") for name in names):
        return (
            "the repository holds GGUF files only: fetch the one you want, then "
            "`akunu models import FILE`"
        )
    if pickles := [name for name in names if name.endswith(_PICKLE)]:
        return (
            f"the repository holds its weights as pickle only ({pickles[0][:60]!r}), a format that "
            "can run any code; look for a conversion to safetensors, as mlx-community has them"
        )
    return "the repository holds no weights (model*.safetensors); look for another one"


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
            with open(open_own(reference), "r+b") as file:
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
    def locked(self, file: HubFile, waiting: Callable[[int], None]) -> Iterator[None]:
        """Hold the library's lock of the file, which other programs respect too.

        waiting: called with 1 when the wait begins, with -1 when it ends.
        """
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        self._locks.mkdir(parents=True, exist_ok=True)
        waiting(1)
        with WeakFileLock(self._locks / f"{file.digest}.lock"):
            waiting(-1)
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
    """Read a file of the cache and return its record. Raises FetchError for a wrong hash."""
    sha256, done = hashlib.sha256(), 0
    # The hub names large files by their SHA-256, others by git's SHA-1 of them as objects.
    named = sha256 if file.large else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with open_regular(path) as content:
        while block := content.read(1 << 20):
            sha256.update(block)
            if named is not sha256:
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
