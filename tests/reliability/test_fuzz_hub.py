"""Hostile answers in place of the hub: a model, or one line about the server, in bounded memory."""

import contextlib
import copy
import gzip
import hashlib
import json
import random
import resource
import shutil
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from huggingface_hub import constants

from akunu_py.errors import AkunuError, FetchError
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull.pull import pull
from akunu_py.models.store import hub_cache, model_store
from tests.reliability.fuzz import peak_mb, refused
from tests.support.hub_home import WEIGHTS
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import in_process as in_process
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Fault, Hub, answering

_DEEP = "@deep@"


WRONG: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**53, 10**400, "", "x", "\ud800", "\x1b[2J\n", "../../x",
    "x" * 5000, [], [1], [None], [[]], ["x"], {}, {"x": 1}, {"": None}, [{}], _DEEP,
]  # fmt: skip
PORTAL = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Welcome</body></html>"
STATUSES = [200, 201, 204, 206, 299, 301, 302, 307, 400, 401, 403, 404, 416, 429, 500, 503, 999]
HEADERS = [
    {"Retry-After": "\u00b2"}, {"Retry-After": "1" * 5000}, {"Location": ""},
    {"Location": "http://[::1"}, {"Location": "file:///etc/passwd"}, {"Location": "\udcff"},
    {"X-Error-Code": "GatedRepo"}, {"X-Error-Message": "\x1b[2J"}, {"Content-Encoding": "gzip"},
    {"Content-Type": "application/json; charset=nonsense"}, {"Transfer-Encoding": "chunked"},
    {"Content-Length": "-1"}, {"Content-Length": "99999"}, {"Content-Range": "bytes 0-1/2"},
]  # fmt: skip


def altered(value: Any, path: tuple[Any, ...], new: Any) -> bytes:
    """Return the JSON of `value` with `new` at `path`."""
    at = value = copy.deepcopy(value)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return json.dumps(value).replace(f'"{_DEEP}"', "[" * 50_000 + "]" * 50_000).encode()


def look_up(hub: Hub, fault: Fault | None) -> hub_cache.HubModel | AkunuError:
    """Return the model or the error if every listing is answered with `fault`."""
    hub.faults["api"] = deque([fault] * 6 if fault else [])
    try:
        with pull_module.Hub(lambda *_: None) as client:
            return client.look_up(REPOSITORY, None)
    except AkunuError as error:
        return refused(error)


@pytest.mark.usefixtures("in_process")
def test_page_that_wants_a_sign_in_is_named(server: Hub) -> None:
    error = look_up(server, answering(PORTAL, 200, {"Content-Type": "text/html"}))
    assert f"answer for {REPOSITORY}: expected JSON, found 83" in str(error)
    assert "sign in" in str(error)
    assert "expected status 200, found 201" in str(look_up(server, answering(b"{}", 201)))


@pytest.mark.usefixtures("in_process")
def test_wrong_value_of_a_needed_field_is_refused(server: Hub) -> None:
    listing = server.listing()
    number = [each["rfilename"] for each in listing["siblings"]].index(WEIGHTS)
    large = ("siblings", number, "lfs")
    for path in (("sha",), ("siblings",), large[:2], (*large, "sha256"), (*large, "size")):
        for new in WRONG:
            if (path[-1], new) != ("size", 0):
                error = look_up(server, answering(altered(listing, path, new)))
                assert isinstance(error, AkunuError), (path, new)


CONTENT = random.Random(1).randbytes(3000)
RANGES = ["bytes {}-{}/{}", "bytes {}-{}/*", "bytes */{2}", "x"]


def file_answer(draw: random.Random) -> Fault:
    """Return any answer to a request for a file: status, part, length, framing and end."""
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
    """Pull with faults, then without: the third pull works at the latest, and wrong bytes get no
    name. Return True if the first pull failed."""
    draw = random.Random(seed)
    shutil.rmtree(home / "hub", ignore_errors=True)
    digest = hashlib.sha256(CONTENT).hexdigest()
    file = hub_cache.HubFile(WEIGHTS, len(CONTENT), digest, True)
    model = hub_cache.HubModel(REPOSITORY, "main", hub.commit, (file,), "")
    blob = hub_cache.CachedRepository(REPOSITORY).blob_path(file)
    hub.requests.clear()
    cut = Fault(cut=draw.choice([0, 1000, 2999]))
    hub.faults[WEIGHTS] = deque([cut, *(file_answer(draw) for _ in range(draw.randint(1, 8)))])
    failures = 0
    for _ in range(3):
        try:
            with pull_module.Hub(lambda *_: None) as client:
                client.fetch(model, [file])
            break
        except AkunuError as error:
            refused(error)
            assert not blob.exists()
            assert len(hub.requested(WEIGHTS)) <= 5 * 6 * 11, "of each try the library makes six"
            hub.requests.clear()
            hub.faults[WEIGHTS].clear()
            failures += 1
    assert blob.read_bytes() == CONTENT
    return failures > 0


