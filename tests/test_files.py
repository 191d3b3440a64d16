"""Bounded reads of files, and JSON."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py import files


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_file_within_the_limit_is_read_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert files.read_bounded(path, 100) == files.read_bounded(link, 100) == b"x" * size


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 << 30)


@pytest.mark.parametrize(("make", "code"), [
    (lambda path: path.write_bytes(b"x" * 101), errno.EFBIG), (make_sparse, errno.EFBIG),
    (os.mkfifo, errno.EINVAL), (lambda path: path.symlink_to("/dev/zero"), errno.EINVAL),
    (lambda path: path.mkdir(), errno.EISDIR),
    (lambda path: path.symlink_to(path), errno.ELOOP), (lambda path: None, errno.ENOENT),
])  # fmt: skip
def test_other_files_are_refused_at_once(tmp_path: Path, make: object, code: int) -> None:
    path = tmp_path / "file"
    assert callable(make)
    make(path)
    with pytest.raises(OSError) as refused:  # noqa: PT011 - its number is looked at below
        files.read_bounded(path, 100)
    assert (refused.value.errno, refused.value.filename) == (code, str(path))


_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_json = st.recursive(
    st.none() | st.booleans() | _numbers | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.long
@given(_json)
def test_any_json_is_parsed(value: object) -> None:
    assert files.parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000, b'{"a":' * 200_000, b"[" + b"9" * 5000 + b"]", b"[NaN]", b"[-Infinity]",
        b"\xff\xfe\xfd", b"", b"<html>",
    ],
    ids=lambda data: repr(data[:9]),
)  # fmt: skip
def test_other_bytes_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of its kinds is one
        files.parse_json(data)
