"""`akunu complete --filter`: where the cursor is, and that no buffer is ever lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from akunu_py.completion.protocols.filter import find_cursor
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from tests.support.command import run_here
from tests.support.paths import DOCS
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
PAGE = DOCS / "complete.md"

needs_vim = pytest.mark.skipif(not shutil.which("vim"), reason="vim is not installed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("tiny")), sentence_piece([END]), end=END)


def run(*options: str, buffer: bytes) -> subprocess.CompletedProcess[bytes]:
    done = run_here("complete", "--filter", *options, stdin=buffer)
    out, err = (text.encode(errors="surrogateescape") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


@pytest.mark.parametrize(
    ("text", "cursor", "before"),
    [
        ("ab\ncd\n", "1:1", ""),
        ("ab\ncd\n", "1:3", "ab"),
        ("ab\ncd\n", "2:2", "ab\nc"),
        ("ab\ncd\n", "3:1", "ab\ncd\n"),
        ("ab\r\ncd\r\n", "1:3", "ab"),
        ("é日😀x", "1:4", "é日😀"),
        ("", "1:1", ""),
    ],
)
def test_cursor(text: str, cursor: str, before: str) -> None:
    assert text[: find_cursor(text, cursor, None)] == before
    assert find_cursor(text, None, str(len(before))) == len(before)


@pytest.mark.parametrize(
    ("cursor", "offset", "words"),
    [
        ("3:1", None, "the buffer has 2 lines"),
        ("1:4", None, "line 1 has 2 characters"),
        ("0:1", None, "expected LINE:COL, both from 1, got '0:1'"),
        ("1:0", None, "expected LINE:COL"),
        ("12", None, "expected LINE:COL"),
        ("1:-1", None, "expected LINE:COL"),
        ("9" * 30 + ":1", None, "expected LINE:COL"),
        (None, "6", "after the 5 characters"),
        (None, "-1", "expected a number"),
        (None, "x", "expected a number"),
        (None, None, "needs the place"),
        ("1:1", "0", "needs the place"),
    ],
)
def test_bad_cursors(cursor: str | None, offset: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_cursor("ab\ncd", cursor, offset)


def test_the_whole_buffer_completed(loaded_starter: Engine) -> None:
    buffer = b"import os\r\nimport numpy as n\r\n\r\nprint('\xc3\xa9')\r\n"
    options = [
        "--model",
        str(loaded_starter.path),
        "--no-answer-cache",
        "--whole",
        "--cursor",
        "2:18",
    ]
    whole = run(*options, buffer=buffer)
    assert whole.returncode == 0
    assert whole.stdout == buffer.replace(b"as n", b"as np")
    assert whole.stderr == b""  # an editor may put it into the buffer


def test_neighbours_and_limits(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("value = [1, 2]\n")
    options = ["--model", str(tiny), "--no-answer-cache", "--file", str(other), "--max-tokens", "3"]
    completed = run(*options, "--path", "notes", "--offset", "5", buffer=b"x = [\n")
    assert (completed.returncode, len(completed.stdout), completed.stderr) == (0, 3, b"")
    missing = run(*options, "--file", str(tmp_path / "none"), "--offset", "5", buffer=b"x = [\n")
    assert missing.returncode == 1
    assert b"No such file" in missing.stderr


@pytest.mark.parametrize(
    ("options", "buffer"),
    [
        (["--cursor", "9:9"], b"x = 1\n"),
        ([], b"x = 1\n"),
        (["--offset", "0"], b"\xff\xfe\x00 not UTF-8\n"),
        (["--offset", "0", "--model", "no such model"], b"x = 1\n"),
        (["--offset", "0", "--file", "no such file"], b"x = 1\r\n"),
        (["--offset", "1", "--fim", "qwen"], b"x = 1\n"),
        (["--offset", "1", "--temperature", "-1"], b"x = 1\n"),
    ],
)
def test_a_failure_gives_the_buffer_back(tiny: Path, options: list[str], buffer: bytes) -> None:
    model = [] if "--model" in options else ["--model", str(tiny)]
    failed = run("--whole", *model, *options, buffer=buffer)
    assert failed.returncode in (1, 2)
    assert failed.stdout == buffer
    assert failed.stderr.startswith(b"akunu: ")
    assert failed.stderr.count(b"\n") == 1


@pytest.mark.e2e
@needs_vim
@pytest.mark.parametrize("program", [f"{sys.executable} -m akunu_py", "/no/such/akunu"])
@pytest.mark.parametrize("options", ["--max-tokens 3", "--no-such-option"])
def test_the_documented_filter_in_vim(
    tiny: Path, tmp_path: Path, program: str, options: str
) -> None:
    """Completed where it can be, and in no other case changed: Vim takes what a filter prints."""
    documented = next(line for line in PAGE.read_text().splitlines() if ":execute '%!akunu" in line)
    command = documented.strip()[1:].replace(
        "akunu complete", f"{program} complete --model {tiny} --no-answer-cache {options}"
    )
    (tmp_path / "a.py").write_text("# é😀\nx = [;\n", encoding="utf-8")
    (tmp_path / "run.vim").write_text(f"call setcursorcharpos(2, 6)\n{command}\nwq\n")
    vim = ["vim", "-Nu", "NONE", "-n", "-es", "--cmd", "set encoding=utf-8"]
    subprocess.run([*vim, "-S", str(tmp_path / "run.vim"), str(tmp_path / "a.py")], timeout=120)
    written = (tmp_path / "a.py").read_text(encoding="utf-8")
    completion = written.removeprefix("# é😀\nx = [").removesuffix(";\n")
    completed = "no/such" not in program and "no-such" not in options
    assert written == f"# é😀\nx = [{completion};\n"
    assert len(completion) == (3 if completed else 0)


def test_options_of_the_filter_alone_are_refused(tiny: Path) -> None:
    refused = run_here("complete", "--whole", "--model", str(tiny))
    assert refused.returncode == 2
    assert refused.stderr == "akunu: --whole requires --filter\n"