@pytest.mark.usefixtures("in_process")
def test_any_answer_for_a_file_leaves_no_wrong_bytes(server: Hub, home: Path) -> None:
    server.files = {WEIGHTS: CONTENT}
    failed = 0
    for seed in range(50):
        try:
            failed += check_file(server, home, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert 5 < failed < 47  # neither all nor hardly any


def stop_in_the_weights(server: Hub) -> None:
    """Make a pull fail that leaves a partial file."""
    server.faults[WEIGHTS] = deque([Fault(cut=20_000), *[Fault(status=500)] * 5])
    with pytest.raises(FetchError):
        pull(REPOSITORY)
    server.faults.clear()


@pytest.mark.usefixtures("in_process")
def test_links_are_never_written_through(server: Hub, home: Path) -> None:
    """Every file of a pull, unfinished and finished, becomes a link in turn."""
    victim = home / "victim"
    for finished in (False, True):
        if finished:
            pull(REPOSITORY)
        else:
            stop_in_the_weights(server)
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
            place.symlink_to(victim)
            for work in (lambda: model_store.remove("tiny-model"), lambda: pull(REPOSITORY)):
                with contextlib.suppress(AkunuError):
                    work()
            assert victim.read_bytes() == b"mine" * 10, place
            tried += 1
    assert tried > 20


def pouring(start: bytes, piece: bytes, pause: float = 0.0) -> Fault:
    """Return an endless answer."""

    def write(out: BinaryIO) -> None:
        out.write(start)
        while True:
            out.write(piece)
            time.sleep(pause)

    return Fault(raw=write)


def gzip_bomb() -> bytes:
    """3 GB in 3 MB."""
    pack = zlib.compressobj(1, wbits=31)
    start = pack.compress(b"[") + pack.flush(zlib.Z_FULL_FLUSH)
    return start + 3000 * (pack.compress(b" " * (1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH))


CHUNKED = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "a body": pouring(b"HTTP/1.1 200 X\r\n\r\n", b"[0," * 20_000),
    "a busy body": pouring(b"HTTP/1.1 503 X\r\n\r\n", b"x" * 60_000),
    "a chunk's size": pouring(CHUNKED, b"1" * 60_000),
    "malformed chunks": pouring(CHUNKED, b"xyz\r\n" * 10_000),
    "headers": pouring(b"HTTP/1.1 200 X\r\n", b"a: b\r\n" * 10_000),
    "gzip": answering(gzip_bomb(), 200, {"Content-Encoding": "gzip"}),
    "redirects": Fault(status=302, headers={"Location": "/someone/tiny-model/x"}),
    "slow: nothing": Fault(raw=lambda out: time.sleep(3)),
    "slow: a status line": pouring(b"HTTP/1.1 200 ", b"X", 0.02),
    "slow: chunks": pouring(CHUNKED, b"1\r\n \r\n", 0.02),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "_STALLED_S", 0.5)
    monkeypatch.setattr(pull_module, "_ATTEMPTS", 2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ENDLESS)
def test_endless_answers_are_given_up_in_little_memory(
    server: Hub, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    server.faults["api"] = deque([ENDLESS[what]] * 6)
    before, before_there = peak_mb(), peak_mb(resource.RUSAGE_CHILDREN)
    with pytest.raises(AkunuError) as caught:
        pull(REPOSITORY)
    refused(caught.value)
    assert len(server.requested("api")) <= 6
    assert peak_mb() - before < 300
    assert peak_mb(resource.RUSAGE_CHILDREN) < max(before_there, 100) + 300
    server.faults.clear()
    monkeypatch.setattr(pull_module, "_STALLED_S", 20.0)
    assert pull(REPOSITORY)
