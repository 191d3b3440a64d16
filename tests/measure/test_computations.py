"""What the tools compute, on figures and texts whose result is known."""

import math
import random
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from akunu_py.bench.result import Repeat, Throughput
from akunu_py.bench.trace import TraceItem
from akunu_py.engine import kv_cache
from akunu_py.engine.engine import Engine
from tests.measure import check, fidelity, mac_checks
from tests.measure.caches import replay_caches, schedule
from tests.measure.check import Check, Promise
from tests.measure.oracle import score_directory
from tests.support.bench_fakes import drafted_series, fake_result
from tests.support.paths import golden_sources
from tests.support.tiny_model import tiny_directory

# The check


def test_each_matrix_shape_has_rows_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(512, 24), nn.Linear(512, 24), nn.Linear(24, 512))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, class_predicate=lambda _, each: each.weight.shape == (24, 512))
    found = mac_checks.row_kernels(model)
    assert list(found) == ["24x512 4-bit/64 bfloat16"]
    if not mx.metal.is_available():
        (probed,) = found.values()
        assert probed["mlx_equal"] == [*range(2, 17)]  # MLX's CPU backend treats each row alone
        assert probed["error"] == "no Apple GPU"
        times = {2: (0.002, 0.001), 5: (0.003, 0.0015)}
        measured = probed | {"times": times, "equal": [2], "error": ""}
        figures = {"row_kernels": found | {"b": measured}, "replay": {"as used": {"chat": 1.5}}}
        finished = Check(check.QUICK, figures={"tiny": figures})
        check.print_check(finished)
        printed = capsys.readouterr().out
        assert re.search(r"b +2 +yes +yes +2.000 +1.000", printed)
        assert re.search(r"b +5 +yes +no +3.000 +1.500", printed)
        assert "replay with the cost of passes as used: chat 1.50" in printed


def speed_lines(off: float, auto: float, **more: Any) -> dict[str, Promise]:
    """Return the lines of three runners at these speeds; mlx-lm has 100 tokens per second."""
    rates = {"mlx-lm": 100.0, "off": off, "auto": auto}
    result = fake_result(
        [drafted_series(n, repeats=[Repeat(100, 100 / r, 0.1)], **more) for n, r in rates.items()]
    )
    result.throughput = [Throughput("pp512", "mlx-lm", [1000.0]),
                         Throughput("pp512", "akunu", [off * 10])]  # fmt: skip
    found = Check(check.QUICK)
    check.check_speed("tiny", result, found)
    return {line.name: line for line in found.lines}


def test_speed_is_compared_with_mlx_lm_and_with_off() -> None:
    lines = speed_lines(97.0, 98.0)
    assert [line.verdict for line in lines.values()] == ["FAIL", "FAIL", "pass", "pass", "pass"]
    assert lines["edit: auto compared with off"].value == pytest.approx(98 / 97)
    assert {line.verdict for line in speed_lines(98.0, 99.0).values()} == {"pass"}
    assert speed_lines(90, 90)["prefill, pp512, compared with mlx-lm"].verdict == "FAIL"


@pytest.mark.parametrize(
    ("margin", "verdict"),
    [(0.25, "pass"), (1.5, "FAIL"), (None, "FAIL")],  # None: other prompts
)
def test_answers_may_differ_at_near_ties(margin: float | None, verdict: str) -> None:
    lines = speed_lines(100, 100, identical=False, difference={"margin": margin})
    line = lines["largest margin where answers differ from mlx-lm's"]
    assert line.verdict == verdict
    assert line.note.startswith("0 of 3")


