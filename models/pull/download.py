"""Fetch a model's files into the hub's own cache, in a worker process (see `worker`).

Every program that uses huggingface-hub shares the cache.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from akunu_py.errors import (
    AkunuError,
    Cancelled,
    FetchError,
    StoreError,
    UnknownModel,
    UnsupportedModel,
    one_line,
)
from akunu_py.models.manifest import FileRecord
from akunu_py.models.pull.worker import TransientError
from akunu_py.models.store.disk import check_space, store_errors
from akunu_py.models.store.hub_cache import CachedRepository, HubFile, HubModel
from akunu_py.models.store.progress import ProgressCallback

_ATTEMPTS = 5  # in a row, without _ENOUGH new bytes
_ENOUGH = 1 << 20  # bytes
_FIRST_WAIT_S = 0.5  # doubled with each failure
_LONGEST_WAIT_S = 60.0  # a longer Retry-After is shortened
_STALLED_S = 20.0  # cancel a transfer with less than _SLOWEST new bytes in this time
_SLOWEST = 64 << 10  # bytes
_RESERVE = 64_000_000  # bytes to leave free on the disk
_ERRORS: dict[str, type[AkunuError]] = {
    kind.__name__: kind for kind in (FetchError, StoreError, UnknownModel, UnsupportedModel)
}


class Hub:
    """Client of the hub, a context manager. Its worker process ends with the block.

    Retries a busy hub, a stall and a lost connection, with exponential back-off. Five attempts in a
    row without 1 MiB of new bytes end the pull. Raises Cancelled once `cancelled` returns True.
    """

    def __init__(self, cancelled: Callable[[], bool], progress: ProgressCallback) -> None:
        self._cancelled, self._progress = cancelled, progress
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._failures = self._gained = 0

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._errors.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the worker, unless it runs. It imports the network libraries meanwhile."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "akunu_py.models.pull.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # keep Ctrl-C for this process
            )
        return self._process

    def look_up(self, repository: str, revision: str | None) -> HubModel:
        """Return the contents of `repository` at `revision` (None: its main branch).

        Raises FetchError, UnknownModel for a missing repository or revision, UnsupportedModel for a
        repository without safetensors, Cancelled.
        """
        request = {"repository": repository, "revision": revision}
        while True:
            with self._attempt():
                found = self._ask(request, lambda waiting: None)
                files = tuple(HubFile(**file) for file in found.pop("files"))
                return HubModel(**found, files=files)

    def fetch(self, model: HubModel, files: Sequence[HubFile]) -> dict[str, FileRecord]:
        """Fetch `files` of `model` into the cache in parallel. Return the records of the new ones.

        A failure removes nothing, so the next call continues. Raises FetchError, StoreError,
        Cancelled.
        """
        cached = CachedRepository(model.repository)
        with store_errors(f"cannot keep {model.repository} in {cached.root}", "HF_HOME"):
            done = best = self._done(model)
            if done < model.size:
                check_space(cached.root, model.size - done + _RESERVE, "HF_HOME")
            for part in ("blobs", f"snapshots/{model.commit}"):
                (cached.root / part).mkdir(parents=True, exist_ok=True)

            def report(waiting: bool) -> None:
                nonlocal best
                done = self._done(model)
                self._gain(done - best)
                best = max(best, done)
                if waiting:
                    self._progress("waiting for another program", 0, 0)
                else:
                    self._progress("download", done, model.size)

            records: dict[str, FileRecord] = {}
            while missing := [file for file in files if not cached.has(model, file)]:
                wanted = [[file.name, file.size, file.digest, file.large] for file in missing]
                request = {"repository": model.repository, "revision": model.revision}
                with self._attempt():
                    found = self._ask(request | {"commit": model.commit, "files": wanted}, report)
                    records |= {name: FileRecord(**record) for name, record in found.items()}
            report(False)
            for file in files:
                cached.link(model, file)
            if len(files) == len(model.files):
                cached.write_ref(model)
        return records

    def raise_if_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled("cancelled; pull again to continue the download")

    def _done(self, model: HubModel) -> int:
        cached = CachedRepository(model.repository)
        return sum(cached.fetched_bytes(model, file) for file in model.files)

    def _gain(self, new_bytes: int) -> None:
        """Reset the count of failures after enough new bytes."""
        self._gained += max(0, new_bytes)
        if self._gained >= _ENOUGH:
            self._failures = self._gained = 0

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Suppress a transient failure after a wait; raise other failures, and the last one."""
        self.raise_if_cancelled()
        try:
            yield
            self._failures = self._gained = 0
        except TransientError as error:
            self._failures += 1
            if self._failures >= _ATTEMPTS:
                tries = f"{_ATTEMPTS} tries brought less than {_ENOUGH >> 20} MiB"
                raise FetchError(f"{error} ({tries})") from error
            requested = min(error.after_s, _LONGEST_WAIT_S)
            until = time.monotonic() + max(_FIRST_WAIT_S * 2 ** (self._failures - 1), requested)
            while (left := until - time.monotonic()) > 0:
                self._progress(f"waiting: {error.why}", 0, 0)
                self.raise_if_cancelled()
                time.sleep(min(left, 0.1))

    def _ask(self, request: dict[str, Any], report: Callable[[bool], None]) -> Any:
        """Return the worker's result for one request."""
        keep = False
        try:
            for message in self._answers(request):
                if "result" in message:
                    return message["result"]
                # The worker still transfers the other files of a failed request.
                keep = "error" in message and "files" not in request
                if message.get("kind") == TransientError.__name__:
                    raise TransientError(message["error"], message["why"], message["after_s"])
                if "error" in message:
                    raise _ERRORS[message["kind"]](message["error"])
                report(message["waiting"])
        except BaseException:
            if not keep:
                self._kill()
            raise
        self._kill()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().split("\n")
        raise FetchError(f"the download process ended: {one_line(lines[-1])}; pull again")

    def _answers(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages until it ends or stalls."""
        from huggingface_hub import constants

        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        longest = max(_STALLED_S, constants.HF_HUB_DOWNLOAD_TIMEOUT)
        since, before = math.inf, 0  # the clock starts with the worker's first message
        for line in process.stdout:
            self.raise_if_cancelled()
            if not line.endswith(b"\n"):
                return
            message = json.loads(line)
            yield message
            if since == math.inf or message["waiting"] or message["moved"] >= before + _SLOWEST:
                since, before = time.monotonic(), message["moved"]
            elif time.monotonic() - since > longest:
                raise TransientError(
                    f"cannot fetch {request['repository']}: {constants.ENDPOINT} stalled (less "
                    f"than {_SLOWEST >> 10} KiB in {longest:.0f} s); pull again later to continue",
                    "stalled",
                )

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
