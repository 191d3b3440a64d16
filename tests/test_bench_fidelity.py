"""Drafting on beside drafting off, answer by answer, precision by precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from akunu_py.bench import fidelity
from akunu_py.bench.fidelity import MODES, compare, load_prompts
from akunu_py.engine import Engine
from akunu_py.types import WeightMode
from tests.test_cli import akunu


def test_the_prompts_are_many_and_all_different() -> None:
    prompts = load_prompts(300)
    assert len(set(prompts)) == 300
    assert not any("{" in prompt and "}" in prompt for prompt in prompts)
    assert load_prompts(5) == prompts[:5]


def test_in_float32_nothing_differs(starter_engine: Engine) -> None:
    *_, found = compare(starter_engine, load_prompts(3), 32)
    assert [each.mode for each in found] == list(MODES)
    for each in found:
        assert (each.weights, each.answers, each.differences) == ("float32", 3, [])
    assert found[0].drafting_passes > 10


def test_an_answer_that_differs_is_found(
    starter_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = fidelity._answer

    def altered(*args: object) -> list[int]:
        said = answer(*args)  # type: ignore[arg-type]
        if len(args) > 4:  # with drafts
            said[3] += 1
        return said

    monkeypatch.setattr(fidelity, "_answer", altered)
    *_, found = compare(starter_engine, load_prompts(1), 6)
    for each in found:
        ((_, difference),) = each.differences
        assert difference.position == 3
        assert difference.margin is not None
        assert difference.margin > 0


@pytest.mark.slow  # a processor takes minutes for these formats
@pytest.mark.parametrize("weights", ["bfloat16", "keep"])
def test_other_precisions_draft_too(starter_engine: Engine, weights: WeightMode) -> None:
    engine = Engine.load(Path(starter_engine.path), weights=weights)
    *_, found = compare(engine, load_prompts(1), 6)
    for each in found:
        assert each.weights != "float32"
        assert len(each.differences) <= 1


def test_the_command_prints_one_object() -> None:
    done = akunu("bench", "fidelity", "--answers", "1", "--max-tokens", "4", "--weights",
                 "float32", "--format", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["fidelity"]
    assert [each["mode"] for each in found] == ["fixed", "auto"]
    assert all(each["answers"] == 1 and each["differences"] == [] for each in found)
