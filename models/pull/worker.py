"""The process that downloads for a pull: `python -m akunu_py.models.pull.worker`.

Reads requests from stdin and writes messages to stdout, one JSON object per line: `moved` (bytes
received or checked) and `waiting` (for locks of other programs), then `result` or `error`. The
parent kills this process to cancel a request, because an HTTP request cannot be interrupted.

huggingface-hub transfers the files, but its own downloads discard an interrupted file. Here the
bytes go to `blobs/<digest>.incomplete`, where the next pull continues. The file gets its name only
if size and hash are right.
"""

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from akunu_py.errors import AkunuError, FetchError, UnknownModel, describe
from akunu_py.models.store.directories import open_writable, store_errors, sync
from akunu_py.models.store.hub_cache import (
    CachedRepository,
    HubFile,
    HubModel,
    choose_files,
    is_commit,
    is_valid_metadata,
    verify,
)
from akunu_py.text import on_one_line

_PARALLEL = 8  # files at a time, like `hf download`
_REPORT_INTERVAL_S = 0.2
_TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
_NO_SUCH_PART = 416


class TransientError(FetchError):
    """A failure that may pass, so that the parent tries again."""

    def __init__(self, message: str, why: str = "connection lost", after_s: float = 0) -> None:
        super().__init__(message)
        self.why = why  # in two words, for the progress display
        self.after_s = after_s  # the server's Retry-After


class _Activity:
    """Counters that let the parent tell a slow transfer from a stalled one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.moved = 0
        self.waiting = 0  # files whose lock another program holds

    def add(self, moved: int = 0, waiting: int = 0) -> None:
        with self._lock:
            self.moved += moved
            self.waiting += waiting


_ACTIVITY = _Activity()


class _Bar(tqdm):
    """The progress bar for huggingface-hub's transfers: it counts and shows nothing."""

    def __init__(self, **_: Any) -> None:
        super().__init__(disable=True)

    def update_transfer(self, size: int) -> None:
        """Count bytes from the network; negative if the library starts over."""
        _ACTIVITY.add(moved=size)

    def set_transfer_postfix_str(self, text: str, refresh: bool = False) -> None:
        pass


class _LimitedFile(io.BufferedRandom):
    """A file that accepts no more than `limit` bytes."""

    limit = 0

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.limit:
            raise _TooLong
        return super().write(data)


class _TooLong(Exception):
    """The server sent more bytes than the hub lists."""


def main() -> None:
    """Answer the requests on stdin, one at a time."""
    import huggingface_hub.file_download  # noqa: F401 - slow, and the parent is busy too

    with contextlib.redirect_stdout(sys.stderr):  # keep libraries off our stdout
        for line in sys.stdin:
            threading.Thread(target=_handle, args=(json.loads(line),), daemon=True).start()
    os._exit(0)  # the parent has closed our stdin


def _handle(request: dict[str, Any]) -> None:
    repository, revision = request["repository"], request["revision"]
    try:
        if "files" not in request:
            (model,) = _run([lambda: look_up(repository, revision)], request)
            _send(result=asdict(model))
            return
        # The largest first, because they take longest.
        files = sorted((HubFile(**file) for file in request["files"]), key=lambda file: -file.size)
        model = HubModel(repository, revision, request["commit"], tuple(files), "")
        fetched = _run([partial(_fetch, model, file) for file in files], request)
        named = zip(files, fetched, strict=True)
        _send(result=[file.name for file, is_new in named if is_new])
    except AkunuError as error:
        # `vars`: why and after_s of a TransientError
        _send(error=str(error), kind=type(error).__name__, **vars(error))


