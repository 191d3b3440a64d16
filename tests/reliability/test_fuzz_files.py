"""Files that people and programs may have altered: each is read, or refused in one clear line.

Traces, settings, descriptions of models, results of the bench; what is learned is in
`test_fuzz_learned`. Whatever is raised beside our own errors fails the test.
"""

from __future__ import annotations

import gzip
import json
import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import strategies as st

from akunu_py.bench import trace
from akunu_py.bench.result import CHECK_FORMAT, Result, load_result, load_results
from akunu_py.bench.trace import load_trace
from akunu_py.chats.json import read_json
from akunu_py.errors import AkunuError, UsageError
from akunu_py.models.manifest import FILE_NAME, read_manifest
from akunu_py.models.store.model_store import note_usage, read_usage
from akunu_py.settings import Settings, load_settings, save_settings, settings_file
from tests.reliability.fuzz import TEXTS, changed, clear, damaged, explore, json_like, lengths

pytestmark = [pytest.mark.rotating, pytest.mark.usefixtures("own_directories")]


# Traces

TRACE = {
    "tokenizer": "tiny",
    "workloads": {
        "chat": [{"prompt": [1, 2, 3], "output": [4, 5]}, {"prompt": [1], "output": [2]}],
        "code": [{"prompt": [7, 8], "output": [9, 7, 8, 9]}],
    },
}


@lengths(100)
def test_traces(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def check(value: Any) -> None:
        path.write_text(json.dumps(value))
        with clear():
            load_trace(path)

    explore(check, examples, changed(TRACE))


@lengths(75)
def test_traces_with_bytes_turned_over(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with clear():
            load_trace(path)

    packed = gzip.compress(json.dumps(TRACE).encode(), mtime=0)
    explore(check, examples, damaged(packed) | damaged(json.dumps(TRACE).encode()))


# Settings

SETTINGS_KEYS = st.sampled_from(sorted(Settings.__dataclass_fields__))


def toml(value: dict[str, Any]) -> str:
    """`value` as TOML, which knows no null and no half characters."""
    return tomlkit.dumps(value)


@lengths(100)
def test_settings_of_wrong_types(examples: int) -> None:
    path = settings_file()
    path.parent.mkdir(parents=True)

    def check(value: dict[str, Any]) -> None:
        try:
            text = toml(value).encode()
            tomllib.loads(text.decode())
        except (ValueError, TypeError, tomlkit.exceptions.TOMLKitError):
            text = json.dumps(value).encode()
        path.write_bytes(text)
        with clear():
            load_settings()
        with clear():
            save_settings({"temperature": 0.5})

    explore(check, examples, st.dictionaries(SETTINGS_KEYS, json_like(TEXTS), max_size=4))


@lengths(100)
def test_settings_with_bytes_turned_over(examples: int) -> None:
    path = settings_file()
    path.parent.mkdir(parents=True)
    save_settings({"personas": {"Pirate": "Say arr.\nAlways."}, "temperature": 1, "theme": "light"})
    whole = b"# mine\n" + path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with clear():
            load_settings()
        with clear():
            save_settings({"temperature": 0.5, "personas": {"Poet": "Rhyme.", "Pirate": "No."}})
            assert load_settings().temperature == 0.5

    explore(check, examples, damaged(whole))


@lengths(75)
def test_settings_that_are_saved_come_back(examples: int) -> None:
    def check(changes: dict[str, Any]) -> None:
        settings_file().unlink(missing_ok=True)
        try:
            saved = save_settings(changes)
        except UsageError:
            return
        assert load_settings() == saved

    texts = {"model": TEXTS, "system_prompt": TEXTS, "personas": st.dictionaries(TEXTS, TEXTS)}
    explore(check, examples, st.fixed_dictionaries({}, optional=texts))


# The store and the bench

MANIFEST = {
    "format": 1, "name": "tiny", "source": "a directory", "created": "2026-11-21T05:46:40+00:00",
    "context_length": 4096, "parameters": 1000, "quantisation": "4-bit", "licence": "mit",
    "files": {"config.json": {"size": 3, "sha256": "00"}}, "repository": "a/b", "commit": "c",
}  # fmt: skip


@lengths(100)
def test_descriptions_of_models(examples: int, tmp_path: Path) -> None:
    def check(value: Any) -> None:
        (tmp_path / FILE_NAME).write_text(json.dumps(value))
        with clear():
            assert read_manifest(tmp_path).size is not None

    explore(check, examples, changed(MANIFEST))


@lengths(50)
def test_notes_of_use(examples: int, tmp_path: Path) -> None:
    directory = tmp_path / "data" / "akunu" / "models"
    directory.mkdir(parents=True)
    note_usage("tiny", tokens=3)
    path = directory / ".usage" / "tiny.json"
    whole = json.loads(path.read_text())

    def check(value: Any) -> None:
        path.write_text(json.dumps(value))
        read_usage("tiny")

    explore(check, examples, changed(whole))


@lengths(75)
def test_results_of_the_bench(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    whole = json.loads(Result(command="akunu bench", curve_s={1: 0.01}).to_json())

    def check(value: Any) -> None:
        for content in (value, {"format": CHECK_FORMAT, "results": value}):
            path.write_text(json.dumps(content))
            with clear():
                load_results(path)

    explore(check, examples, changed(whole))


# Too deep for a parser that calls itself


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("trace.json", load_trace),
        ("result.json", load_result),
        ("chats.json", lambda path: read_json(path.read_text(), "file")),
    ],
)
def test_nesting_without_end(name: str, load: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"workloads":' + "[" * 200_000)
    with pytest.raises(AkunuError):
        load(path)


def test_settings_nested_without_end() -> None:
    path = settings_file()
    path.parent.mkdir(parents=True)
    path.write_text("model = " + "[" * 200_000)
    with pytest.raises(UsageError):
        load_settings()


def test_a_trace_that_unpacks_to_more_than_any_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    tracemalloc.start()
    with pytest.raises(UsageError, match="unpacks to more than"):
        load_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
