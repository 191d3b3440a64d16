"""`akunu run` with a structure that the answer must have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from akunu_py.decoding.model.engine import Engine
from tests.support.command import run_here

pytestmark = pytest.mark.usefixtures("own_directories")


@pytest.fixture
def model(starter_engine: Engine, loaded_shallow_starter: Engine) -> str:
    return str(loaded_shallow_starter.path)


@pytest.mark.long
def test_the_answer_is_one_of_the_choices(model: str) -> None:
    options = ("--model", model, "--choice", "a b", "--choice", "cd", "--temperature", "1")
    done = run_here("run", "Which?", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("a b\n", "cd\n")
    assert "not whole" not in done.stderr


@pytest.mark.parametrize("given", ["inline", "file"])
def test_a_schema_is_followed(model: str, tmp_path: Path, given: str) -> None:
    schema = json.dumps(
        {"type": "array", "items": {"enum": [7, True]}, "minItems": 2, "maxItems": 2}
    )
    file = tmp_path / "schema.json"
    file.write_text("\ufeff" + schema)
    schema = (
        json.dumps({"$ref": "#/x", "x": json.loads(schema)}) if given == "inline" else str(file)
    )
    words = ("--json-schema", schema, "--compact", "--format", "json")
    done = run_here("run", "Which?", "--model", model, *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["finish_reason"] == "stop"
    assert answer["text"] in ("[7,7]", "[7,true]", "[true,7]", "[true,true]")


def test_an_answer_cut_off_is_printed_and_says_so(model: str) -> None:
    words = ("--quiet", "--regex", "a{99}", "--max-tokens", "2")
    done = run_here("run", "Which?", "--model", model, *words)
    assert done.returncode == 0
    assert set(done.stdout) == {"a", "\n"}
    assert "the answer is incomplete: cut off at --max-tokens" in done.stderr


def test_a_grammar_is_followed(model: str, tmp_path: Path) -> None:
    (tmp_path / "g.lark").write_text('start: "x" y\ny: "y" | "z"\n')
    done = run_here("run", "?", "--model", model, "--grammar", str(tmp_path / "g.lark"))
    assert done.stdout in ("xy\n", "xz\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--json-schema", " "),
            "--json-schema: expected the path of a file, found an empty string",
        ),
        (("--grammar", ""), "--grammar: expected the path of a file, found an empty string"),
        (("--json-schema", "/nowhere.json"), "--json-schema: cannot read /nowhere.json: No such"),
        (("--grammar", "/dev/zero"), "--grammar: cannot read /dev/zero: not a regular file"),
        (("--regex", "a", "--compact"), "--compact requires --json-schema or --json"),
        (("--json", "--choice", "a"), "not allowed with argument --json"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(words: tuple[str, ...], message: str) -> None:
    done = run_here("run", "hello", "--model", "/no/model", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_schema_that_cannot_be_used_is_refused_with_its_place(model: str) -> None:
    schema = '{"properties": {"a": {"$dynamicRef": "#b"}}}'
    done = run_here("run", "Which?", "--model", model, "--json-schema", schema)
    assert done.returncode == 2
    assert "at #/properties/a: $dynamicRef is not supported" in done.stderr
    assert done.stdout == ""
