"""`--exact`: no pass has more rows than give each row the bits that it has alone."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device, exact_rows
from akunu_py.engine.model.exact_rows import MOST_ROWS, ExactRows
from akunu_py.types import GenerateOptions, LoadOptions
from tests.support.families import build

pytestmark = pytest.mark.long

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 6


class Rounding:
    """A model that rounds differently from `rows` rows on, and notes the rows of its passes."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model, self.rows, self.seen = model, rows, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, *args: Any, **options: Any) -> Any:
        self.seen.append(tokens.shape[1])
        logits = self.model(tokens, *args, **options)
        return logits * (1 + 2**-6) if self.rows <= tokens.shape[1] <= MOST_ROWS else logits


@pytest.mark.parametrize("rows", [2, 3, 6, MOST_ROWS + 1])
def test_the_first_other_bits_limit_the_rows(rows: int) -> None:
    assert ExactRows(Rounding(row_by_row(), rows)).at(0) == rows - 1


def row_by_row() -> Any:
    """A model whose matrix products treat each row alone, as MLX's in half precision on a CPU."""
    return in_half_precision("llama")


def in_half_precision(family: str, **more: int) -> Any:
    model = build.__wrapped__(family, **more)  # a new one: tests share those of `build`
    model.set_dtype(mx.bfloat16)
    return model


def test_no_pass_crosses_a_change_of_the_attention_kernel() -> None:
    exact = ExactRows(row_by_row())
    rows = {0: 8, 1013: 8, 1014: 8, 1015: 7, 1020: 2, 1021: 1, 1023: 1, 1024: 8, 2046: 1}
    assert {context: exact.at(context) for context in rows} == rows


def test_long_contexts_are_measured_with_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, plain = ExactRows(row_by_row()), mx.fast.scaled_dot_product_attention

    def rounding(queries: mx.array, *args: Any, **options: Any) -> mx.array:
        output = plain(queries, *args, **options)
        return output * (1 + 2**-6) if queries.shape[2] > 4 else output

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", rounding)
    assert [exact.at(context) for context in (100, 1500, 5000, 70_000)] == [8, 4, 4, 4]


@pytest.mark.parametrize(("heads", "rows", "apart"), [(6, 8, 5), (8, 8, 4), (12, 4, 2), (4, 8, 8)])
def test_two_calls_of_attention_stay_exact(
    heads: int, rows: int, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = mx.fast.scaled_dot_product_attention

    def kernels(queries: mx.array, *args: Any, **options: Any) -> mx.array:
        """Round as on Metal, where a kernel for few rows computes each of them alone."""
        output, count = plain(queries, *args, **options), queries.shape[2]
        return output if count <= 8 and count * heads <= 32 else output * (1 + 2**-6)

    monkeypatch.setattr(exact_rows, "_plain", kernels)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", kernels)
    shape = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 16}
    model = in_half_precision("llama", **shape)
    assert ExactRows(model).at(0) == apart
    monkeypatch.setattr(device, "on_metal", lambda: True)
    exact = ExactRows(model)
    assert [exact.at(context) for context in (0, 1500, 5000)] == [rows] * 3


@pytest.mark.parametrize(
    ("family", "kv_bits", "context", "rows"),
    [("llama", 8, 100, 8), ("llama", 8, 1500, 1), ("llama-sliding", None, 200, 1)],
)
def test_caches_whose_order_is_unknown_take_single_rows(
    family: str, kv_bits: int | None, context: int, rows: int
) -> None:
    model = in_half_precision(family, **({"head_dim": 32} if kv_bits else {}))
    assert ExactRows(model, kv_bits).at(context) == rows


@pytest.mark.parametrize(("rows", "drafts"), [(2, False), (4, True), (MOST_ROWS + 1, True)])
def test_drafts_change_no_bit(rows: int, drafts: bool, tiny: Engine) -> None:
    engine = Engine.load(tiny.path, LoadOptions(weights="bfloat16", exact=True), name="tiny")
    assert engine.exact is not None
    assert engine.exact.at(50) == MOST_ROWS
    rounding = Rounding(engine.model, rows)
    engine = replace(engine, model=rounding, exact=ExactRows(rounding))
    sampling = replace(GenerateOptions().sampling, logprobs=1)
    answers = []
    for draft in ("off", "fixed", "auto"):
        rounding.seen.clear()
        options = GenerateOptions(32, draft=draft, draft_tokens=12, sampling=sampling)
        answer = StepLoop(engine).answer(PROMPT, options)
        answers.append(answer.tokens)
        assert max(rounding.seen[1:]) < max(2, rows)
        if draft == "fixed":
            assert (answer.stats.accepted > 0) == drafts
    assert answers[0] == answers[1] == answers[2]
    assert StepLoop(engine).runner.try_batching() is False
