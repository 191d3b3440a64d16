"""Open documents and frames: positions and changes against brute force, garbage between frames."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lsprotocol import types as lsp

from akunu_py.completion.protocols.lsp import (
    MAX_FRAME_BYTES,
    OpenDocument,
    StrictCodec,
    read_frames,
)

TEXT = st.text(st.sampled_from("ab \t\r\n\x0c\u2028é漢😀👩‍🚀"), max_size=12)
ENCODING = st.sampled_from(["utf-8", "utf-16", "utf-32"])
UNIT_BYTES = {"utf-8": 1, "utf-16": 2, "utf-32": 4}


def units(text: str, encoding: str) -> int:
    codec = encoding if encoding == "utf-8" else f"{encoding}-le"
    return len(text.encode(codec)) // UNIT_BYTES[encoding]


def positions(text: str, encoding: str) -> list[tuple[int, int]]:
    """The line and column of every index of `text` and of its end, counted one by one."""
    found = []
    line = column = 0
    for index, character in enumerate(text):
        found.append((line, column))
        column += units(character, encoding)
        if character == "\n" or (character == "\r" and text[index + 1 : index + 2] != "\n"):
            line, column = line + 1, 0
    return [*found, (line, column)]


def document(text: str, encoding: str = "utf-16") -> OpenDocument:
    return OpenDocument("file:///a.py", text, position_codec=StrictCodec(encoding))


def change(text: str, start: tuple[int, int], end: tuple[int, int]) -> Any:
    where = lsp.Range(lsp.Position(*start), lsp.Position(*end))
    return lsp.TextDocumentContentChangePartial(text=text, range=where)


@given(TEXT, ENCODING)
@example("x = '😀漢' + y\x0c\nz", "utf-16")
def test_a_position_is_the_index_that_counting_finds(text: str, encoding: str) -> None:
    for index, (line, column) in enumerate(positions(text, encoding)):
        if text[max(0, index - 1) : index + 1] == "\r\n":
            continue  # between the two there is no position: it is the end of the line
        position = lsp.Position(line, column)
        assert document(text, encoding).offset_at_position(position) == index


@given(TEXT, TEXT, ENCODING, st.data())
def test_changes_arrive_as_they_were_made(
    text: str, inserted: str, encoding: str, data: st.DataObject
) -> None:
    good = [i for i in range(len(text) + 1) if text[max(0, i - 1) : i + 1] != "\r\n"]
    first = data.draw(st.sampled_from(good))
    last = data.draw(st.sampled_from([i for i in good if i >= first]))
    where = positions(text, encoding)
    changed = document(text, encoding)
    changed.apply_change(change(inserted, where[first], where[last]))
    assert changed.source == text[:first] + inserted + text[last:]


@pytest.mark.parametrize(
    ("line", "column", "index"),
    [
        (0, 99, 3),  # past the end of a line: the end of the line
        (0, 4, 3),
        (2, 9, 8),
        (7, 0, 8),  # past the last line: the end of the text
        (1, 1, 5),  # in the middle of a character: its beginning
        (1, 2, 6),
    ],
)
def test_positions_that_are_nowhere(line: int, column: int, index: int) -> None:
    position = lsp.Position(line, column)
    assert document("abc\r\n😀\na").offset_at_position(position) == index


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    changed = document("")
    changed.apply_change(change("a\ud83d\U0001f600b\ude00", (0, 0), (0, 0)))
    assert changed.source == "a\ufffd\U0001f600b\ufffd"


def frame(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def frames(data: bytes) -> list[bytes]:
    """What was read; garbage as None."""
    return [
        b"garbage" if isinstance(found, str) else found for found in read_frames(io.BytesIO(data))
    ]


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=5))
def test_frames_are_read_as_they_were_written(bodies: list[bytes]) -> None:
    assert frames(b"".join(map(frame, bodies))) == bodies


@given(st.lists(st.text("ab{}: \n", min_size=1, max_size=30), min_size=1, max_size=4))
def test_garbage_between_frames_loses_no_frame(pieces: list[str]) -> None:
    data = b"".join(piece.encode() + frame(b"%d" % number) for number, piece in enumerate(pieces))
    read = [found for found in frames(data) if found != b"garbage"]
    assert read == [b"%d" % number for number in range(len(pieces))]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"content-LENGTH:2\nContent-Type: x; charset=utf-8\n\nab", [b"ab"]),
        (b"Content-Type: x\r\n" + frame(b"ab"), [b"ab"]),
        (b"hello\nthere\n" + frame(b"ab"), [b"garbage", b"ab"]),
        (frame(b"ab") + b"too much" + frame(b"cd"), [b"ab", b"garbage", b"cd"]),
        (b"Content-Length: -1\r\n\r\n" + frame(b"ab"), [b"ab"]),
        (b"Content-Length: %d\r\n\r\n" % (MAX_FRAME_BYTES + 1) + frame(b"ab"), [b"garbage", b"ab"]),
        (b"\x00\xff" * 5000 + b"\n" + frame(b"ab"), [b"garbage", b"ab"]),
        (frame(b"") + frame(b"ab"), [b"garbage", b"ab"]),
        (frame(b"ab")[:-1], []),
        (b"Content-Length: 2", [b"garbage"]),
        (b"", []),
    ],
)
def test_frames_among_garbage(data: bytes, expected: list[bytes]) -> None:
    assert frames(data) == expected


def test_garbage_says_what_was_expected() -> None:
    (found,) = read_frames(io.BytesIO(b'{"jsonrpc": "2.0"}\n'))
    assert isinstance(found, str)
    assert re.search("expected .* Content-Length", found)
