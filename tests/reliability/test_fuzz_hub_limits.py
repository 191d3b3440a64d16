"""Servers in the hub's place that send without an end, or next to nothing: both are given up."""

from __future__ import annotations

import contextlib
import resource
import time
import zlib
from collections import deque
from pathlib import Path
from typing import BinaryIO

import pytest
from huggingface_hub import constants

from akunu_py.errors import AkunuError, FetchError
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull.pull import pull
from tests.reliability.fuzz import peak_mb, refused
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Fault, Hub, answering
from tests.support.slow import every_other_slow

pytestmark = pytest.mark.rotating

NAME = "model.safetensors"

WHERE = ["api", pytest.param(NAME, marks=pytest.mark.slow)]


def pouring(start: bytes, piece: bytes) -> Fault:
    """An answer that goes on until nobody listens."""

    def write(out: BinaryIO) -> None:
        out.write(start)
        while True:
            out.write(piece)

    return Fault(raw=write)


def gzip_bomb() -> bytes:
    """3 GB in 3 MB."""
    pack = zlib.compressobj(1, wbits=31)
    start = pack.compress(b"[") + pack.flush(zlib.Z_FULL_FLUSH)
    return start + 3000 * (pack.compress(b" " * (1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH))


CHUNKED = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
POURED = {
    "a body": pouring(b"HTTP/1.1 200 X\r\n\r\n", b"[0," * 20_000),
    "a redirect's body": pouring(b"HTTP/1.1 302 X\r\nLocation: /x\r\n\r\n", b"x" * 60_000),
    "an error's body": pouring(b"HTTP/1.1 404 X\r\n\r\n", b"x" * 60_000),
    "a busy body": pouring(b"HTTP/1.1 503 X\r\n\r\n", b"x" * 60_000),
    "chunks": pouring(CHUNKED, b"2710\r\n" + b"x" * 10_000 + b"\r\n"),
    "tiny chunks": pouring(CHUNKED, b"1\r\n \r\n" * 5000),
    "a chunk's size": pouring(CHUNKED, b"1" * 60_000),
    "a chunk's extension": pouring(CHUNKED + b"1;", b"x" * 60_000),
    "one chunk": pouring(CHUNKED + b"ffffffffffffffff\r\n", b"x" * 60_000),
    "malformed chunks": pouring(CHUNKED, b"xyz\r\n" * 10_000),
    "trailers": pouring(CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000),
    "a status line": pouring(b"HTTP/1.1 200 ", b"X" * 60_000),
    "headers": pouring(b"HTTP/1.1 200 X\r\n", b"a: b\r\n" * 10_000),
    "a header": pouring(b"HTTP/1.1 200 X\r\na: ", b"x" * 60_000),
    "1xx": pouring(b"", b"HTTP/1.1 103 X\r\n\r\n" * 3000),
    "gzip": answering(gzip_bomb(), 200, {"Content-Encoding": "gzip"}),
    "gzip of an error": answering(gzip_bomb(), 404, {"Content-Encoding": "gzip"}),
    "gzip of a redirect": answering(
        gzip_bomb(), 302, {"Content-Encoding": "gzip", "Location": "/"}
    ),
}


@pytest.mark.parametrize("what", every_other_slow(POURED))
@pytest.mark.parametrize("where", WHERE)
def test_an_answer_without_an_end_takes_little_memory(
    server: Hub, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    monkeypatch.setattr(pull_module, "_STALLED_S", 0.5)
    monkeypatch.setattr(pull_module, "_ATTEMPTS", 2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    server.faults[where] = deque([POURED[what]] * 6)
    before, before_there = peak_mb(), peak_mb(resource.RUSAGE_CHILDREN)
    with pytest.raises(AkunuError) as caught:
        pull(REPOSITORY)
    refused(caught.value)
    assert peak_mb() - before < 300
    assert peak_mb(resource.RUSAGE_CHILDREN) < max(before_there, 100) + 300


def dripping(start: bytes, drip: bytes) -> Fault:
    def write(out: BinaryIO) -> None:
        out.write(start)
        while True:
            out.write(drip)
            time.sleep(0.02)

    return Fault(raw=write)


DRIPPED = {
    "nothing": Fault(raw=lambda out: time.sleep(3)),
    "a body": dripping(b"HTTP/1.1 200 X\r\n\r\n", b" "),
    "a sized body": dripping(b"HTTP/1.1 200 X\r\nContent-Length: 64752\r\n\r\n", b" "),
    "a status line": dripping(b"HTTP/1.1 200 ", b"X"),
    "headers": dripping(b"HTTP/1.1 200 X\r\n", b"a: b\r\n"),
    "1xx": dripping(b"", b"HTTP/1.1 103 X\r\n\r\n"),
    "chunks": dripping(CHUNKED, b"1\r\n \r\n"),
    "a chunk's size": dripping(CHUNKED, b"0"),
    "redirects": Fault(status=302, headers={"Location": "/someone/tiny-model/x"}),
}


@pytest.mark.parametrize("what", every_other_slow(DRIPPED))
@pytest.mark.parametrize("where", WHERE)
def test_a_trickle_is_given_up(
    server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    monkeypatch.setattr(pull_module, "_STALLED_S", 0.4)
    monkeypatch.setattr(pull_module, "_ATTEMPTS", 3)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
    server.faults[where] = deque([DRIPPED[what]] * 6)
    started = time.monotonic()
    with pytest.raises(FetchError, match=r"stalled|does not answer|redirect|404"):
        pull(REPOSITORY)
    assert time.monotonic() - started < 15
    assert len(server.asked(where)) <= 3
    server.faults.clear()
    monkeypatch.setattr(pull_module, "_STALLED_S", 20.0)
    with contextlib.suppress(FetchError):  # where it took blanks for bytes of the file
        pull(REPOSITORY)
    assert pull(REPOSITORY)


def test_a_hub_that_ignores_ranges_and_cuts_at_the_same_place(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "_STALLED_S", 2.5)
    monkeypatch.setattr(pull_module, "_ATTEMPTS", 2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    server.faults[NAME] = deque([Fault(cut=30_000, no_range=True)] * 100)
    with pytest.raises(FetchError, match=r"stalled.*2 tries brought less than 1 MiB"):
        pull(REPOSITORY)
    assert len(server.asked(NAME)) < 10
    server.faults.clear()
    assert pull(REPOSITORY)
    assert server.asked(NAME)[-1] == "bytes=30000-"