def _run(work: list[Callable[[], Any]], request: dict[str, Any]) -> list[Any]:
    """Run all of `work` at once and report activity. Raise the first error as an AkunuError."""
    pool = ThreadPoolExecutor(_PARALLEL)
    jobs = [pool.submit(each) for each in work]
    try:
        while wait(jobs, _REPORT_INTERVAL_S, FIRST_EXCEPTION).not_done:
            if any(job.done() and job.exception() for job in jobs):
                break
            unfinished = sum(job.running() for job in jobs)
            waiting = 0 < _ACTIVITY.waiting == unfinished
            _send(moved=_ACTIVITY.moved, waiting=waiting)
        return [job.result() for job in jobs if job.done()]
    except AkunuError:
        raise
    except Exception as error:  # anything that huggingface-hub raises
        # Only fetching writes files. A look-up may fail to read the certificates, for example.
        if isinstance(error, OSError) and error.errno is not None and "files" in request:
            with store_errors(f"cannot keep {request['repository']} in the hub's cache", "HF_HOME"):
                raise
        raise _akunu_error(error, request["repository"], request["revision"]) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _send(**what: Any) -> None:
    print(json.dumps(what), file=sys.__stdout__, flush=True)


def look_up(repository: str, revision: str | None) -> HubModel:
    """Return the contents of a repository. Raises ValueError, or others, for unexpected answers."""
    from huggingface_hub import HfApi, constants

    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=timeout)
    commit, listed = info.sha or "", {each.rfilename: each for each in info.siblings or ()}
    if not is_commit(commit):
        raise ValueError("no commit")
    files = []
    for name in choose_files(list(listed)):
        found = listed[name]
        size = found.lfs.size if found.lfs else found.size
        digest = found.lfs.sha256 if found.lfs else found.blob_id
        file = HubFile(name, size, digest, bool(found.lfs))  # type: ignore[arg-type]
        if not is_valid_metadata(file):
            raise ValueError(f"no size and hash of {name}")
        files.append(file)
    card: Any = info.card_data or {}
    license = card.get("license_name") if card.get("license") == "other" else card.get("license")
    license = on_one_line(license)[:100] if isinstance(license, str) else ""
    return HubModel(repository, revision or "main", commit, tuple(files), license)


def _fetch(model: HubModel, file: HubFile) -> bool:
    """Fetch one file into the cache. Return False if the cache has the file."""
    cached = CachedRepository(model.repository)
    _ACTIVITY.add(waiting=1)
    with cached.lock(file):
        _ACTIVITY.add(waiting=-1)
        if cached.has(model, file):
            return False
        path = cached.partial_path(file)
        with _LimitedFile(io.FileIO(open_writable(path), "r+")) as output:
            if output.seek(0, os.SEEK_END) > file.size:
                output.truncate(output.seek(0))
            resumed = output.tell()
            output.limit = file.size
            try:
                _transfer(model, file, output)
            except _TooLong:
                output.truncate(0)
                kind = TransientError if resumed else FetchError
                raise kind(_wrong_size_message(file, f"more than {file.size:,}")) from None
            except OSError as error:
                size = output.tell()
                response = getattr(error, "response", None)
                is_wrong_size = error.errno is None and response is None  # the library's own check
                refused = response is not None and response.status_code == _NO_SUCH_PART
                # Keep the bytes only if a resumed file has grown.
                if refused or (is_wrong_size and not 0 < resumed < size):
                    output.truncate(0)
                if not is_wrong_size:
                    raise
                message = _wrong_size_message(file, f"{size:,} bytes in total")
                raise TransientError(message, "wrong answer") from error
        _verify_download(file, path, bool(resumed))
        sync(path)
        os.replace(path, cached.blob_path(file))
        return True


def _transfer(model: HubModel, file: HubFile, output: _LimitedFile) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import (  # type: ignore[attr-defined]
        http_get,
        is_xet_available,
        xet_get,
    )
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    # Write bytes as they arrive: the library's 10 MB blocks would be lost, and look stalled.
    constants.DOWNLOAD_CHUNK_SIZE = None  # type: ignore[assignment]
    url = hf_hub_url(model.repository, file.name, revision=model.commit)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    # Xet starts every file over, so a partial file is completed over HTTP.
    xet = None
    if file.large and not output.tell() and is_xet_available():
        xet = get_hf_file_metadata(url, headers=headers).xet_file_data
    common: dict[str, Any] = {"headers": headers, "expected_size": file.size, "tqdm_class": _Bar}
    if xet is None:
        http_get(url, output, resume_size=output.tell(), displayed_filename=file.name, **common)
        return
    try:
        path = CachedRepository(model.repository).partial_path(file)
        xet_get(incomplete_path=path, xet_file_data=xet, **common)
    except Exception as error:  # anything that hf_xet raises
        message = f"cannot fetch {file.name} over Xet: {_reason(error)}; pull again"
        raise TransientError(message) from error


