"""Early exit: both parts of a split model compute what the whole model does; others are refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from akunu_py.decoding import kv_cache
from akunu_py.decoding.drafting.early_exit import (
    ExitDrafter,
    choose_exit,
    measure_exits,
)
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.target import Target
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import DraftMode, GenerateOptions
from tests.support.families import build, kinds
from tests.support.family_table import FAMILIES
from tests.support.targets import Timeless
from tests.support.tiny import VOCABULARY, tiny_llama
from tests.support.tiny_fim import load_tiny

FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays


def engine_of(model: Any, kv_bits: int | None = None) -> Any:
    return SimpleNamespace(
        model=model,
        name="tiny",
        plan=SimpleNamespace(kv_bits=kv_bits),
        tokens=SimpleNamespace(
            encode_text=lambda text: [byte % VOCABULARY for byte in text.encode()]
        ),
    )


@pytest.mark.long
def test_families_are_run_in_two_parts_or_refused() -> None:
    """Refused where a layer's cache cannot be ahead of another's: those that only grow can."""
    offered, plain = set(), set()
    for name in FAMILIES:
        if kinds(kv_cache.new_cache(build(name))) <= {"KVCache"}:
            plain.add(name)
        with contextlib.suppress(UnsupportedModel):
            found = choose_exit(engine_of(build(name)))
            assert 0.0 <= found.agreement <= 1.0
            assert 0.0 < found.reused < found.share < 1.0
            offered.add(name)
    assert offered == plain


def test_the_exit_is_where_the_layers_behind_it_add_nothing() -> None:
    model = tiny_llama(num_hidden_layers=8)
    for layer in model.layers[3:]:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight = mx.zeros_like(module.weight)
    agreements = [each.agreement for each in measure_exits(engine_of(model), range(1, 8))]
    assert agreements[2:] == [1.0] * 5
    assert max(agreements[:2]) < 1.0
    assert choose_exit(engine_of(model)).layers == 3


@pytest.mark.long
def test_a_perfect_exit_saves_passes_if_the_client_chooses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExitDrafter, "clock", lambda neural_drafter: 0.0)
    monkeypatch.setattr(Target, "clock", staticmethod(Timeless.clock))
    engine = load_tiny(tmp_path, ["<|end|>"])
    last = engine.model.layers[1]
    for module in (last.self_attn.o_proj, last.mlp.down_proj):
        module.weight = mx.zeros_like(module.weight)
    prompt, passes = engine.tokens.encode("def first(items):\n"), {}
    modes: tuple[DraftMode, ...] = ("off", "exit", "auto")
    for mode in modes:
        session = Session(engine, UnsavedState(CostCurve(FREE)))
        answer = session.generate(prompt, GenerateOptions(60, mode)).answer()
        passes[mode] = answer.stats.target_passes
        assert ("exit 1" in session.learned.neural_drafters) == (mode == "exit")
    assert passes["exit"] < 0.7 * passes["off"]
    sliding = replace(engine, model=build("llama-sliding"))
    with pytest.raises(UsageError, match=r"--draft exit: .*RotatingKVCache"):
        Session(sliding).generate(prompt, GenerateOptions(draft="exit"))
