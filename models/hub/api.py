"""The Hugging Face hub: what a repository holds at a commit.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to every program that uses
huggingface-hub. File names that lead out of a directory and weights as pickle are never accepted.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from akunu_py.errors import FetchError, UnsupportedModel
from akunu_py.files import parse_json
from akunu_py.models.hub.request import Answer, Retries, TransientError, request
from akunu_py.text import on_one_line

_OWNER = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-]))*"
_REPOSITORY = re.compile(rf"({_OWNER}/{_OWNER})(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# What mlx-lm and transformers read of a model; no directory below, no code, nothing else.
_WEIGHTS = re.compile(r"model[A-Za-z0-9._-]*\.safetensors")
_HEADS = re.compile(r"mtp[A-Za-z0-9._-]*\.safetensors")  # what drafts for them
_WANTED = re.compile(
    rf"{_WEIGHTS.pattern}|{_HEADS.pattern}|(?:config|generation_config|hf_quant_config|model\.safetensors\.index"
    r"|tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|vocab)\.json"
    r"|chat_template\.jinja|tokenizer\.model|merges\.txt|vocab\.txt|[A-Za-z0-9_-]+\.tiktoken"
)
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST = 1 << 50  # bytes
_LARGEST_SETTING = 1 << 30  # of all but weights
_LISTING_LIMIT = 8 << 20  # 40,000 files
_LISTING_S = 60.0
_NOT_THE_HUB = (
    "is it the hub that answers? check the network (does it want you to sign in?) and HF_ENDPOINT"
)


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
    from huggingface_hub import constants

    url = f"{constants.ENDPOINT}/api/models/{repository}"
    url += f"/revision/{quote(revision, safe='')}" if revision else ""

    def ask() -> Any:
        with request(f"{url}?blobs=true", repository, retries, revision=revision) as answer:
            return _read(answer, f"{constants.ENDPOINT} answers {repository} wrong")

    return _hub_model(repository, revision, retries.call(ask))


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


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def is_valid_file(file: HubFile) -> bool:
    """Whether its name, size and digest are what they should be, and safe as names of files."""
    if not isinstance(file.name, str) or not isinstance(file.digest, str) or len(file.name) > 200:
        return False
    form = _SHA256 if file.large else _COMMIT
    plain = _WANTED.fullmatch(file.name) and form.fullmatch(file.digest)
    largest = _LARGEST if file.name.endswith(".safetensors") else _LARGEST_SETTING
    return bool(plain) and type(file.size) is int and 0 <= file.size <= largest


def _read(answer: Answer, wrong: str) -> Any:
    """The listing's JSON, of a bounded size, that came in a bounded time. wrong: begins errors."""
    data, until = bytearray(), time.monotonic() + _LISTING_S
    for chunk in answer.chunks:
        data += chunk
        if len(data) > _LISTING_LIMIT:
            raise FetchError(
                f"{wrong}: expected at most {_LISTING_LIMIT >> 20} MiB, found more; {_NOT_THE_HUB}"
            )
        if time.monotonic() > until:
            raise TransientError(f"{wrong}: not all came in {_LISTING_S:.0f} s", "slow")
    try:
        return parse_json(bytes(data))
    except ValueError as error:
        kind = on_one_line(answer.headers.get("Content-Type", "no type"))[:40]
        raise FetchError(
            f"{wrong}: expected JSON, found {len(data):,} bytes of {kind}; {_NOT_THE_HUB}"
        ) from error


def _hub_model(repository: str, revision: str | None, listing: Any) -> HubModel:
    """The hub's answer, after a check that every field that is used is valid."""
    listing = listing if isinstance(listing, dict) else {}
    commit, siblings = listing.get("sha"), listing.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise FetchError(f"the hub names no commit of {repository}; {_NOT_THE_HUB}")
    if not isinstance(siblings, list) or not all(map(_is_named, siblings)):
        raise FetchError(f"the hub does not list the files of {repository}; {_NOT_THE_HUB}")
    listed = {sibling["rfilename"]: sibling for sibling in siblings}
    files = []
    for name in choose_files(list(listed)):
        sibling = listed[name]
        large = sibling.get("lfs")
        digest = large.get("sha256") if isinstance(large, dict) else sibling.get("blobId")
        size = (large if isinstance(large, dict) else sibling).get("size")
        file = HubFile(name, size, digest, bool(large))  # type: ignore[arg-type]
        if not is_valid_file(file):
            raise FetchError(
                f"the hub gives no size and hash of {name} in {repository}; {_NOT_THE_HUB}"
            )
        files.append(file)
    return HubModel(repository, revision or "main", commit, tuple(files), _licence(listing))


def _is_named(sibling: Any) -> bool:
    return isinstance(sibling, dict) and isinstance(sibling.get("rfilename"), str)


def _licence(listing: dict[str, Any]) -> str:
    """What the model card says, "" where it says nothing that is a name."""
    card = listing.get("cardData")
    card = card if isinstance(card, dict) else {}
    named = card.get("license_name") if card.get("license") == "other" else card.get("license")
    return on_one_line(named)[:100] if isinstance(named, str) else ""


def _no_weights(names: list[str]) -> str:
    if any(name.endswith(".gguf") for name in names):
        return (
            "the repository holds GGUF files only: fetch the one you want, then "
            "`akunu models import FILE`"
        )
    if pickles := [name for name in names if name.endswith(_PICKLE)]:
        return (
            f"the repository holds its weights as pickle only ({pickles[0][:60]!r}), a format that "
            "can run any code; look for a conversion to safetensors, as mlx-community has them"
        )
    return "the repository holds no weights (model*.safetensors); look for another one"
