"""Fetches a model's files into the hub's own cache.

Owns the transfer. The library's own downloads keep nothing of one that was cut off, so the bytes
are fetched here, by plain HTTP with ranges: into `blobs/<digest>.incomplete`, under the library's
lock, and named only when size and hash are right. So every program that uses huggingface-hub finds
what we fetched, and we use what they did.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from akunu_py.errors import FetchError, StoreError
from akunu_py.models.hub.api import HubFile, HubModel, Retries, hub_errors
from akunu_py.models.hub.cache import CachedRepository, hasher_for
from akunu_py.models.locking import store_errors
from akunu_py.models.progress import ProgressCallback

if TYPE_CHECKING:
    import httpx2

_BLOCK = 1 << 20
_RESERVE = 64_000_000  # bytes that are left free on the disk


def fetch(
    model: HubModel, files: Sequence[HubFile], retries: Retries, report: ProgressCallback
) -> set[str]:
    """Brings `files` of `model` into the cache and gives the names of those that were fetched.

    They are under `CachedRepository.link`. report: called with the bytes of the whole model.
    A failure removes nothing: the next call goes on where this one ended. Raises FetchError,
    StoreError, Cancelled.
    """
    cached = CachedRepository(model.repository)
    doing = f"cannot keep {model.repository} in {cached.root}"
    with store_errors(doing, "HF_HOME"), hub_errors(model.repository, model.revision):
        _check_space(cached, model)
        for part in ("blobs", f"snapshots/{model.commit}"):
            (cached.root / part).mkdir(parents=True, exist_ok=True)
        have = {file.name: cached.fetched(model, file) for file in model.files}
        fetched: set[str] = set()
        # The small ones first: what is wrong with a model shows in its configuration.
        for file in sorted(files, key=lambda file: file.size):

            def tell(done: int, name: str = file.name) -> None:
                have[name] = done
                report("download", sum(have.values()), model.size)

            if not cached.here(model, file):
                with cached.locked(file, retries, report):
                    if not cached.here(model, file):
                        _download(model, file, cached, retries, tell)
                        fetched.add(file.name)
            _link(cached, model, file)
            tell(file.size)
        if len(files) == len(model.files):
            cached.name_revision(model)
    return fetched


class _Incoming:
    """A file on its way: what is here of it, and the hash of that."""

    def __init__(self, file: HubFile, output: IO[bytes], retries: Retries) -> None:
        self.file, self._output, self._hasher = file, output, hasher_for(file)
        self.size = 0
        while block := output.read(_BLOCK):  # what an earlier attempt left
            retries.check()
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
    tell: Callable[[int], None],
) -> None:
    """Fetches one file, from where an earlier attempt ended, and names it when it is right."""
    partial = cached.partial(file)
    with partial.open("ab+") as output:
        if output.tell() > file.size:
            output.truncate(0)
        output.seek(0)
        incoming = _Incoming(file, output, retries)
        while incoming.size < file.size:
            retries.check()
            with retries.tolerated():
                _receive(model, incoming, retries, tell)
        incoming.finish()
    os.replace(partial, cached.blob(file))


def _receive(
    model: HubModel, incoming: _Incoming, retries: Retries, tell: Callable[[int], None]
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
        if incoming.size and not _goes_on_at(response, incoming.size):
            incoming.restart()  # the server does not do ranges
        for chunk in response.iter_bytes():
            retries.check()
            incoming.add(chunk)
            retries.progressed()
            tell(incoming.size)
    if incoming.size < file.size:
        raise httpx2.RemoteProtocolError(
            f"{file.name} ended after {incoming.size} of {file.size} bytes"
        )


def _goes_on_at(response: httpx2.Response, position: int) -> bool:
    said = response.headers.get("Content-Range", "")
    return response.status_code == 206 and said.startswith(f"bytes {position}-")


def _link(cached: CachedRepository, model: HubModel, file: HubFile) -> None:
    link, blob = cached.link(model.commit, file.name), cached.blob(file)
    with contextlib.suppress(OSError):
        if link.stat().st_size == file.size:
            return
    link.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):  # another process made the same one
        os.symlink(os.path.relpath(blob, link.parent), link)


def _check_space(cached: CachedRepository, model: HubModel) -> None:
    missing = sum(file.size - cached.fetched(model, file) for file in model.files)
    there = next(path for path in (cached.root, *cached.root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if missing and free < missing + _RESERVE:
        raise StoreError(
            f"not enough space in {there}: {model.repository} still needs "
            f"{(missing + _RESERVE) / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free; free some, or "
            "set HF_HOME to a directory on another disk"
        )
