"""JSON lines and `--filter`: no request and no buffer is lost."""

import contextlib
import io
import json
import math
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import CompletionQueue, QueueOptions
from akunu_py.completion.completion_request import CompleteOptions, CompletionRequest
from akunu_py.completion.protocols.filter import find_cursor
from akunu_py.completion.protocols.json_lines import (
    JsonLines,
    parse,
    read_lines,
    request_of,
)
from akunu_py.engine.engine import Engine
from akunu_py.errors import UsageError
from tests.support.command import AKUNU, assert_one_line_error, run_here, until
from tests.support.paths import DOCS
from tests.support.scripted_loop import RecordingLoop
from tests.support.tiny_fim import sentence_piece, write_model

STATS = {"prompt_tokens", "cached_tokens", "target_passes", "evidence_tokens", "reused"}


class Client:
    """A client of `JsonLines`, whose thread reads lines from a pipe."""

    def __init__(self, queue: CompletionQueue) -> None:
        stdin, self._lines = os.pipe()
        self._replies = SimpleQueue[bytes]()
        lines = JsonLines(queue, self._replies.put, CompletionRequest(""))
        self._thread = threading.Thread(target=self._serve, args=(lines, stdin))
        self._thread.start()

    def _serve(self, lines: JsonLines, stdin: int) -> None:
        with os.fdopen(stdin, "rb") as stream:
            lines.serve(stream)

    def send(self, *lines: Any) -> None:
        for line in lines:
            raw = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
            with open(self._lines, "wb", closefd=False) as pipe:
                pipe.write(raw)

    def read(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._replies.get(timeout=60))
        return reply

    def close(self) -> None:
        os.close(self._lines)
        self._thread.join(60)
        assert self._replies.empty()


