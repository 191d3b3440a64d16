"""Drafting on beside drafting off, answer by answer, precision by precision."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.bench import fidelity
from akunu_py.bench.fidelity import (
    MODES,
    compare_answers,
    load_comparisons,
    load_prompts,
    summarize,
)
from akunu_py.bench.numerics.precisions import PRECISIONS
from akunu_py.decoding import kv_cache
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import StoreError, UsageError
from akunu_py.types import GenerateOptions, LoadOptions, SamplingOptions, WeightMode
from tests.support.command import run_here
from tests.support.engines import altered
from tests.support.tiny_model import tiny_directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small quantized model."""
    return tiny_directory(tmp_path_factory.mktemp("tiny"))


def test_the_prompts_are_many_and_all_different() -> None:
    prompts = load_prompts(300)
    assert len(set(prompts)) == 300
    assert not any("{" in prompt and "}" in prompt for prompt in prompts)
    assert load_prompts(5) == prompts[:5]
    with pytest.raises(UsageError, match="there are 300 prompts"):
        load_prompts(301)


def test_in_float32_nothing_differs(shallow_starter: Engine) -> None:
    comparisons = list(compare_answers(shallow_starter, load_prompts(2), 16))
    assert [each.mode for each in comparisons] == list(MODES) * 2
    for row in summarize(comparisons):
        assert (row.weights, row.answers, row.tokens) == ("float32", 2, 32)
        assert row.differences == []
        assert row.drafting_passes > 1


def test_sampled_answers_are_another_measurement(shallow_starter: Engine) -> None:
    engine = altered(shallow_starter, kv_bits=8)
    prompts = load_prompts(2)
    greedy = list(compare_answers(engine, prompts, 8))
    sampled = list(compare_answers(engine, prompts, 8, done=greedy, temperature=0.8))
    assert {each.weights for each in greedy} == {"float32, KV cache of 8 bits"}
    assert {each.weights for each in sampled} == {"float32, KV cache of 8 bits, temperature 0.8"}
    assert len(sampled) == 2 * len(MODES)
    assert all(each.difference is None for each in sampled)


def test_what_is_done_is_not_done_again(shallow_starter: Engine) -> None:
    prompts = load_prompts(2)
    first = list(compare_answers(shallow_starter, prompts[:1], 4))
    rest = list(compare_answers(shallow_starter, prompts, 4, done=first))
    assert {each.prompt for each in rest} == {prompts[1]}
    # Another length is another answer.
    assert len(list(compare_answers(shallow_starter, prompts[:1], 3, done=first))) == len(MODES)


def test_an_answer_that_differs_is_found(
    shallow_starter: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = fidelity._answer

    def altered(
        session: Session, prompt: list[int], options: GenerateOptions, *rest: object
    ) -> list[int]:
        output = answer(session, prompt, options, *rest)  # type: ignore[arg-type]
        if options.draft != "off":
            output[3] += 1
        return output

    monkeypatch.setattr(fidelity, "_answer", altered)
    for row in summarize(list(compare_answers(shallow_starter, load_prompts(1), 6))):
        ((_, difference),) = row.differences
        assert difference.position == 3
        assert difference.margin is not None
        assert difference.margin > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8, 3.0])
def test_the_best_score_is_that_of_the_token_that_is_sampled(
    shallow_starter: Engine, temperature: float
) -> None:
    prompt = shallow_starter.tokens.encode("Once upon a time")
    for seed in range(3):
        sampling = SamplingOptions(temperature=temperature, seed=seed)
        options = GenerateOptions(3, "off", sampling=sampling)
        tokens = Session(shallow_starter).generate(prompt, options).answer().tokens
        for at, token in enumerate(tokens):
            best = fidelity.scores(shallow_starter, [*prompt, *tokens[:at]], sampling).argmax()
            assert best.item() == token


# Precisions


def logits(engine: Engine) -> mx.array:
    cache = kv_cache.new_cache(engine.model)
    return engine.model(mx.array([[1, 2, 3, 4, 5]]), cache=cache)[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("keep", "4-bit + 8-bit + float16"),
        ("keep-float32", "4-bit + 8-bit + float32"),
        ("bfloat16-blas", "bfloat16, through the BLAS"),
        ("keep-blas", "4-bit + 8-bit + float16, through the BLAS"),
    ],
)
def test_each_precision_has_nearly_the_same_logits(tiny: Path, name: str, words: str) -> None:
    exact = logits(Engine.load(tiny, LoadOptions(weights="float32")))
    weights, altered = PRECISIONS[name]
    engine = Engine.load(tiny, LoadOptions(weights=weights))
    engine = altered(engine) if altered else engine
    assert engine.plan.weights == words
    found = logits(engine)
    wide = mx.float32 if "float32" in words else mx.bfloat16 if "bfloat16" in words else mx.float16
    assert found.dtype == wide
    error = float(mx.abs(found.astype(mx.float32) - exact).max() / mx.abs(exact).max())
    assert error < (1e-5 if wide == mx.float32 else 0.05)
    assert {each.weights for each in compare_answers(engine, ["Hello"], 4)} == {words}


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="of MLX's CPU kernels")
@pytest.mark.parametrize("weights", ["bfloat16", "keep"])
def test_cpu_kernels_of_half_precision_treat_every_row_alone(
    tiny: Path, weights: WeightMode
) -> None:
    """So drafting cannot change an answer there, and the BLAS stands in for a GPU's kernels."""
    engine = Engine.load(tiny, LoadOptions(weights=weights))
    cache = kv_cache.new_cache(engine.model)
    alone = [engine.model(mx.array([[token]]), cache=cache)[0, 0] for token in (1, 2, 3, 4, 5)]
    assert mx.array_equal(mx.stack(alone), logits(engine)).item()


# The command


@pytest.mark.usefixtures("loaded_shallow_starter")
def test_the_command_goes_on_where_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    ask = ("bench", "fidelity", "--max-tokens", "4", "--weights", "float32", "--format", "json",
           "--keep", str(kept))  # fmt: skip
    done = run_here(*ask, "--answers", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["fidelity"]
    assert [each["mode"] for each in found] == ["fixed", "auto"]
    assert all(each["answers"] == 1 and each["differences"] == [] for each in found)
    before = kept.read_text()
    kept.write_text(before + '{"model": "star')  # a run that was cut off
    done = run_here(*ask, "--answers", "2")
    assert done.returncode == 0, done.stderr
    assert kept.read_text().startswith(before)
    assert len(load_comparisons(kept)) == 4
    assert [each["answers"] for each in json.loads(done.stdout)["fidelity"]] == [2, 2]


@pytest.mark.parametrize("line", ["rubbish", "{}", "[]", '{"difference": null, "x": 1}'])
def test_a_file_that_is_none_of_ours_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(StoreError, match="line 1"):
        load_comparisons(path)
