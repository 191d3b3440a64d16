"""Fetches a model's files into the hub's own cache and makes a model directory of them.

The library's own downloads keep nothing of one that was cut off, so the bytes are fetched here, by
plain HTTP with ranges: into `blobs/<digest>.incomplete`, under the library's lock, and named only
when size and hash are right. So every program that uses huggingface-hub finds what we fetched, and
we use what they did.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO
from urllib.parse import quote

from akunu_py.errors import FetchError
from akunu_py.files import read_json
from akunu_py.models import mlx_directory, model_files
from akunu_py.models.manifest import FileRecord, ModelFacts
from akunu_py.models.pull.request import Answer, Retries, TransientError, request
from akunu_py.models.store.disk import check_space, open_own, store_errors
from akunu_py.models.store.hub_cache import CachedRepository, HubFile, HubModel, hasher_for, verify
from akunu_py.models.store.progress import ProgressCallback
from akunu_py.text import on_one_line

_BLOCK = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(\*|[0-9]{1,18})")
_RESERVE = 64_000_000  # bytes that are left free on the disk


def build_model(
    model: HubModel, directory: Path, retries: Retries, progress: ProgressCallback
) -> ModelFacts:
    """Fetches and checks `model`, and fills the empty `directory` with links into the hub's cache.

    Raises FetchError, StoreError, Cancelled, UnsupportedModel, DamagedModel.
    """
    cached = CachedRepository(model.repository)
    settings = [file for file in model.files if file.name.endswith(".json")]
    # Settings decide whether the weights are worth fetching.
    fetched = fetch(model, settings, retries, progress)
    model_files.check_config(cached.snapshot_path(model.commit, "config.json").parent)
    fetched |= fetch(model, model.files, retries, progress)
    records, done = {}, 0
    for file in model.files:
        path = cached.snapshot_path(model.commit, file.name)
        if file.name in fetched and file.large:  # it was hashed as it came
            records[file.name] = FileRecord(file.size, file.digest)
        else:

            def checked(read: int, base: int = done) -> None:
                retries.raise_if_cancelled()
                progress("check", base + read, model.size)

            records[file.name] = verify(file, path, checked)
        done += file.size
        (directory / file.name).symlink_to(path)
    plan = mlx_directory.plan_directory(directory)
    for name in plan.settings:
        settings_limit = model_files.MAX_SETTINGS_BYTES
        if "auto_map" in read_json(directory / name, settings_limit, infinity=True):
            (directory / name).unlink()  # the link; our copy does not point to code
            plan.write_settings(directory, name)
            del records[name]
    return replace(
        plan.facts,
        source=f"{model.repository} on the Hugging Face hub",
        licence=model.licence,
        repository=model.repository,
        commit=model.commit,
        files=records,
    )


def fetch(
    model: HubModel, files: Sequence[HubFile], retries: Retries, progress: ProgressCallback
) -> set[str]:
    """Fetches `files` of `model` into the cache. Returns the names of those that were not there.

    progress: called with the bytes of the whole model. A failure removes nothing: the next call
    continues where this one ended. Raises FetchError, StoreError, Cancelled.
    """
    cached = CachedRepository(model.repository)
    doing = f"cannot keep {model.repository} in {cached.root}"
    with store_errors(doing, "HF_HOME"):
        if missing := sum(file.size - cached.fetched_bytes(model, file) for file in model.files):
            check_space(cached.root, missing + _RESERVE, "HF_HOME")
        for part in ("blobs", f"snapshots/{model.commit}"):
            (cached.root / part).mkdir(parents=True, exist_ok=True)
        have = {file.name: cached.fetched_bytes(model, file) for file in model.files}
        fetched: set[str] = set()
        # The small ones first: what is wrong with a model shows in its configuration.
        for file in sorted(files, key=lambda file: file.size):

            def received(done: int, name: str = file.name) -> None:
                have[name] = done
                progress("download", sum(have.values()), model.size)

            if not cached.has(model, file):
                with cached.locked(file, retries, progress):
                    if not cached.has(model, file):
                        _download(model, file, cached, retries, received)
                        fetched.add(file.name)
            cached.link(model, file)
            received(file.size)
        if len(files) == len(model.files):
            cached.write_ref(model)
    return fetched


class _Incoming:
    """A file that is being received: the bytes of it that are here, and their hash.

    whole: whether to ask for all of it: the server does not send parts as it should.
    """

    def __init__(self, file: HubFile, output: IO[bytes], retries: Retries) -> None:
        self.file, self.whole = file, False
        self._output, self._retries, self._hasher = output, retries, hasher_for(file)
        self.size = 0
        while block := output.read(_BLOCK):  # what an earlier attempt left
            retries.raise_if_cancelled()
            self._take(block)
        self._best = self.size

    def restart(self) -> None:
        self._output.seek(0)
        self._output.truncate()
        self.size, self._hasher = 0, hasher_for(self.file)

    def add(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self.file.size:
            self.restart()
            raise FetchError(
                f"{self.file.name} is longer than the {self.file.size} bytes that the hub lists; "
                "it was thrown away, pull again, and check HF_ENDPOINT"
            )
        self._output.write(chunk)
        self._take(chunk)
        if self.size > self._best:  # what came a second time is nothing new
            self._retries.gained(self.size - self._best)
            self._best = self.size

    def finish(self) -> None:
        """Raises FetchError where the hash is wrong; nothing is left of the file then."""
        self._output.flush()
        os.fsync(self._output.fileno())
        found = self._hasher.hexdigest()
        if found != self.file.digest:
            self.restart()
            raise FetchError(
                f"{self.file.name} arrived altered: expected hash {self.file.digest[:16]}, found "
                f"{found[:16]}; it was thrown away, pull again"
            )

    def _take(self, block: bytes) -> None:
        self._hasher.update(block)
        self.size += len(block)


def _download(
    model: HubModel,
    file: HubFile,
    cached: CachedRepository,
    retries: Retries,
    received: Callable[[int], None],
) -> None:
    """Fetches one file, from where an earlier attempt ended, and names it when it is right."""
    partial = cached.partial_path(file)
    with open_own(partial) as output:
        if os.fstat(output.fileno()).st_size > file.size:
            output.truncate(0)
        incoming = _Incoming(file, output, retries)
        while incoming.size < file.size:
            with retries.attempt():
                _receive(model, incoming, retries, received)
        incoming.finish()
    retries.reset()
    os.replace(partial, cached.blob_path(file))


def _receive(
    model: HubModel, incoming: _Incoming, retries: Retries, received: Callable[[int], None]
) -> None:
    """One request for the rest of the file, or for all of it where the server sends no parts.

    Bytes are kept where the connection broke, and thrown away where an answer was whole and yet too
    short. Raises TransientError, FetchError, UnknownModel, Cancelled.
    """
    from huggingface_hub import constants

    start = 0 if incoming.whole else incoming.size
    where = f"{model.repository}/resolve/{model.commit}/{quote(incoming.file.name)}"
    try:
        with request(
            f"{constants.ENDPOINT}/{where}",
            model.repository,
            retries,
            revision=model.revision,
            headers={"Range": f"bytes={start}-"} if start else {},
            idle=lambda: received(incoming.size),
        ) as answer:
            end = _end(answer, start, incoming.file)
            if answer.status == 200:
                incoming.restart()
            for chunk in answer.chunks:
                incoming.add(chunk)
                received(incoming.size)
    except TransientError as error:
        incoming.whole = incoming.whole or error.part
        raise
    if incoming.size < end:
        found = incoming.size
        if answer.status == 200:
            incoming.restart()
        raise TransientError(_unlike(incoming.file, f"{found:,} bytes in all"))


def _end(answer: Answer, start: int, file: HubFile) -> int:
    """Where in the file the answer ends. Raises TransientError for one that cannot be right."""
    length = answer.headers.get("Content-Length")
    if answer.status == 200:
        if length is not None and length != str(file.size):
            kind = on_one_line(answer.headers.get("Content-Type", "no type"))[:40]
            raise TransientError(
                _unlike(file, f"{length[:20]} bytes of {kind}"), "wrong answer", part=start > 0
            )
        return file.size
    part = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if part and part[3] in ("*", str(file.size)):
        first, last = int(part[1]), int(part[2])
        if first == start <= last < file.size:
            return last + 1
    found = "another part than was asked for"
    raise TransientError(_unlike(file, found), "wrong answer", part=True)


def _unlike(file: HubFile, found: str) -> str:
    from huggingface_hub import constants

    return (
        f"{constants.ENDPOINT} sends {file.name} wrong: expected {file.size:,} bytes, found "
        f"{found}; pull again, and check the network and HF_ENDPOINT"
    )