@pytest.fixture(scope="module")
def client(starter_engine: Engine) -> Iterator[Client]:
    # A longer prefill is slow.
    options = CompleteOptions(prefix_tokens=128)
    queue = CompletionQueue(lambda: Completer(starter_engine, options))
    queue.start()
    queue.host.call(lambda _: None).result(60)  # it is loaded
    with contextlib.closing(Client(queue)) as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that loads fast, for what does not depend on its output."""
    end = "<|endoftext|>"
    return write_model(Path(tmp_path_factory.mktemp("tiny")), sentence_piece([end]), end=end)


def test_the_documented_transcript(client: Client) -> None:
    page = (DOCS / "complete-protocol.md").read_text(encoding="utf-8")
    joined = ""
    for step in page.split("```transcript\n")[1].split("```")[0].splitlines():
        direction, line = step[:2], step[3:]
        if direction == "->":
            client.send(line.encode() + b"\n")
            continue
        expected = json.loads(line.replace("{...}", "{}"))
        reply = client.read()
        if "delta" in expected:
            joined = reply["delta"]
            while joined != expected["delta"]:
                assert expected["delta"].startswith(joined)
                joined += client.read()["delta"]
            continue
        if "stats" in expected:
            assert set(reply["stats"]) >= STATS
            expected["stats"] = reply["stats"]
        if expected.get("finish_reason") == "cancelled":
            expected["text"] = reply["text"]
        assert reply == expected


def test_garbage_is_named_and_survived(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
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
        client.send(line)
        reply = client.read()
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
        client.send({"id": "bad", "prefix": "x"} | {field: value})
        reply = client.read()
        assert reply["id"] == "bad"
        assert words in reply["error"]
    for _ in range(2):
        client.send({"id": 1, "prefix": "x", "max_tokens": 1, "colour": "red", "x": math.nan})
        assert client.read()["finish_reason"]
    assert capsys.readouterr().err.count("ignored unknown fields: colour, x") == 1
    client.send({"id": 1, "prefix": "x", "max_tokens": 0, "alternatives": 1})
    assert "alternatives need a completion" in client.read()["error"]
    client.send(b"\n", b"  \r\n", {"id": 1, "prefix": "import numpy as n", "alternatives": 1})
    reply = client.read()
    assert reply["text"] == "p"
    assert reply["text"] not in reply["alternatives"]


def test_an_id_that_is_being_answered_is_refused(client: Client) -> None:
    twice = {"id": "twice", "prefix": "numbers = [1, ", "max_tokens": 1000}
    client.send(twice, twice, {"cancel": "twice"}, {"cancel": "unknown"})
    assert "still being answered" in client.read()["error"]
    assert client.read()["finish_reason"] == "cancelled"


@pytest.mark.long
def test_half_a_line_then_the_end(tiny: Path) -> None:
    """Of `akunu complete`, which answers each line at once."""
    request = json.dumps({"id": 1, "prefix": "x = [[[[", "suffix": "\n", "max_tokens": 2})
    command = [*AKUNU, "complete", "--no-answer-cache", "--server", "off", "--model", str(tiny)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{request}\n")
    process.stdin.flush()
    lines: list[dict[str, Any]] = []
    while not any("id" in line for line in lines):
        lines.append(json.loads(process.stdout.readline()))
    rest, errors = process.communicate('{"id": 2, "pre', timeout=120)
    assert process.returncode == 0
    assert errors.count("\n") == 1
    assert "not known to fill in the middle" in errors
    lines += map(json.loads, rest.splitlines())
    first, last = [line["hello"] for line in lines if "hello" in line]
    assert (first["ready"], last["ready"]) == (False, True)
    assert first["model"] == str(tiny)
    assert {"id", "prefix", "channel"} <= set(first["fields"])
    replies = {line["id"]: line for line in lines if "id" in line}
    assert "Invalid JSON" in replies.pop(None)["error"]
    assert replies.pop(1)["stats"]["generated_tokens"] == 2
    assert replies == {}


def test_a_model_that_does_not_load(tiny: Path) -> None:
    line = json.dumps({"id": 1, "prefix": "x"})
    done = run_here("complete", "--fim", "starcoder2", "--model", str(tiny), stdin=line)
    replies = map(json.loads, done.stdout.splitlines())
    (error,) = [reply["error"] for reply in replies if "hello" not in reply]
    assert "has no token <fim_prefix>" in error
    assert done.returncode == 1
    assert done.stderr.startswith("akunu: ")
    assert done.stderr.count("\n") == 1


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
    lines.handle(b'{"id": 1, "prefix": "a", "stream": true}')
    assert replies == [{"id": 1, "status": "loading"}]  # also a model that was unloaded
    queue.start()
    until(lambda: "text" in replies[-1])
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


def test_broken_settings_give_the_buffer_back(tiny: Path, settings: Path) -> None:
    settings.write_text("temperature = [\n")
    code, out, error = run(tiny, "--whole", "--offset", "1", buffer=b"x = \xff\r\n")
    assert (code, out) == (2, b"x = \xff\r\n")
    assert "settings.toml" in error


@pytest.mark.parametrize("options", [["--whole"], ["--path", "a.py"], ["--lsp", "--cursor", "1:1"]])
def test_options_of_the_filter_alone_are_refused(options: list[str]) -> None:
    refused = run_here("complete", *options)
    assert_one_line_error(refused, 2, "requires --filter")


def test_the_filter_names_the_option_of_an_unreadable_file(tiny: Path) -> None:
    options = ["--filter", "--offset", "0", "--file", "nofile", "--model", str(tiny)]
    done = run_here("complete", *options)
    assert_one_line_error(done, 2, "--file: cannot read nofile: No such file or directory")


def test_the_filter_refuses_in_one_line_and_the_setting_allows(tiny: Path, settings: Path) -> None:
    options = ["--filter", "--offset", "4", "--path", "/app/.env", "--model", str(tiny)]
    done = run_here("complete", *options, stdin="KEY=")
    assert_one_line_error(done, 2, "/app/.env", "completion_exclude")
    settings.write_text("completion_exclude = []\n")
    done = run_here("complete", *options, "--max-tokens", "2", stdin="KEY=")
    assert done.returncode == 0, done.stderr
