"""Early exit: both parts of a split model compute what the whole model does; others are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from akunu_py.decoding import kv_cache
from akunu_py.decoding.drafting.early_exit import (
    LONGEST,
    ExitDrafter,
    FirstLayers,
    choose_exit,
    measure_exits,
)
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.target import Target
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import DraftMode, GenerateOptions
from tests.support.decoding import decode
from tests.support.drafters import Mixture
from tests.support.families import build, kinds
from tests.support.family_answers import prompt_of
from tests.support.family_table import FAMILIES
from tests.support.identity import plain_tokens
from tests.support.targets import Timeless, read
from tests.support.tiny import VOCABULARY, tiny_llama
from tests.support.tiny_fim import load_tiny

COUNT = 40
FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays
LAYERS = 4


class Scripted(ExitDrafter):
    """Drafts `whole`, and from some place on wrong tokens; compares the logits of its passes."""

    def __init__(
        self, layers: FirstLayers, target: Target, whole: Sequence[int], kv_bits: int | None
    ) -> None:
        super().__init__(layers, target, 1e-6, 0.5)
        self.whole, self.begun, self.compared = whole, 0, 0
        self.kv_bits = kv_bits

    def start_draft(self, known: Sequence[int]) -> bool:
        self.right = len(known) + self.begun % (LONGEST + 1)
        self.begun += 1
        return super().start_draft(known)

    def draft_token(self) -> tuple[int, float]:
        place = len(self._known)
        super().draft_token()
        token = self.whole[place] if place < len(self.whole) else 0
        token = self._known[-1] = (token + (place >= self.right)) % VOCABULARY
        return token, 0.99

    def clock(self) -> float:
        return 0.0  # no time is measured, so the given share of a step counts

    def _run(self, tokens: mx.array, cache: kv_cache.Cache, wanted: int) -> mx.array:
        drafted, logits = bool(self._ahead), super()._run(tokens, cache, wanted)
        if drafted:
            model, known = self._target.model, [*self._target.tokens, *tokens.tolist()]
            expected = model(mx.array([known]), cache=kv_cache.new_cache(model, self.kv_bits))
            expected = expected[0, -logits.shape[0] :]
            assert mx.abs(expected - logits).max().item() < 0.01 * mx.abs(expected).max().item()
            self.compared += 1
        return logits


def engine_of(model: Any, kv_bits: int | None = None) -> Any:
    return SimpleNamespace(
        model=model,
        name="tiny",
        plan=SimpleNamespace(kv_bits=kv_bits),
        tokens=SimpleNamespace(
            encode_text=lambda text: [byte % VOCABULARY for byte in text.encode()]
        ),
    )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("name", "kv_bits", "exit_at"),
    [
        ("llama", None, 3),
        ("llama", 8, 1),
        pytest.param("deepseek_v3", None, 1, marks=pytest.mark.long),
    ],
)
def test_both_parts_compute_what_the_whole_model_does(
    name: str, kv_bits: int | None, exit_at: int, mixed: bool
) -> None:
    """After any number of rejected tokens. mixed: with guesses before and after those tokens."""
    prompt, wide = prompt_of(name, False), {"head_dim": 32} if kv_bits else {}
    model = build(name, num_hidden_layers=LAYERS, **wide)
    truth = plain_tokens(model, prompt, COUNT, kv_bits=kv_bits)
    target = Timeless(model, kv_bits)
    exits = Scripted(FirstLayers(model, exit_at), target, [*prompt, *truth], kv_bits)
    mixture = Mixture(exits, exits.whole, VOCABULARY, 1) if mixed else None
    drafter = mixture or AutoDrafter(CostCurve(FREE), neural_drafters=[exits], ngrams=False)
    target.reuse_prefix(prompt)
    read(target)
    drafter.extend(prompt)
    pieces = list(decode(target, drafter, COUNT, ()))
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert kv_cache.has_length(target.cache, len(target.tokens))
    assert exits.compared > 3
    assert mixed or {piece.accepted for piece in pieces} >= set(range(1, LONGEST))


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
