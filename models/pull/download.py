"""Fetches a model's files into the hub's own cache, in a process of their own (see `worker`).

Every program that uses huggingface-hub finds what we fetched, and we use what they did.
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
_ENOUGH = 1 << 20
_FIRST_WAIT_S = 0.5  # doubled with each failure
_LONGEST_WAIT_S = 60.0  # the longest Retry-After that is obeyed
_STALLED_S = 20.0  # a transfer that brings less than _SLOWEST in this time is given up
_SLOWEST = 64 << 10
_RESERVE = 64_000_000  # bytes that are left free on the disk
_ERRORS: dict[str, type[AkunuError]] = {
    kind.__name__: kind for kind in (FetchError, StoreError, UnknownModel, UnsupportedModel)
}


class Hub:
    """The hub, asked by a worker process that ends with the block.

    A busy hub, a stall and a lost connection are tried again, with exponential back-off: five times
    in a row without 1 MiB of new bytes end the pull.
    cancelled: polled often; Cancelled is raised where it is true.
    """

    def __init__(self, cancelled: Callable[[], bool], progress: ProgressCallback) -> None:
        self._cancelled, self._progress = cancelled, progress
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until the block ends
        self._failures = self._gained = 0

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._errors.close()

    def start(self) -> None:
        """Start the worker, unless it runs. It takes a moment to import the network's libraries."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "akunu_py.models.pull.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for us
            )

    def look_up(self, repository: str, revision: str | None) -> HubModel:
        """Return what `repository` holds at `revision` (None: its main branch).

        Raises FetchError, UnknownModel for a repository or revision that does not exist,
        UnsupportedModel for one without safetensors, Cancelled.
        """
        request = {"repository": repository, "revision": revision}
        while True:
            with self._attempt():
                found = self._ask(request, lambda waiting: None)
                files = tuple(HubFile(**file) for file in found.pop("files"))
                return HubModel(**found, files=files)

    def fetch(self, model: HubModel, files: Sequence[HubFile]) -> dict[str, FileRecord]:
        """Fetch `files` of `model` into the cache, all at once.

        Returns the records of those that came and were checked. A failure removes nothing: the next
        call continues where this one ended. Raises FetchError, StoreError, Cancelled.
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
                    told = self._ask(request | {"commit": model.commit, "files": wanted}, report)
                    records |= {name: FileRecord(**record) for name, record in told.items()}
            report(False)
            for file in files:
                cached.link(model, file)
            if len(files) == len(model.files):
                cached.write_ref(model)
        return records

    def raise_if_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled("cancelled; what was fetched is kept, pull again to go on")

    def _done(self, model: HubModel) -> int:
        cached = CachedRepository(model.repository)
        return sum(cached.fetched_bytes(model, file) for file in model.files)

    def _gain(self, new_bytes: int) -> None:
        """Forget the failures so far after enough bytes that were not here before."""
        self._gained += max(0, new_bytes)
        if self._gained >= _ENOUGH:
            self._failures = self._gained = 0

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Suppress a failure that may pass, after a wait; raise others, and one too many."""
        self.raise_if_cancelled()
        try:
            yield
            self._failures = self._gained = 0
        except TransientError as error:
            self._failures += 1
            if self._failures >= _ATTEMPTS:
                tries = f"{_ATTEMPTS} tries brought less than {_ENOUGH >> 20} MiB"
                raise FetchError(f"{error} ({tries})") from error
            longest = min(error.after_s, _LONGEST_WAIT_S)
            until = time.monotonic() + max(_FIRST_WAIT_S * 2 ** (self._failures - 1), longest)
            while (left := until - time.monotonic()) > 0:
                self._progress(f"waiting: {error.why}", 0, 0)
                self.raise_if_cancelled()
                time.sleep(min(left, 0.1))

    def _ask(self, request: dict[str, Any], report: Callable[[bool], None]) -> Any:
        """Return the worker's result for one request."""
        keep = False
        try:
            for told in self._answers(request):
                if "result" in told:
                    return told["result"]
                # Other files of a failed request are still being transferred.
                keep = "error" in told and "files" not in request
                if told.get("kind") == TransientError.__name__:
                    raise TransientError(told["error"], told["why"], told["after_s"])
                if "error" in told:
                    raise _ERRORS[told["kind"]](told["error"])
                report(told["waiting"])
        except BaseException:
            if not keep:
                self._kill()
            raise
        self._kill()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().split("\n")
        raise FetchError(f"the process that downloads ended: {one_line(lines[-1])}; pull again")

    def _answers(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what the worker says, until it ends, stalls or nobody wants it any more."""
        from huggingface_hub import constants

        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        longest = max(_STALLED_S, constants.HF_HUB_DOWNLOAD_TIMEOUT)
        since, before = math.inf, 0  # until the worker has begun
        for line in self._process.stdout:
            self.raise_if_cancelled()
            if not line.endswith(b"\n"):
                return
            told = json.loads(line)
            yield told
            if since == math.inf or told["waiting"] or told["moved"] >= before + _SLOWEST:
                since, before = time.monotonic(), told["moved"]
            elif time.monotonic() - since > longest:
                raise TransientError(
                    f"cannot fetch {request['repository']}: {constants.ENDPOINT} stalled, less "
                    f"than {_SLOWEST >> 10} KiB in {longest:.0f} s; what came is kept, pull again "
                    "later",
                    "stalled",
                )

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
