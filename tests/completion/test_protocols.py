"""JSON lines and `--filter`, with real processes: no request and no buffer is lost."""

import io
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from akunu_py.completion.completion_queue import CompletionQueue, QueueOptions
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.completion.protocols.filter import find_cursor
from akunu_py.completion.protocols.json_lines import (
    JsonLines,
    parse,
    read_lines,
    request_of,
)
from akunu_py.engine.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.models.store.model_store import StoredModel
from tests.support.command import AKUNU, assert_one_line_error, run_here, until
from tests.support.paths import DOCS
from tests.support.scripted_loop import RecordingLoop
from tests.support.tiny_fim import sentence_piece, write_model

STATS = {"prompt_tokens", "cached_tokens", "target_passes", "evidence_tokens", "reused"}


class Helper:
    """A running `akunu complete`."""

    def __init__(self, model: Path, *options: str) -> None:
        command = [*AKUNU, "complete", "--no-answer-cache", *options, "--model", str(model)]
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        self.hello: list[dict[str, Any]] = []

    def send(self, *lines: Any) -> None:
        assert self.process.stdin is not None
        for line in lines:
            raw = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
            self.process.stdin.write(raw)
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            reply: dict[str, Any] = json.loads(self.process.stdout.readline())
            if "hello" not in reply:
                return reply
            self.hello.append(reply["hello"])

    def end(self) -> tuple[int, list[dict[str, Any]], bytes]:
        """Closes stdin -> exit code, the replies that were left, stderr."""
        out, error = self.process.communicate(timeout=120)
        replies = [json.loads(line) for line in out.splitlines()]
        self.hello += [reply["hello"] for reply in replies if "hello" in reply]
        return self.process.returncode, [each for each in replies if "hello" not in each], error


