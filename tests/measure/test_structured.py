"""`python -m tests.measure.structured`: the workload, and what drafting must be worth on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.curve import CURVES, parse_curve
from akunu_py.bench.replay import ReplayCounts
from akunu_py.bench.trace import TraceItem
from akunu_py.decoding.constraint.matcher import compile_constraint
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import Constraint, Message
from tests.measure import structured
from tests.measure.structured import BOTH, FORCED, NGRAMS

ANSWERS: list[Any] = [  # to the first cases
    {
        "name": "get_weather_forecast",
        "arguments": {"location": "Lisbon", "number_of_days": 3, "temperature_unit": "celsius"},
    },
    {
        "name": "reserve_restaurant_table",
        "arguments": {
            "restaurant": {"name": "Da Mario", "city": "Zurich"},
            "party_size": 4,
            "date": "2026-03-14",
            "time": "19:30",
            "reservation_name": "Keller",
        },
    },
    {
        "name": "create_calendar_event",
        "arguments": {"title": "Meeting", "attendees": ["anna@example.com"], "start_time": "10:00"},
    },
    {
        "name": "convert_currency",
        "arguments": {"amount": 250, "from_currency": "CHF", "to_currency": "JPY"},
    },
]


def one_line(value: Any) -> str:
    return json.dumps(value)


def tight(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def indented(value: Any) -> str:
    return json.dumps(value, indent=2)


def tabs(value: Any) -> str:
    return json.dumps(value, indent="\t")


@pytest.mark.parametrize("written", [one_line, tight, indented, tabs])
def test_forced_text_and_ngrams_together_give_more_tokens_per_pass(
    starter_engine: Engine, written: Callable[[Any], str]
) -> None:
    """For any whitespace; one answer has its properties in another order."""
    counts: dict[str, ReplayCounts] = {}
    for case, value in zip(structured.load_cases(), ANSWERS, strict=False):
        ask = Message("user", f"{case.schema}\n{case.prompt}")
        tokens = starter_engine.tokens.tokenizer.encode(written(value), add_special_tokens=False)
        item = TraceItem(tuple(starter_engine.tokens.encode_chat([ask])), tuple(tokens))
        constraint = Constraint("json_schema", case.schema)
        structured.count_passes(
            starter_engine, constraint, item, parse_curve(CURVES["m5max"]), counts
        )
    rate = {name: each.tokens / each.passes for name, each in counts.items()}
    print(written.__name__, rate)
    assert rate[BOTH] >= 2.0
    assert rate[BOTH] >= max(rate[NGRAMS], rate[FORCED])


def test_all_schemas_of_the_workload_are_supported(starter_engine: Engine) -> None:
    cases = structured.load_cases()
    assert {case.source for case in cases} == {"tools", "extraction"}
    for case in cases:
        compile_constraint(starter_engine.tokens, Constraint("json_schema", case.schema))


@pytest.mark.long
def test_counts_cover_the_models_answers(
    loaded_shallow_starter: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = structured.load_cases()
    monkeypatch.setattr(structured, "load_cases", lambda: [cases[3], cases[-1]])
    words = ["--model", str(loaded_shallow_starter.path), "--max-tokens", "12"]
    assert structured.main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["sources"]) == {"tools", "extraction"}
    for layouts in found["sources"].values():
        for by_drafter in layouts.values():
            assert list(by_drafter) == [BOTH, NGRAMS, FORCED]
            assert len({counts["tokens"] for counts in by_drafter.values()}) == 1
    assert structured.main(words) == 0
    assert "tools       compact" in capsys.readouterr().out


def test_instances_of_a_file_become_answers(
    loaded_shallow_starter: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One schema is unsupported, and invalid instances are skipped."""
    schema = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    tests = [{"valid": True, "data": {"city": "Bern"}}, {"valid": False, "data": {"city": 3}}]
    schemas = [
        {"name": "BFCL_simple_1.json", "schema": {"type": "object"} | schema, "tests": tests},
        {"name": "Github---x.json", "schema": {"unevaluatedItems": False}, "tests": tests},
    ]
    path = tmp_path / "schemas.json"
    path.write_text(json.dumps({"schemas": schemas}))
    words = [str(path), "--model", str(loaded_shallow_starter.path)]
    assert structured.main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]
    assert set(found) == {"BFCL", "Github"}
    assert found["Github"] == {}
    free, compact = found["BFCL"]["free"], found["BFCL"]["compact"]
    assert {each["items"] for each in [*free.values(), *compact.values()]} == {1}
    assert free["both"]["tokens"] > compact["both"]["tokens"] > 0
    for damage in (b"{", b"[]", b"\x1f\x8brubbish", b'{"schemas": [3]}'):
        path.write_bytes(damage)
        assert structured.main(words) == 2
        assert "expected a list of JSON schemas" in capsys.readouterr().err