@pytest.mark.parametrize(
    ("wrong", "verdict", "exact"),
    [(1.0, "pass", 33), (1 + 2**-7, "pass", 12), (1.5, "FAIL", 12), (math.nan, "FAIL", 12)],
)
def test_kernel_that_is_wrong_from_some_row_count_is_reported(
    wrong: float, verdict: str, exact: int
) -> None:
    def kernel(start: int, stop: int) -> mx.array:
        rows = mx.ones((stop - start, 64))
        return rows if stop - start < 13 else rows * mx.where(mx.arange(64) == 5, wrong, 1.0)

    line = check.rows_promise("k", mx.bfloat16, [mac_checks.compare_rows(kernel)], here=True)
    assert line.verdict == verdict
    assert line.value == (math.inf if math.isnan(wrong) else pytest.approx(wrong - 1))
    assert f"up to {exact} rows" in line.note


def test_kernels_give_the_same_for_rows_together_and_alone() -> None:
    attention, matrix = mac_checks.attention_rows, mac_checks.quantized_rows
    for found in (attention(mx.float32, 16, 4), matrix(4, mx.float32, 64, 64)):
        assert max(found["difference"]) < 1e-5
        assert len(found["identical"]) == mac_checks.MOST_ROWS


# Fidelity


@pytest.mark.long
def test_no_answer_differs_in_float32(shallow_starter: Engine) -> None:
    assert len(set(fidelity.load_prompts(300))) == 300
    prompts = fidelity.load_prompts(2)
    rows: list[dict[str, Any]] = []
    fidelity.compare_answers(shallow_starter, prompts, 16, 0.8, rows)
    for row in rows:
        assert (row["answers"], row["tokens"], row["differences"]) == (2, 32, [])
        assert row["weights"] == "float32, temperature 0.8"
        assert row["drafting_passes"] > 0


@pytest.mark.parametrize("name", ["keep-float32", "bfloat16-blas", "keep-blas"])
def test_precision_has_nearly_the_same_logits(tmp_path: Path, name: str) -> None:
    def logits(engine: Engine) -> mx.array:
        cache = kv_cache.new_cache(engine.model)
        return engine.model(mx.array([[1, 2, 3, 4, 5]]), cache=cache)[0]

    tiny = str(tiny_directory(tmp_path))
    exact = logits(fidelity.load_precision(tiny, "float32"))
    found = logits(fidelity.load_precision(tiny, name))
    formats = {"keep-float32": mx.float32, "bfloat16-blas": mx.bfloat16, "keep-blas": mx.float16}
    assert found.dtype == formats[name]
    error = float(mx.abs(found.astype(mx.float32) - exact).max() / mx.abs(exact).max())
    assert error < (1e-5 if found.dtype == mx.float32 else 0.05)


# Prompt caches


def session(seed: int) -> list[TraceItem]:
    """Return a growing conversation."""
    draw = random.Random(seed)
    tokens, items = [draw.randrange(1000) for _ in range(300)], []
    for _ in range(8):
        tokens += [draw.randrange(1000) for _ in range(draw.randrange(50, 250))]
        output = [draw.randrange(1000) for _ in range(20)]
        items.append(TraceItem(tuple(tokens), tuple(output)))
        tokens += output
    return items


@pytest.mark.long
def test_own_policy_prefills_less_again_than_lru() -> None:
    totals = dict.fromkeys(("akunu", "lru"), 0)
    sessions = [session(seed) for seed in range(4)]
    for aside in (False, True):
        orders = [schedule(sessions, 3, seed, aside=aside) for seed in range(3)]
        for budget in (2_000, 3_000, 5_000):
            again = {
                policy: sum(replay_caches(each, budget, policy) for each in orders)
                for policy in totals
            }
            assert again["akunu"] <= again["lru"]
            totals = {policy: totals[policy] + again[policy] for policy in totals}
    assert totals["akunu"] < 0.9 * totals["lru"]


# Completion


@pytest.mark.long
def test_stop_rules_reach_their_goals_in_20_languages(tmp_path: Path) -> None:
    """At least 99.5 % of all places are safe and 95 % of all blocks whole."""
    for name, text in golden_sources().items():
        (tmp_path / name).write_text(text)
    found = score_directory(tmp_path, 4)
    assert len(found["languages"]) == 20
    assert found["all"]["places"] > 180
    assert found["reached"], found["languages"]
