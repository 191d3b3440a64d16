"""Fetches a model's files into the hub's own cache and makes a model directory of them.

The library's own downloads keep nothing of one that was cut off, so the bytes are fetched here, by
plain HTTP with ranges: into `blobs/<digest>.incomplete`, under the library's lock, and named only
when size and hash are right. So every program that uses huggingface-hub finds what we fetched, and
we use what they did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from akunu_py.errors import FetchError
from akunu_py.models import mlx_directory, model_files
from akunu_py.models.disk import check_space, store_errors
from akunu_py.models.hub.api import HubFile, HubModel, Retries, hub_errors
from akunu_py.models.hub.cache import CachedRepository, hasher_for, verify
from akunu_py.models.manifest import FileRecord, ModelFacts
from akunu_py.models.progress import ProgressCallback

if TYPE_CHECKING:
    import httpx2

_BLOCK = 1 << 20
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
        if "auto_map" in json.loads((directory / name).read_text("utf-8")):
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
    with store_errors(doing, "HF_HOME"), hub_errors(model.repository, model.revision):
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
    """A file that is being received: the bytes of it that are here, and their hash."""

    def __init__(self, file: HubFile, output: IO[bytes], retries: Retries) -> None:
        self.file, self._output, self._hasher = file, output, hasher_for(file)
        self.size = 0
        while block := output.read(_BLOCK):  # what an earlier attempt left
            retries.raise_if_cancelled()
            self._take(block)

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
    with partial.open("ab+") as output:
        if output.tell() > file.size:
            output.truncate(0)
        output.seek(0)
        incoming = _Incoming(file, output, retries)
        while incoming.size < file.size:
            retries.raise_if_cancelled()
            with retries.attempt():
                _receive(model, incoming, retries, received)
        incoming.finish()
    os.replace(partial, cached.blob_path(file))


def _receive(
    model: HubModel, incoming: _Incoming, retries: Retries, received: Callable[[int], None]
) -> None:
    """One request for the rest of the file. Bytes that came are kept, whatever happens.

    Raises what huggingface-hub and its HTTP client raise.
    """
    import httpx2
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    file = incoming.file
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if incoming.size:
        headers["Range"] = f"bytes={incoming.size}-"
    url = f"{constants.ENDPOINT}/{model.repository}/resolve/{model.commit}/{quote(file.name)}"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream(
        "GET", url, headers=headers, timeout=timeout, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        if incoming.size and not _continues_at(response, incoming.size):
            incoming.restart()  # the server does not do ranges
        for chunk in response.iter_bytes():
            retries.raise_if_cancelled()
            incoming.add(chunk)
            retries.reset()
            received(incoming.size)
    if incoming.size < file.size:
        raise httpx2.RemoteProtocolError(
            f"{file.name} ended after {incoming.size} of {file.size} bytes"
        )


def _continues_at(response: httpx2.Response, position: int) -> bool:
    content_range = response.headers.get("Content-Range", "")
    return response.status_code == 206 and content_range.startswith(f"bytes {position}-")
