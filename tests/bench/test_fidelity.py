"""Answers with drafts compared with answers without, in each precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from akunu_py.bench import fidelity
from akunu_py.bench.fidelity import (
    MODES,
    compare_answers,
    load_comparisons,
    load_prompts,
    summarize,
)
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import StoreError, UsageError
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.support.command import run_here
from tests.support.engines import altered


def test_prompts_are_many_and_distinct() -> None:
    prompts = load_prompts(300)
    assert len(set(prompts)) == 300
    assert not any("{" in prompt and "}" in prompt for prompt in prompts)
    assert load_prompts(5) == prompts[:5]
    with pytest.raises(UsageError, match="there are 300 prompts"):
        load_prompts(301)


@pytest.mark.long
def test_answers_are_identical_in_float32(shallow_starter: Engine) -> None:
    comparisons = list(compare_answers(shallow_starter, load_prompts(2), 16))
    assert [each.mode for each in comparisons] == list(MODES) * 2
    for row in summarize(comparisons):
        assert (row.weights, row.answers, row.tokens) == ("float32", 2, 32)
        assert row.differences == []
        assert row.drafting_passes > 1


@pytest.mark.long
def test_batches_are_compared_with_each_request_alone(shallow_starter: Engine) -> None:
    comparisons = list(compare_answers(shallow_starter, load_prompts(3), 8, 2))
    assert [each.mode for each in comparisons] == [
        mode for count in (2, 1) for mode in ("off", *MODES) for _ in range(count)
    ]
    assert {each.prompt for each in comparisons} == set(load_prompts(3))
    for row in summarize(comparisons):
        assert (row.weights, row.answers, row.tokens) == ("float32, 2 clients", 3, 24)
        assert row.differences == []
        assert (row.drafted == 0) == (row.mode == "off")
    assert list(compare_answers(shallow_starter, load_prompts(3), 8, 2, done=comparisons)) == []
    # Interrupted within a batch: only the missing answer is compared again.
    rest = compare_answers(shallow_starter, load_prompts(2), 8, 2, done=comparisons[1:])
    assert list(rest) == comparisons[:1]


@pytest.mark.long
def test_sampled_answers_are_measured_separately(shallow_starter: Engine) -> None:
    engine = altered(shallow_starter, kv_bits=8)
    prompts = load_prompts(2)
    greedy = list(compare_answers(engine, prompts, 8))
    sampled = list(compare_answers(engine, prompts, 8, done=greedy, temperature=0.8))
    assert {each.weights for each in greedy} == {"float32, KV cache of 8 bits"}
    assert {each.weights for each in sampled} == {"float32, KV cache of 8 bits, temperature 0.8"}
    assert len(sampled) == 2 * len(MODES)
    assert all(each.difference is None for each in sampled)


@pytest.mark.long
def test_finished_comparisons_are_skipped(shallow_starter: Engine) -> None:
    prompts = load_prompts(2)
    first = list(compare_answers(shallow_starter, prompts[:1], 4))
    rest = list(compare_answers(shallow_starter, prompts, 4, done=first))
    assert {each.prompt for each in rest} == {prompts[1]}
    # A different limit gives a different comparison.
    assert len(list(compare_answers(shallow_starter, prompts[:1], 3, done=first))) == len(MODES)


@pytest.mark.long
def test_different_answer_is_reported(
    shallow_starter: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = fidelity._generate

    def altered(
        session: Session, prompt: list[int], options: GenerateOptions
    ) -> fidelity.Generated:
        output = answer(session, prompt, options)
        if options.draft != "off":
            output.tokens[3] += 1
        return output

    monkeypatch.setattr(fidelity, "_generate", altered)
    for row in summarize(list(compare_answers(shallow_starter, load_prompts(1), 6))):
        ((_, difference),) = row.differences
        assert difference.position == 3
        assert difference.margin is not None
        assert difference.margin > 0


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8, 3.0])
def test_sampled_token_has_the_best_score(shallow_starter: Engine, temperature: float) -> None:
    prompt = shallow_starter.tokens.encode("Once upon a time")
    for seed in range(3):
        sampling = SamplingOptions(temperature=temperature, seed=seed)
        options = GenerateOptions(3, "off", sampling=sampling)
        tokens = Session(shallow_starter).generate(prompt, options).answer().tokens
        for at, token in enumerate(tokens):
            best = fidelity.scores(shallow_starter, [*prompt, *tokens[:at]], sampling).argmax()
            assert best.item() == token


# The command


@pytest.mark.long
@pytest.mark.usefixtures("loaded_shallow_starter")
def test_command_resumes_an_interrupted_run(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    ask = ("bench", "fidelity", "--max-tokens", "4", "--weights", "float32", "--format", "json",
           "--keep", str(kept))  # fmt: skip
    done = run_here(*ask, "--answers", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["fidelity"]
    assert [each["mode"] for each in found] == ["fixed", "auto"]
    assert all(each["answers"] == 1 and each["differences"] == [] for each in found)
    before = kept.read_text()
    kept.write_text(before + '{"model": "star')  # a truncated line
    done = run_here(*ask, "--answers", "2")
    assert done.returncode == 0, done.stderr
    assert kept.read_text().startswith(before)
    assert len(load_comparisons(kept)) == 4
    assert [each["answers"] for each in json.loads(done.stdout)["fidelity"]] == [2, 2]


@pytest.mark.parametrize("line", ["rubbish", "{}", "[]", '{"difference": null, "x": 1}'])
def test_foreign_file_is_rejected(line: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(StoreError, match="line 1"):
        load_comparisons(path)
