"""First layers that draft: the answer stays the target's, and so does its cache, whatever of what
they have read is accepted. What cannot be run in two parts is refused."""

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
from akunu_py.decoding.sampling import Sampler
from akunu_py.decoding.target import Target
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import DraftMode, GenerateOptions, SamplingOptions
from tests.support.decoding import decode
from tests.support.families import build, kinds
from tests.support.family_answers import prompt_of
from tests.support.family_table import FAMILIES
from tests.support.mixture import Mixture
from tests.support.targets import Timeless, read
from tests.support.tiny import VOCABULARY, tiny_llama
from tests.support.tiny_fim import load_tiny

COUNT = 40
FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays
GREEDY = SamplingOptions()
SEEDED = SamplingOptions(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=5)
LAYERS = 4


class Told(ExitDrafter):
    """One that guesses what it is told: the truth so many times, and something else then."""

    def __init__(
        self, layers: FirstLayers, target: Target, truth: Sequence[int], kv_bits: int | None
    ) -> None:
        super().__init__(layers, target, 1e-6, 0.5)
        self.truth, self.begun, self.compared = truth, 0, 0
        self.kv_bits = kv_bits

    def start_draft(self, known: Sequence[int]) -> bool:
        self.right = len(known) + self.begun % (LONGEST + 1)
        self.begun += 1
        return super().start_draft(known)

    def draft_token(self) -> tuple[int, float]:
        place = len(self._known)
        token, _ = super().draft_token()
        if self.truth:
            token = self.truth[place] if place < len(self.truth) else 0
            token = (token + (place >= self.right)) % VOCABULARY
        self._known[-1] = token
        return token, 0.99

    def clock(self) -> float:
        return 0.0  # no time is measured, so its stated share of a step counts

    def _run(self, tokens: mx.array, cache: kv_cache.Cache, wanted: int) -> mx.array:
        """What both parts give is what the whole model gives that reads all anew."""
        drafted, logits = bool(self._ahead), super()._run(tokens, cache, wanted)
        if drafted and self.truth:
            model, known = self._target.model, [*self._target.tokens, *tokens.tolist()]
            whole = model(mx.array([known]), cache=kv_cache.new_cache(model, self.kv_bits))
            whole = whole[0, -logits.shape[0] :]
            assert mx.abs(whole - logits).max().item() < 0.01 * mx.abs(whole).max().item()
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


def answer(
    target: Target, prompt: list[int], sampling: SamplingOptions, drafter: Any
) -> tuple[list[int], list[int]]:
    """The tokens, and how many were accepted in each pass."""
    target.sampler = Sampler(sampling)
    target.reuse_prefix(prompt)
    read(target)
    drafter.extend(prompt)
    pieces = list(decode(target, drafter, COUNT, ()))
    assert kv_cache.has_length(target.cache, len(target.tokens))
    return [token for piece in pieces for token in piece.tokens], [p.accepted for p in pieces]


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kv_bits", "sampling", "exit_at", "ngrams"),
    [
        ("llama", None, SEEDED, 3, True),
        ("llama", 8, GREEDY, 1, False),
        ("deepseek_v3", None, GREEDY, 1, False),
    ],
)
def test_whatever_they_say_the_answer_is_the_targets(
    name: str, kv_bits: int | None, sampling: SamplingOptions, exit_at: int, ngrams: bool
) -> None:
    """Nearly always wrong, and right and wrong by turns, alone or behind the n-grams' guesses: any
    number of tokens that only the first layers have read is taken back."""
    prompt = prompt_of(name, False)
    wide = {"head_dim": 32} if kv_bits else {}
    model, seen = build(name, num_hidden_layers=LAYERS, **wide), set[int]()
    layers = FirstLayers(model, exit_at)
    truth, _ = answer(Target(model, kv_bits), prompt, sampling, NoDrafter())
    for told in ([], [*prompt, *truth]):
        target = Timeless(model, kv_bits)
        neural_drafter = Told(layers, target, told, kv_bits)
        drafter = AutoDrafter(CostCurve(FREE), neural_drafters=[neural_drafter], ngrams=ngrams)
        tokens, accepted = answer(target, prompt, sampling, drafter)
        assert tokens == truth[: len(tokens)]
        seen |= set(accepted)
        assert neural_drafter.begun
        assert neural_drafter.compared or not told
    assert seen >= set(range(1, LONGEST))


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_guesses_come_before_their_tokens_and_behind_them(sampling: SamplingOptions) -> None:
    """What the first layers have read, and what only the guesses bring, is verified together."""
    model, prompt, ends = build("llama", num_hidden_layers=LAYERS), prompt_of("llama", False), set()
    truth, _ = answer(Target(model, None), prompt, sampling, NoDrafter())
    for seed in range(4):
        target = Timeless(model, None)
        neural_drafter = Told(FirstLayers(model, 1), target, [*prompt, *truth], None)
        drafter = Mixture(neural_drafter, [*prompt, *truth], VOCABULARY, seed)
        tokens, _ = answer(target, prompt, sampling, drafter)
        assert tokens == truth[: len(tokens)]
        assert neural_drafter.compared > 3
        ends |= drafter.ends()
    assert ends >= {1, 2, 3}


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
def test_a_session_drafts_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the layers behind the exit add nothing, the same answers in fewer passes. Only
    where they are asked for; and where the cache cannot be ahead of itself that is refused."""
    monkeypatch.setattr(ExitDrafter, "clock", lambda neural_drafter: 0.0)
    monkeypatch.setattr(Target, "clock", staticmethod(Timeless.clock))
    engine = load_tiny(tmp_path, ["<|end|>"])
    last = engine.model.layers[1]
    for module in (last.self_attn.o_proj, last.mlp.down_proj):
        module.weight = mx.zeros_like(module.weight)
    prompt, passes = engine.tokens.encode("def first(items):\n"), {}
    modes: tuple[DraftMode, ...] = ("off", "exit", "auto")
    for sampling in (GREEDY, SEEDED):
        tokens = set()
        for mode in modes:
            session = Session(engine)
            session.drafting.curve = CostCurve(FREE)
            found = session.generate(prompt, GenerateOptions(60, mode, sampling=sampling)).answer()
            tokens.add(found.tokens)
            passes[mode] = found.stats.target_passes
            assert ("exit 1" in session.learned.neural_drafters) == (mode == "exit")
        assert len(tokens) == 1
        assert passes["exit"] < 0.7 * passes["off"]
    sliding = replace(engine, model=build("llama-sliding"))
    with pytest.raises(UsageError, match=r"--draft exit: .*RotatingKVCache"):
        Session(sliding).generate(prompt, GenerateOptions(draft="exit"))
