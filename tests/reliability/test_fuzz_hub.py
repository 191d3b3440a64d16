"""Whatever a server answers where the hub should be: a model, or one line about that server."""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import json
import os
import random
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from akunu_py.errors import AkunuError, FetchError
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull.pull import pull
from akunu_py.models.store import cleanup, hub_cache, model_store
from tests.reliability.fuzz import counted, refused
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import in_process as in_process
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Fault, Hub, answering

pytestmark = pytest.mark.rotating

NAME = "model.safetensors"
_DEEP = "@deep@"
WRONG: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**53, 10**400, "", "x", "\ud800", "\x1b[2J\n", "../../x",
    "x" * 5000, [], [1], [None], [[]], ["x"], {}, {"x": 1}, {"": None}, [{}], _DEEP,
]  # fmt: skip
PORTAL = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Welcome</body></html>"
BODIES = [
    b"", b" ", PORTAL, b"null", b"true", b"[]", b"{}", b"5", b'"x"', b"NaN", b"{", b'{"sha":',
    b"\xff\xfe", b"\x00" * 1000, b"[" * 100_000, b"9" * 100_000, b'{"id": 1e999}',
    gzip.compress(b"{}"), b"[]{}",
]  # fmt: skip
STATUSES = [
    *range(200, 207), 226, 299, *range(300, 309), *range(400, 412), 413, 416, 418, 421, 425, 426,
    428, 429, 431, 451, 499, *range(500, 506), 507, 511, 520, 526, 599, 600, 999,
]  # fmt: skip
RETRY_AFTER = [
    "",
    "0",
    "-1",
    "1.5",
    "\u00b2",
    "\u0661",
    "9" * 400,
    "nan",
    "inf",
    "Wed, 21 Oct 2015 07:28:00 GMT",
    "1" * 5000,
]
HEADERS = [
    {"Retry-After": "0"}, {"Location": ""}, {"Location": "/"}, {"Location": "http://"},
    {"Location": "http://[::1"}, {"Location": "file:///etc/passwd"}, {"Location": "http://127.0.0.1:1/"},
    {"Location": "\udcff"}, {"X-Error-Code": "EntryNotFound"}, {"X-Error-Code": "RepoNotFound"},
    {"X-Error-Code": "GatedRepo"}, {"X-Error-Code": "\udcff"}, {"X-Error-Message": "\x1b[2J"},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "br, gzip, x"},
    {"Content-Type": "text/html"}, {"Content-Type": "application/json; charset=nonsense"},
    {"Transfer-Encoding": "chunked"}, {"Transfer-Encoding": "x"}, {"Content-Length": "-1"},
    {"Content-Length": "x"}, {"Content-Length": "99999"}, {"Set-Cookie": "x=" + "y" * 4000},
    {"X-HF-Warning": "a; \x1b[2J"},
    {"Content-Range": "bytes 0-1/2"}, {"Connection": "close"}, {"Location": "/api/models/x/y"},
]  # fmt: skip