@pytest.fixture(scope="module")
def helper(starter: StoredModel) -> Iterator[Helper]:
    # A longer prefill is slow. With less memory available, a warning says so.
    made = Helper(starter.path, "--prefix-tokens", "128", "--memory-limit", "4G", "--server", "off")
    yield made
    if made.process.returncode is None:
        code, left, warning = made.end()
        assert (code, left) == (0, [])
        assert b"not known to fill in the middle" in warning
        assert warning.count(b"ignored unknown fields: colour, x") == 1
        first, *_, last = made.hello
        assert (first["ready"], last["ready"]) == (False, True)
        assert first["model"] == str(starter.path)
        assert {"id", "prefix", "channel"} <= set(first["fields"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loads fast, for what does not depend on its output."""
    end = "<|endoftext|>"
    return write_model(Path(tmp_path_factory.mktemp("tiny")), sentence_piece([end]), end=end)


def test_the_documented_transcript(helper: Helper) -> None:
    page = (DOCS / "complete-protocol.md").read_text(encoding="utf-8")
    joined = ""
    for step in page.split("```transcript\n")[1].split("```")[0].splitlines():
        direction, line = step[:2], step[3:]
        if direction == "->":
            helper.send(line.encode() + b"\n")
            continue
        expected = json.loads(line.replace("{...}", "{}"))
        reply = helper.read()
        if "delta" in expected:
            joined = reply["delta"]
            while joined != expected["delta"]:
                assert expected["delta"].startswith(joined)
                joined += helper.read()["delta"]
            continue
        if "stats" in expected:
            assert set(reply["stats"]) >= STATS
            expected["stats"] = reply["stats"]
        if expected.get("finish_reason") == "cancelled":
            expected["text"] = reply["text"]
        assert reply == expected


def test_garbage_is_named_and_survived(helper: Helper) -> None:
    for line, words in [
        (b"\xff\xfe\n", "Invalid JSON"),
        (b"\x00\x00\n", "Invalid JSON"),
        (b'{"id": 1, "prefix": "a\x00b"}\n', "Invalid JSON"),
        (b"[" * 100_000 + b"\n", "Invalid JSON"),
        (b"[1, 2]\n", "Input should be an object"),
        (b'{"prefix": "x"}\n', 'no "id"'),
        (b'{"id": true, "prefix": "x"}\n', "id: Input"),
        (b'{"cancel": [1]}\n', "cancel: Input"),
        (b'{"id": 1, "cancel": 5}\n', "a separate line"),
        (b'{"id": 1, "cancel": 5, "prefix": "x"}\n', "a separate line"),
        (b'{"cancel": 5, "prefix": "x"}\n', "separate line"),
        (b'{"id": 1, "accepted": 5}\n', "a separate line"),
        (b'{"accepted": []}\n', "accepted: Input"),
    ]:
        helper.send(line)
        reply = helper.read()
        assert reply["id"] == (1 if "a separate line" in words else None)
        assert words in reply["error"]
    for field, value, words in [
        ("prefix", 1, "prefix: Input should be a valid string"),
        ("prefix", "a\ud800", "hex escape"),
        ("max_tokens", True, "max_tokens: Input should be a valid integer"),
        ("max_tokens", -1, "max_tokens must be from 0"),
        ("time_ms", 0, "time limit must be above 0"),
        ("time_ms", 10**20, "less than or equal to 1000000000"),
        ("temperature", -1, "temperature"),
        ("temperature", math.nan, "a finite number"),
        ("files", [{"path": "a"}], "files.0.text: Field required"),
        ("files", {}, "files: Input should be a valid array"),
        ("stream", "yes", "stream: Input should be a valid boolean"),
        ("alternatives", 5, "less than or equal to 4"),
    ]:
        helper.send({"id": "bad", "prefix": "x"} | {field: value})
        reply = helper.read()
        assert reply["id"] == "bad"
        assert words in reply["error"]
    for _ in range(2):
        helper.send({"id": 1, "prefix": "x", "max_tokens": 1, "colour": "red", "x": math.nan})
        assert helper.read()["finish_reason"]
    helper.send({"id": 1, "prefix": "x", "max_tokens": 0, "alternatives": 1})
    assert "alternatives need a completion" in helper.read()["error"]
    helper.send(b"\n", b"  \r\n", {"id": 1, "prefix": "import numpy as n", "alternatives": 1})
    reply = helper.read()
    assert reply["text"] == "p"
    assert reply["text"] not in reply["alternatives"]


def test_an_id_that_is_being_answered_is_refused(helper: Helper) -> None:
    twice = {"id": "twice", "prefix": "numbers = [1, ", "max_tokens": 1000}
    helper.send(twice, twice, {"cancel": "twice"}, {"cancel": "unknown"})
    assert "still being answered" in helper.read()["error"]
    assert helper.read()["finish_reason"] == "cancelled"


def test_half_a_line_then_the_end(helper: Helper) -> None:
    """The last test of this helper."""
    helper.send({"id": 1, "prefix": "import numpy as n", "suffix": "\n"}, b'{"id": 2, "pre')
    code, replies, error = helper.end()
    assert code == 0
    assert error.count(b"\n") == 2  # the lines about the model and about unknown fields
    assert b"fill in the middle" in error
    assert sorted((str(r["id"]), r.get("text")) for r in replies) == [("1", "p"), ("None", None)]


@pytest.mark.long
def test_a_model_that_does_not_load(tiny: Path) -> None:
    broken = Helper(tiny, "--fim", "starcoder2")
    broken.send({"id": 1, "prefix": "x"})
    assert "has no token <fim_prefix>" in broken.read()["error"]
    code, _, error = broken.end()
    assert code == 1
    assert error.startswith(b"akunu: ")
    assert error.count(b"\n") == 1


def test_lines_are_bounded() -> None:
    stream = io.BytesIO(b"short\r\n" + b"x" * 50 + b"\nnext\n" + b"y" * 50)
    assert list(read_lines(stream, 20)) == [b"short", None, b"next", None]
    assert list(read_lines(io.BytesIO(b"x" * 20 + b"\n"), 20)) == [b"x" * 20]
    with pytest.raises(UsageError, match="longer than 64 MB"):
        parse(None)


def test_an_acceptance_prepares_the_next_completion() -> None:
    loop, replies = RecordingLoop(), list[dict[str, Any]]()
    queue = CompletionQueue(lambda: loop, QueueOptions(pause_s=3600))
    lines = JsonLines(queue, lambda line: replies.append(json.loads(line)), CompletionRequest(""))
    queue.start()
    lines.handle(b'{"id": 1, "prefix": "a"}')
    until(lambda: replies)
    lines.handle(b'{"accepted": 1}')
    until(lambda: [request.prefix for request in loop.made] == ["a", "atext"])
    assert queue.close(60)


def test_limits_of_the_command_hold_where_a_request_sets_none() -> None:
    defaults = CompletionRequest("", max_tokens=7, seconds=2.0)
    line = parse(b'{"id": 1, "prefix": "x", "time_ms": 500}')
    assert line is not None
    request = request_of(line, defaults)
    assert (request.max_tokens, request.seconds) == (7, 0.5)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "akunu").mkdir()
    return tmp_path / "akunu" / "settings.toml"


def test_completion_has_a_model_of_its_own(settings: Path, tiny: Path) -> None:
    """And where the model cannot fill in the middle, one to pull is named."""
    settings.write_text(f'model = "{tiny}"\ncompletion_model = "nonesuch"\n')
    done = run_here("complete")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "nonesuch" in done.stderr
    settings.write_text(f'model = "nonesuch"\ncompletion_model = "{tiny}"\n')
    done = run_here("complete")
    assert done.returncode == 0
    assert f"{tiny.name} is not known to fill in the middle" in done.stderr


def test_the_setting_reaches_json_lines(tiny: Path, settings: Path) -> None:
    settings.write_text('completion_exclude = ["*.private"]\n')
    text = "".join(
        json.dumps({"id": path, "prefix": "x = [[[[", "path": path, "max_tokens": 2}) + "\n"
        for path in ("/app/a.private", "/app/.env")
    )
    done = run_here("complete", "--no-answer-cache", "--model", str(tiny), stdin=text)
    lines = map(json.loads, done.stdout.splitlines())
    replies = {reply["id"]: reply for reply in lines if "hello" not in reply}
    assert replies["/app/a.private"]["stats"]["generated_tokens"] == 0
    assert replies["/app/.env"]["stats"]["generated_tokens"] == 2


# The filter


def run(model: Path, *options: str, buffer: bytes) -> tuple[int, bytes, str]:
    """Return the exit code, stdout and stderr."""
    options = ("--model", str(model), "--no-answer-cache", *options)
    done = run_here("complete", "--filter", *options, stdin=buffer)
    return done.returncode, done.stdout.encode(errors="surrogateescape"), done.stderr


@pytest.mark.parametrize(("text", "cursor", "before"), [
    ("ab\ncd\n", "1:1", ""), ("ab\ncd\n", "1:3", "ab"), ("ab\ncd\n", "2:2", "ab\nc"),
    ("ab\ncd\n", "3:1", "ab\ncd\n"), ("ab\r\ncd\r\n", "1:3", "ab"),
    ("é日😀x", "1:4", "é日😀"), ("", "1:1", ""),
])  # fmt: skip
def test_cursor(text: str, cursor: str, before: str) -> None:
    assert text[: find_cursor(text, cursor, None)] == before
    assert find_cursor(text, None, str(len(before))) == len(before)


@pytest.mark.parametrize(("cursor", "offset", "words"), [
    ("3:1", None, "the buffer has 2 lines"), ("1:4", None, "line 1 has 2 characters"),
    ("0:1", None, "expected LINE:COL, both from 1, got '0:1'"),
    ("1:0", None, "expected LINE:COL"), ("12", None, "expected LINE:COL"),
    ("1:-1", None, "expected LINE:COL"), ("9" * 30 + ":1", None, "expected LINE:COL"),
    (None, "6", "after the 5 characters"), (None, "-1", "expected a number"),
    (None, "x", "expected a number"), (None, None, "needs the place"),
    ("1:1", "0", "needs the place"),
])  # fmt: skip
def test_bad_cursors(cursor: str | None, offset: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_cursor("ab\ncd", cursor, offset)


def test_the_whole_buffer_completed(loaded_starter: Engine) -> None:
    buffer = b"import os\r\nimport numpy as n\r\n\r\nprint('\xc3\xa9')\r\n"
    whole = run(loaded_starter.path, "--whole", "--cursor", "2:18", buffer=buffer)
    # An editor may put stderr into the buffer.
    assert whole == (0, buffer.replace(b"as n", b"as np"), "")


def test_neighbours_and_limits(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("value = [1, 2]\n")
    options = ["--file", str(other), "--max-tokens", "3", "--path", "notes", "--offset", "5"]
    code, out, error = run(tiny, *options, buffer=b"x = [\n")
    assert (code, len(out), error) == (0, 3, "")


@pytest.mark.parametrize(("options", "buffer"), [
    (["--cursor", "9:9"], b"x = 1\n"),
    ([], b"x = 1\n"),
    (["--offset", "0"], b"\xff\xfe\x00 not UTF-8\n"),
    (["--offset", "0", "--model", "nonesuch"], b"x = 1\n"),
    (["--offset", "0", "--file", "no such file"], b"x = 1\r\n"),
    (["--offset", "1", "--fim", "qwen"], b"x = 1\n"),
    (["--offset", "1", "--temperature", "-1"], b"x = 1\n"),
])  # fmt: skip
def test_a_failure_gives_the_buffer_back(tiny: Path, options: list[str], buffer: bytes) -> None:
    code, out, error = run(tiny, "--whole", *options, buffer=buffer)
    assert (code in (1, 2), out) == (True, buffer)
    assert error.startswith("akunu: ")
    assert error.count("\n") == 1


def test_options_of_the_filter_alone_are_refused(tiny: Path) -> None:
    refused = run_here("complete", "--whole", "--model", str(tiny))
    assert refused.returncode == 2
    assert refused.stderr == "akunu: --whole requires --filter\n"


def test_the_filter_refuses_in_one_line_and_the_setting_allows(tiny: Path, settings: Path) -> None:
    options = ["--filter", "--offset", "4", "--path", "/app/.env", "--model", str(tiny)]
    done = run_here("complete", *options, stdin="KEY=")
    assert_one_line_error(done, 2, "/app/.env", "completion_exclude")
    settings.write_text("completion_exclude = []\n")
    done = run_here("complete", *options, "--max-tokens", "2", stdin="KEY=")
    assert done.returncode == 0, done.stderr