def _verify_download(file: HubFile, path: Path, resumed: bool) -> None:
    try:
        verify(file, path, _ACTIVITY.add, "the download was deleted, pull again")
    except FetchError as error:
        path.unlink()
        if resumed:  # its beginning may come from an earlier pull, so fetch it once more
            raise TransientError(str(error), "wrong answer") from None
        raise


def _wrong_size_message(file: HubFile, found: str) -> str:
    from huggingface_hub import constants

    return (
        f"{constants.ENDPOINT} sends {file.name} in the wrong size: expected {file.size:,} bytes, "
        f"found {found}; pull again, and check the network and HF_ENDPOINT"
    )


def _akunu_error(error: BaseException, repository: str, revision: str | None) -> AkunuError:
    import httpx2
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    check = "check the network, HTTPS_PROXY, SSL_CERT_FILE and HF_ENDPOINT, then pull again"
    match error:
        case errors.GatedRepoError():
            return FetchError(
                f"{repository} is gated: accept its terms at {host}/{repository} in a browser, run "
                "`hf auth login` or set HF_TOKEN, and pull again"
            )
        case errors.RevisionNotFoundError():
            return UnknownModel(
                f"{repository} has no revision {revision!r}; omit it, or see {host}/{repository}"
            )
        case errors.RepositoryNotFoundError():
            return UnknownModel(
                f"{host} has no public repository {repository}; check the spelling, and for a "
                "private or gated one run `hf auth login` or set HF_TOKEN"
            )
        case errors.HfHubHTTPError():
            return _http_error(repository, host, error.response)
        case ImportError() | ValueError() if "proxy" in str(error).lower():
            return FetchError(
                f"cannot use the proxy of ALL_PROXY, HTTPS_PROXY or HTTP_PROXY: {_reason(error)}; "
                "correct or unset it, or `pip install socksio` for a SOCKS proxy"
            )
        case httpx2.LocalProtocolError():  # its text may contain the token
            return FetchError(
                f"cannot request {repository} from {host}: HF_TOKEN or HF_ENDPOINT contains "
                "characters that are not allowed in a request; correct it and pull again"
            )
        case httpx2.TransportError() if not isinstance(error, httpx2.UnsupportedProtocol):
            return TransientError(
                f"cannot fetch {repository}: {host} does not answer ({_reason(error)}); {check}",
                "no connection" if isinstance(error, httpx2.ConnectError) else "connection lost",
            )
        case ValueError() | TypeError() | LookupError() | AttributeError() | RecursionError():
            return FetchError(
                f"{host} sent an unexpected answer for {repository} ({_reason(error)}); check the "
                "network (does it require you to sign in?) and HF_ENDPOINT"
            )
        case _:
            return FetchError(f"cannot fetch {repository} from {host}: {_reason(error)}; {check}")


def _reason(error: BaseException) -> str:
    """Return a library's message, short and safe for a terminal."""
    return on_one_line(describe(error))[:200]


def _http_error(repository: str, host: str, response: Any) -> FetchError:
    status = response.status_code
    if status in (401, 403):
        return FetchError(
            f"{host} refuses {repository} ({status}): the token in HF_TOKEN or of `hf auth login` "
            "is wrong or has no access; use another token, and pull again"
        )
    if status == 404:
        return FetchError(f"{host} no longer has a file of {repository} (404); pull again")
    message = f"{host} fails on {repository} ({status}); pull again later to continue"
    if status == 429:
        message = f"{host} received too many requests from here (429); wait, then pull again"
    if status == _NO_SUCH_PART:
        return TransientError(message, "no such part")
    if status not in _TRANSIENT_STATUSES:
        return FetchError(message)
    after = response.headers.get("Retry-After", "")
    after_s = float(after) if after.isascii() and after.isdigit() else 0.0
    return TransientError(message, f"busy ({status})", after_s)


if __name__ == "__main__":
    main()
