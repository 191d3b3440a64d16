"""Hostile answers in place of the hub: a model, or one line about the server, in bounded memory."""

import contextlib
import copy
import json
import resource
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from huggingface_hub import constants

from akunu_py.errors import AkunuError
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull.pull import pull
from akunu_py.models.store import hub_cache, model_store
from tests.reliability.fuzz import peak_mb, refused
from tests.support.hub_home import WEIGHTS, stop_in_the_weights
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
    assert f"sent an unexpected answer for {REPOSITORY}" in str(error)
    assert "sign in" in str(error)


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


@pytest.mark.usefixtures("in_process")
def test_links_are_never_written_through(server: Hub, home: Path) -> None:
    """Every file of a pull, unfinished and finished, becomes a link in turn."""
    victim = home / "victim"
    for finished in (False, True):
        if finished:
            pull(REPOSITORY)
        else:
            stop_in_the_weights(server, home)
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


CHUNKED = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "a chunk's size": pouring(CHUNKED, b"1" * 60_000),
    "malformed chunks": pouring(CHUNKED, b"xyz\r\n" * 10_000),
    "headers": pouring(b"HTTP/1.1 200 X\r\n", b"a: b\r\n" * 10_000),
    "redirects": Fault(status=302, headers={"Location": "/someone/tiny-model/x"}),
    "slow: nothing": Fault(raw=lambda out: time.sleep(3)),
    "slow: a status line": pouring(b"HTTP/1.1 200 ", b"X", 0.02),
    "slow: chunks": pouring(CHUNKED, b"1\r\n \r\n", 0.02),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_endless_answers_are_given_up_in_little_memory(
    server: Hub, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "_STALLED_S", 0.5)
    monkeypatch.setattr(pull_module, "_ATTEMPTS", 1)  # each starts a process
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    server.faults["api"] = deque([ENDLESS[what]] * 3)
    before, before_there = peak_mb(), peak_mb(resource.RUSAGE_CHILDREN)
    with pytest.raises(AkunuError) as caught:
        pull(REPOSITORY)
    refused(caught.value)
    assert len(server.requested("api")) <= 3
    assert peak_mb() - before < 300
    assert peak_mb(resource.RUSAGE_CHILDREN) < max(before_there, 100) + 300