def whole_listing(hub: Hub) -> dict[str, Any]:
    """As the hub answers, with every field that huggingface-hub knows of."""
    return hub.listing() | {
        "_id": "66", "modelId": REPOSITORY, "author": "someone", "private": False, "gated": False,
        "disabled": False, "downloads": 5, "downloadsAllTime": 9, "likes": 1, "trendingScore": 0,
        "tags": ["mlx", "en"], "pipeline_tag": "text-generation", "library_name": "mlx",
        "lastModified": "2025-01-01T00:00:00.000Z", "createdAt": "2025-01-01T00:00:00.000Z",
        "mask_token": "[M]", "usedStorage": 100, "widgetData": [{"text": "Hi"}],
        "model-index": None,
        "config": {"model_type": "qwen3", "tokenizer_config": {"eos_token": "x"}},
        "cardData": {"license": "other", "license_name": "own", "license_link": "x",
                     "tags": ["mlx"], "base_model": "x/y", "language": ["en"], "datasets": ["d"],
                     "model-index": [], "eval_results": [],
                     "pipeline_tag": "x", "library_name": "mlx"},
        "transformersInfo": {"auto_model": "AutoModel", "pipeline_tag": "x", "processor": "y"},
        "safetensors": {"parameters": {"BF16": 5}, "total": 5}, "spaces": ["a/b"],
        "gguf": {"total": 5}, "inference": "warm",
        "inferenceProviderMapping": {"p": {"status": "live", "providerId": "q", "task": "t"}},
        "securityRepoStatus": {"scansDone": True},
        "evalResults": [], "baseModels": {"relation": "x", "models": []}, "childrenModelCount": 3,
        "resourceGroup": {"id": "x"},
    }  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is a value, by the keys that lead to it."""
    yield path
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, found in inside:
        yield from places(found, (*path, key))


def altered(value: Any, path: tuple[Any, ...], new: Any) -> bytes:
    """The JSON of `value` with `new` at `path`."""
    value = copy.deepcopy(value)
    if path:
        at = value
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = new
    else:
        value = new
    return json.dumps(value).replace(f'"{_DEEP}"', "[" * 50_000 + "]" * 50_000).encode()


def asking() -> pull_module.Hub:
    """The client of the hub: its process reads the environment when the first request starts it."""
    return pull_module.Hub(lambda *_: None)


def ask(hub: Hub, client: pull_module.Hub, fault: Fault | None) -> hub_cache.HubModel | AkunuError:
    """What comes of a listing that is answered so, however often it is asked for."""
    hub.faults["api"] = deque([fault] * 6 if fault else [])
    client._failures = 0
    try:
        return client.look_up(REPOSITORY, None)
    except AkunuError as error:
        return refused(error)


def listings(hub: Hub) -> list[tuple[str, Fault]]:
    """Every field with every wrong value; every status with every body and every header."""
    listing = whole_listing(hub)
    found = [
        (f"{path} = {new!r:.40}", answering(altered(listing, path, new)))
        for path in places(listing)
        for new in WRONG
    ]
    for status in STATUSES:
        answers: list[tuple[bytes, dict[str, str]]] = [(body, {}) for body in BODIES] + [
            (b"{}", header) for header in HEADERS
        ]
        found += [(f"{status} {a!r:.60}", answering(a[0], status, a[1])) for a in answers]
    for value in RETRY_AFTER:
        header = {"Retry-After": value}
        found += [(f"{header!r:.40}", answering(b"{}", status, header)) for status in (429, 503)]
    return found


def check_listings(hub: Hub, tried: list[tuple[str, Fault]]) -> None:
    come = Counter[str]()
    with asking() as client:
        for what, fault in tried:
            try:
                with counted(__name__):
                    come[type(ask(hub, client, fault)).__name__] += 1
            except Exception as error:
                raise AssertionError(what) from error
    assert come["HubModel"] > len(tried) / 5  # most fields are of no use to a pull
    assert come["FetchError"] > len(tried) / 5


def test_a_listing_of_any_kind(server: Hub) -> None:
    check_listings(server, random.Random(7).sample(listings(server), 60))


@pytest.mark.slow
def test_every_listing(server: Hub) -> None:
    check_listings(server, listings(server))


def test_a_page_that_wants_one_to_sign_in(server: Hub) -> None:
    with asking() as client:
        error = ask(server, client, answering(PORTAL, 200, {"Content-Type": "text/html"}))
    assert f"answer for {REPOSITORY}: expected JSON, found 83" in str(error)
    assert "sign in" in str(error)


def test_a_field_of_any_kind_that_a_pull_needs(server: Hub) -> None:
    listing = whole_listing(server)
    number = [each["rfilename"] for each in listing["siblings"]].index(NAME)
    large = ("siblings", number, "lfs")
    with asking() as client:
        for path in (("sha",), ("siblings",), large[:2], (*large, "sha256"), (*large, "size")):
            for new in WRONG:
                if (path[-1], new) != ("size", 0):
                    error = ask(server, client, answering(altered(listing, path, new)))
                    assert isinstance(error, AkunuError), (path, new)


# What a server answers instead of a file.

CONTENT = random.Random(1).randbytes(3000)
RANGES = ["bytes {}-{}/{}", "bytes {}-{}/*", "bytes */{2}", "x"]


def file_answer(draw: random.Random) -> Fault:
    """An answer to a request for a file: any status, part, length, framing and end."""
    start, end = sorted(draw.sample(range(3001), 2))
    body = draw.choice([CONTENT, CONTENT[start:], CONTENT[:end], CONTENT[start:end], b"", PORTAL,
                        CONTENT + b"x", CONTENT[:-1] + b"?", gzip.compress(CONTENT)])  # fmt: skip
    headers: dict[str, str] = {}
    if draw.random() < 0.5:
        first, last, total = draw.choice(
            [(start, 2999, 3000), (start, end, 3000), (0, 2999, 3000), (end, start, 3000),
             (start, 2999, 10**17), (start, 10**17, 10**17), (-1, 5, 3000), (1000, 2999, 3000)]
        )  # fmt: skip
        headers["Content-Range"] = draw.choice(RANGES).format(first, last, total)
    length = draw.choice([len(body), len(body), len(body), 3000, 0, -1, 10**15, None])
    if length is not None:
        headers["Content-Length"] = str(length)
    elif draw.random() < 0.7:
        headers["Transfer-Encoding"] = "chunked"
        pieces = [body[at : at + 700] for at in range(0, len(body), 700)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        body = framed + draw.choice([b"0\r\n\r\n", b"0\r\n\r\n", b"", b"zz\r\n", b"ffffffff\r\n"])
    if draw.random() < 0.2:
        headers |= draw.choice(HEADERS)
    status = draw.choice([200, 200, 206, 206, 206, draw.choice(STATUSES)])
    return answering(body, status, headers, length=False)


def check_file(hub: Hub, home: Path, seed: int) -> bool:
    """Some answers of any kind, then a hub as it should be: the third pull at the latest works, no
    wrong bytes get a name. Whether the first pull failed."""
    draw = random.Random(seed)
    shutil.rmtree(home / "hub", ignore_errors=True)
    digest = hashlib.sha256(CONTENT).hexdigest()
    file = hub_cache.HubFile(NAME, len(CONTENT), digest, True)
    model = hub_cache.HubModel(REPOSITORY, "main", hub.commit, (file,), "")
    blob = hub_cache.CachedRepository(REPOSITORY).blob_path(file)
    hub.requests.clear()
    cut = Fault(cut=draw.choice([0, 1000, 2999]))
    hub.faults[NAME] = deque([cut, *(file_answer(draw) for _ in range(draw.randint(1, 8)))])
    failures = 0
    while failures <= 2:
        try:
            with asking() as client:
                client.fetch(model, [file])
            break
        except AkunuError as error:
            refused(error)
            assert not blob.exists()
            assert len(hub.asked(NAME)) <= 5 * 6 * 11, "of each try the library makes six"
            hub.requests.clear()
            hub.faults[NAME].clear()
            failures += 1
    assert failures <= 2
    assert blob.read_bytes() == CONTENT
    return failures > 0


def check_files(hub: Hub, home: Path, seeds: range) -> None:
    hub.files = {NAME: CONTENT}
    failed = 0
    for seed in seeds:
        try:
            with counted(__name__):
                failed += check_file(hub, home, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert len(seeds) / 10 < failed < len(seeds) * 0.95  # neither all, nor hardly any


@pytest.mark.usefixtures("in_process")
def test_a_file_answered_in_any_way(server: Hub, home: Path) -> None:
    check_files(server, home, range(50))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_files_answered_in_any_way(server: Hub, home: Path) -> None:
    check_files(server, home, range(1000, 3000))


# What is set on this machine.

ENVIRONMENTS = [
    {"ALL_PROXY": value}
    for value in ("socks5://h:9", "socks4://u:hf_secret@h", "x", "http://", "http://[", "\x1b:")
] + [
    {"HTTP_PROXY": "socks4://u:hf_secret@h"},
    {"HTTP_PROXY": "http://["},
] + [
    {"HF_TOKEN": value}
    for value in ("hf_secret\x01", "hf_secr\u00e9t", "hf_secret\nx", " ", "x" * 9000)
] + [{"SSL_CERT_FILE": "/no/such"}, {"SSL_CERT_FILE": "/dev/null"}]  # fmt: skip
ENDPOINTS = [
    "", "x", "http://", "http://[::1", "ftp://127.0.0.1", "http://127.0.0.1:0", "\x1b[2J",
    "http://127.0.0.1:99999", "http://\u00e9.invalid\u2028", "http://a b", "socks5://x",
]  # fmt: skip


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_whatever_the_environment_says(
    server: Hub, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with asking() as client:
        ask(server, client, None)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_whatever_the_endpoint_is(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint or "/")
    with pytest.raises(AkunuError):
        pull(REPOSITORY)


# What earlier pulls left on this disk.


def check_kept(path: Path, read: Callable[[], object], texts: Iterable[bytes]) -> None:
    """`read` takes every content and every kind of file in the place of `path`."""
    for text in texts:
        path.write_bytes(text)
        read()
    for kind in ("directory", "fifo", "sparse", "/dev/zero", "nowhere"):
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "sparse":
            with path.open("wb") as file:
                file.truncate(20 << 30)
        else:
            path.symlink_to(kind)
        read()
        if kind == "directory":
            path.rmdir()
            path.touch()


def test_notes_of_pulls_of_any_kind(server: Hub, home: Path) -> None:
    server.faults[NAME] = deque([Fault(cut=20_000), *[Fault(status=500)] * 5])
    with pytest.raises(FetchError):
        pull(REPOSITORY)
    (note,) = (home / "data").rglob(".pulling/*.json")
    value = json.loads(note.read_bytes())
    assert len(cleanup.find_leftovers()) == 1

    def read() -> None:
        for leftover in cleanup.find_leftovers():
            for path in leftover.paths:
                assert path.parent.parent.parent == home / "hub" or path.parent == note.parent

    texts = [altered(value, path, new) for path in places(value) for new in WRONG]
    check_kept(note, read, [*texts, *BODIES])


def test_refs_of_any_kind(server: Hub, home: Path) -> None:
    pull(REPOSITORY)
    assert hub_cache.cached_model(REPOSITORY, "main")
    (ref,) = (home / "hub").rglob("refs/main")
    texts = [b"..", b".", b"/", b"\0", b"a" * 40, b"a" * 100_000, b"x\n" * 20, b"\xe9" * 40]

    def read() -> None:
        assert hub_cache.cached_model(REPOSITORY, "main") is None

    check_kept(ref, read, [*texts, *BODIES])


# Links where we write.


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "kind",
    [
        "symlink",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("hard link", "dangling", "fifo")),
    ],
)
def test_what_links_lead_to_is_never_written(server: Hub, home: Path, kind: str) -> None:
    """Every file that a pull leaves, unfinished and finished, becomes a link in turn."""
    victim = home / "victim"
    for finished in (False, True):
        server.faults.clear()
        if not finished:
            server.faults[NAME] = deque([Fault(cut=20_000), *[Fault(status=500)] * 5])
        with contextlib.nullcontext() if finished else pytest.raises(FetchError):
            pull(REPOSITORY)
        server.faults.clear()
        for kept in ("data", "hub"):
            shutil.copytree(home / kept, home / f"{kept}.{finished}", symlinks=True)
    tried = 0
    for finished in (False, True):
        originals = [home / f"{kept}.{finished}" for kept in ("data", "hub")]
        for path in sorted(
            p for original in originals for p in original.rglob("*") if not p.is_dir()
        ):
            for original in originals:
                shutil.rmtree(original.with_suffix(""), ignore_errors=True)
                shutil.copytree(original, original.with_suffix(""), symlinks=True)
            place = home / path.relative_to(home).as_posix().replace(f".{finished}", "", 1)
            victim.write_bytes(b"mine" * 10)
            place.unlink()
            if kind == "hard link":
                os.link(victim, place)
            elif kind == "fifo":
                os.mkfifo(place)
            else:
                place.symlink_to(victim if kind == "symlink" else home / "new")
            for work in (lambda: model_store.remove("tiny-model"), lambda: pull(REPOSITORY)):
                with contextlib.suppress(AkunuError):
                    work()
            assert victim.read_bytes() == b"mine" * 10, (kind, place)
            assert not (home / "new").exists(), (kind, place)
            tried += 1
    assert tried > 20
