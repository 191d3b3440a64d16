"""The Hugging Face hub: what a repository holds at a commit, its errors in our words, and retries.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to every program that uses
huggingface-hub. File names that lead out of a directory and weights as pickle are never accepted.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from akunu_py.errors import (
    Cancelled,
    FetchError,
    UnknownModel,
    UnsupportedModel,
    UsageError,
    one_line,
)
from akunu_py.models.progress import ProgressCallback

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_OWNER = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-]))*"
_REPOSITORY = re.compile(rf"({_OWNER}/{_OWNER})(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What mlx-lm and transformers read of a model; no directory below, no code, nothing else.
_WEIGHTS = re.compile(r"model[A-Za-z0-9._-]*\.safetensors")
_WANTED = re.compile(
    rf"{_WEIGHTS.pattern}|(?:config|generation_config|hf_quant_config|model\.safetensors\.index"
    r"|tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|vocab)\.json"
    r"|chat_template\.jinja|tokenizer\.model|merges\.txt|vocab\.txt|[A-Za-z0-9_-]+\.tiktoken"
)
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BUSY = (408, 429, 500, 502, 503, 504)
_ATTEMPTS = 5  # without a single new byte
_FIRST_WAIT_S = 0.5  # doubled with each failure
_LONGEST_WAIT_S = 60.0  # what a Retry-After may ask for


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


def look_up(repository: str, revision: str | None, retries: Retries) -> HubModel:
    """What `repository` holds at `revision` (None: its main branch).

    Raises FetchError, UnknownModel where there is no such repository or revision, and
    UnsupportedModel for one that holds no safetensors.
    """
    from huggingface_hub import HfApi, constants

    with hub_errors(repository, revision):
        info = retries.call(
            lambda: HfApi(endpoint=constants.ENDPOINT).model_info(
                repository,
                revision=revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        )
    return _hub_model(repository, revision, info)


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


def is_valid_file(file: HubFile) -> bool:
    """Whether its name, size and digest are what they should be, and safe as names of files."""
    form = _SHA256 if file.large else _COMMIT
    plain = _WANTED.fullmatch(file.name) and form.fullmatch(file.digest)
    return bool(plain) and isinstance(file.size, int) and file.size >= 0


@contextlib.contextmanager
def hub_errors(repository: str, revision: str | None = None) -> Iterator[None]:
    """Turns what huggingface-hub raises into our errors, each with what to do."""
    import httpx2
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchError(
            f"{repository} is gated: its owner wants you to accept terms first; open "
            f"{host}/{repository} in a browser, accept them, then run `hf auth login` or set "
            "HF_TOKEN, and pull again"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UnknownModel(
            f"{repository} has no revision {revision!r}; leave it out, or see {host}/{repository}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModel(
            f"{host} knows no {repository}, or does not show it to you; check the spelling, and "
            "for a private or gated one run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise offline_error(repository) from error
    except errors.HfHubHTTPError as error:
        raise FetchError(_http_message(repository, host, error.response.status_code)) from error
    except httpx2.HTTPError as error:
        raise FetchError(
            f"cannot fetch {repository}: {host} does not answer ({one_line(error)}); check the "
            "network, HTTPS_PROXY and HF_ENDPOINT, then pull again"
        ) from error
    except errors.HFValidationError as error:
        raise UsageError(f"{repository[:80]!r} is not the name of a repository") from error


def offline_error(repository: str) -> FetchError:
    """For a repository that would have to be fetched."""
    return FetchError(
        f"{repository} is not whole in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it; "
        "unset it and pull again"
    )


class Retries:
    """Retries with exponential back-off while the hub is busy or the connection breaks.

    Gives up after five failures without a single new byte. cancelled: polled during every wait;
    Cancelled is raised where it is true. progress: called with why there is a wait.
    """

    def __init__(self, cancelled: Callable[[], bool], progress: ProgressCallback) -> None:
        self._cancelled, self._progress = cancelled, progress
        self._failures = 0

    def raise_if_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled("cancelled; what was fetched is kept, pull again to go on")

    def reset(self) -> None:
        """Forgets the failures so far: new bytes came."""
        self._failures = 0

    def call(self, request: Callable[[], Any]) -> Any:
        """The result of `request`, called again where it fails for a reason that may pass."""
        while True:
            self.raise_if_cancelled()
            with self.attempt():
                return request()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Suppresses a failure that may pass, after a wait; raises others, and one too many."""
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status not in _BUSY or self._last_failure():
                raise
            self._wait(_retry_after(error.response.headers), f"busy ({status})")
        except httpx2.TransportError:
            if self._last_failure():
                raise
            self._wait(0.0, "connection lost")

    def _last_failure(self) -> bool:
        self._failures += 1
        return self._failures >= _ATTEMPTS

    def _wait(self, retry_after_s: float, why: str) -> None:
        until = time.monotonic() + max(
            _FIRST_WAIT_S * 2 ** (self._failures - 1), min(retry_after_s, _LONGEST_WAIT_S)
        )
        while (left := until - time.monotonic()) > 0:
            self._progress(f"waiting: {why}", 0, 0)
            self.raise_if_cancelled()
            time.sleep(min(left, 0.1))


def _hub_model(repository: str, revision: str | None, info: ModelInfo) -> HubModel:
    """The hub's answer, after a check that every field is valid."""
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise FetchError(f"the hub names no commit of {repository}; check HF_ENDPOINT")
    files = []
    for name in choose_files(list(siblings)):
        sibling = siblings[name]
        large = sibling.lfs is not None
        digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        size = sibling.lfs.size if sibling.lfs is not None else sibling.size
        file = HubFile(name, size if size is not None else -1, str(digest), large)
        if not is_valid_file(file):
            raise FetchError(
                f"the hub gives no size and hash of {name} in {repository}; check HF_ENDPOINT"
            )
        files.append(file)
    card = info.card_data.to_dict() if info.card_data else {}
    named = card.get("license_name") if card.get("license") == "other" else card.get("license")
    return HubModel(repository, revision or "main", info.sha, tuple(files), str(named or ""))


def _no_weights(names: list[str]) -> str:
    if any(name.endswith(".gguf") for name in names):
        return (
            "the repository holds GGUF files only: fetch the one you want, then "
            "`akunu models import FILE`"
        )
    if pickles := [name for name in names if name.endswith(_PICKLE)]:
        return (
            f"the repository holds its weights as pickle only ({pickles[0][:60]}), a format that "
            "can run any code; look for a conversion to safetensors, as mlx-community has them"
        )
    return "the repository holds no weights (model*.safetensors); look for another one"


def _http_message(repository: str, host: str, status: int) -> str:
    if status in (401, 403):
        return (
            f"{host} refuses {repository} ({status}): the token in HF_TOKEN or of `hf auth login` "
            "is wrong, or may not read it; get another one, and pull again"
        )
    if status == 429:
        return f"{host} has had too many requests from here (429); wait a while, then pull again"
    if status == 404:
        return f"{host} has no longer what it listed for {repository} (404); pull again"
    return f"{host} fails on {repository} ({status}); pull again later, what is here is kept"


def _retry_after(headers: Any) -> float:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0
