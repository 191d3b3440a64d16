"""Neural drafters: draft models, MTP heads and early exits.

Their caches follow the target's, their memory is planned, unsuitable models are refused.
"""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from akunu_py.engine import kv_cache
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.drafters.neural import ExitDrafter, ModelDrafter, find_exit
from akunu_py.engine.drafters.states import HeadDrafter
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model.drafters import DraftModel, difference
from akunu_py.engine.sampling import Sampler
from akunu_py.engine.target import Target
from akunu_py.errors import UsageError
from akunu_py.models.mtp import HEAD_FILE
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import Constraint, DraftMode, GenerateOptions, LoadOptions, SamplingOptions
from tests.support.decoding import decode
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind, kinds
from tests.support.family_table import FAMILIES
from tests.support.identity import plain_tokens, prompt_of
from tests.support.published_drafters import NEEDS
from tests.support.targets import Counting, Timeless, read
from tests.support.tiny import VOCABULARY, tiny_llama
from tests.support.tiny_fim import load_tiny, sentence_piece, write_model
from tests.support.tiny_mtp import VOCABULARY as HEAD_VOCABULARY
from tests.support.tiny_mtp import perfect_weights, write_checkpoint, write_tokenizer

COUNT = 40  # beyond a window or an attention chunk
FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays


class Spoiled(ModelDrafter):
    """Replaces 3 of 10 draft tokens by wrong ones. whole: the prompt and the answer."""

    def __init__(self, model: Any, target: Target, whole: list[int]) -> None:
        super().__init__(DraftModel("draft", Path(), model, NEEDS, 1e-6, VOCABULARY), target)
        self.whole, self.random = whole, random.Random(1)
        self.right: list[bool] = []  # of each token that follows a part of `whole`

    def draft_token(self) -> tuple[int, float]:
        known = list(self._known)
        token, sure = super().draft_token()
        if known == self.whole[: len(known)] != self.whole:
            self.right.append(token == self.whole[len(known)])
        if self.random.random() < 0.3:
            token = self._known._after[-1] = (token + 1) % VOCABULARY
        return token, sure

    def clock(self) -> float:
        return 0.0  # no time is measured, so its stated share of a step counts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@families_of_each_kind(quick=("llama-sliding", "qwen3_next"))
def test_its_cache_goes_back_with_the_targets(name: str, temperature: float) -> None:
    """The target drafts for itself, and every third token is replaced by a wrong one.

    After each rejection it drafts the same as a model that never saw the wrong tokens.
    """
    sampling, prompt = SamplingOptions(temperature=temperature, seed=5), prompt_of(name)
    truth, target = plain_tokens(build(name), prompt, COUNT, sampling), Timeless(build(name))
    target.sampler = Sampler(sampling)
    target.reuse_prefix(prompt)
    read(target)
    model = Spoiled(build(name), target, [*prompt, *truth])
    drafter = AutoDrafter(CostCurve(FREE), neural_drafters=[model], ngrams=False)
    drafter.extend(prompt)
    pieces = decode(target, drafter, COUNT, ())
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert sum(model.right) >= len(model.right) - 1 > 3  # a near-tie may fall otherwise


def test_vocabularies_are_compared() -> None:
    target = {f"t{token}": token for token in range(100)}
    assert not difference(target, dict(target))
    assert not difference(target, target | {"more": 100})
    assert not difference(target | {"more": 100}, target)
    swapped = target | {"t7": 8, "t8": 7}
    why = difference(target, swapped)
    assert "2 of them" in why
    assert "the first is 7: 't7' and 't8'" in why
    assert "knows 50 of its 100" in difference(target, dict(list(target.items())[:50]))


def test_memory_for_a_draft_model_is_planned(tiny: Engine) -> None:
    engine = Engine.load(tiny.path, draft_model=("copy", tiny.path))
    assert engine.draft_model is not None
    assert engine.draft_model.relative_cost == 1.0
    assert engine.plan.fit.needs == tiny.plan.fit.needs.with_draft(tiny.plan.fit.needs)
    assert engine.plan.fit.estimate.weights == 2 * tiny.plan.fit.estimate.weights


@pytest.fixture
def copied(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Whose own copy always pays as its draft model."""
    monkeypatch.setattr(ModelDrafter, "clock", lambda neural_drafter: 0.0)
    monkeypatch.setattr(Target, "clock", staticmethod(Timeless.clock))
    engine = Engine.load(tiny.path, draft_model=("copy", tiny.path))
    assert engine.draft_model is not None
    return replace(engine, draft_model=replace(engine.draft_model, relative_cost=1e-6))


@pytest.mark.long
def test_drafts_follow_the_grammar(copied: Engine) -> None:
    """As the target does, which would else have had other tokens nine times of ten."""
    for temperature in (0.0, 1.0):
        sampling = SamplingOptions(
            temperature=temperature, seed=2, constraint=Constraint("regex", "[a-e ]{40}")
        )
        options = GenerateOptions(40, draft="model", sampling=sampling, draft_tree="off")
        loop, prompt = StepLoop(copied), copied.tokens.encode("Say: ")
        plain = loop.answer(prompt, replace(options, draft="off"))
        drafted = StepLoop(copied).answer(prompt, options)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.drafted > 10
        assert drafted.stats.acceptance_rate > 0.9


@pytest.mark.long
def test_its_prompt_cache_stays_for_the_next_request(copied: Engine) -> None:
    """Another loop that continues the history prefills only new tokens."""
    assert copied.draft_model is not None
    counting = Counting(copied.draft_model.model)
    small = replace(copied.draft_model, model=counting)
    engine = altered(copied, draft_model=small, prompt_cache_memory=1 << 30)
    first, prompt = StepLoop(engine), engine.tokens.encode("once upon a time " * 20)
    options = GenerateOptions(20, draft="model")
    reported = first.answer(prompt, options).tokens
    assert counting.rows > len(prompt)
    (cached,) = first.runner.caches.histories()
    (history,) = cached.drafter_histories.values()
    assert cached.nbytes > history.nbytes > 0
    counting.rows = 0
    more = [*prompt, *reported, *engine.tokens.encode(" and then")]
    again = first.answer(more, options)
    assert again.tokens == StepLoop(engine).answer(more, replace(options, draft="off")).tokens
    assert again.stats.drafted
    assert 0 < counting.rows < len(prompt) / 2
    (cached,) = first.runner.caches.histories()
    assert cached.shorten(1)
    assert not cached.drafter_histories


def test_a_model_of_other_tokens_is_refused(tiny: Engine, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", sentence_piece(["<|end|>"]), end="<|end|>")
    with pytest.raises(UsageError, match=r"other cannot draft for tiny: their tokens differ, "):
        Engine.load(tiny.path, name="tiny", draft_model=("other", other))
    modes: tuple[DraftMode, ...] = ("model", "mtp")
    for mode in modes:
        with pytest.raises(UsageError, match=f"--draft {mode}: "):
            StepLoop(tiny).request([1], GenerateOptions(draft=mode))


PROMPT = [random.Random(7).randrange(HEAD_VOCABULARY) for _ in range(40)]
GREEDY = SamplingOptions()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def run(engine: Engine, mode: DraftMode, sampling: SamplingOptions = GREEDY) -> Any:
    options = GenerateOptions(max_tokens=16, draft=mode, sampling=sampling, draft_tree="off")
    head = replace(engine.mtp_head, relative_cost=1e-6) if engine.mtp_head else None
    loop = StepLoop(replace(engine, mtp_head=head), UnsavedState(CostCurve(FREE)))
    first = loop.answer(PROMPT, options)
    again = [*PROMPT, *first.tokens, 5, 6, 7]  # the next turn
    return [first, loop.answer(again, options)]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5", "mimo"])
def test_a_perfect_head_drafts_for_a_session(
    family: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers with and without it, in far fewer passes: its model looks at the last token
    only, and so does the head."""
    monkeypatch.setattr(HeadDrafter, "clock", lambda neural_drafter: 0.0)
    published = perfect_weights(directory, family)
    engine = Engine.load(directory)
    assert engine.mtp_head is not None
    for sampling in (SamplingOptions(temperature=0.8, seed=4), GREEDY):
        bare, drafted = run(engine, "off", sampling), run(engine, "mtp", sampling)
        assert [each.tokens for each in drafted] == [each.tokens for each in bare]
        for each in drafted:
            assert each.stats.tokens_per_pass > 1.5
            assert each.stats.acceptance_rate > 0.9
    turned = {name: -weight for name, weight in published.items()}
    mx.save_safetensors(str(directory / HEAD_FILE), turned)
    drafted = run(Engine.load(directory), "auto")
    assert [each.tokens for each in drafted] == [each.tokens for each in bare]


def test_its_memory_counts_and_what_has_none_says_so(directory: Path) -> None:
    write_checkpoint(directory, "qwen3_5", head=False)
    without = Engine.load(directory)
    with pytest.raises(UsageError, match="no MTP head"):
        StepLoop(without).request(PROMPT, GenerateOptions(draft="mtp"))
    write_checkpoint(directory, "qwen3_5")
    engine = Engine.load(directory)
    assert engine.mtp_head is not None
    chain = engine.mtp_head.chain
    size = sum(value.nbytes for _, value in tree_flatten(chain.parameters()))
    more = engine.plan.fit.needs.weights - without.plan.fit.needs.weights
    assert more == size == engine.mtp_head.needs.weights
    cache = chain.make_cache()
    rows = mx.zeros((1, 256, engine.model.layers[0].input_layernorm.weight.size))
    chain.extend(rows, rows, cache)
    grown = engine.plan.fit.needs.cache.at(256) - without.plan.fit.needs.cache.at(256)
    assert grown == kv_cache.nbytes(cache)
    least = without.plan.fit.needs.at(512).total
    tight = Engine.load(directory, LoadOptions(memory_limit=least + size // 2))
    assert tight.mtp_head is None
    assert "not enough memory" in tight.no_mtp_head_reason


def engine_of(model: Any, kv_bits: int | None = None) -> Any:
    return SimpleNamespace(
        model=model,
        name="tiny",
        host_group=None,
        plan=SimpleNamespace(kv_bits=kv_bits),
        tokens=SimpleNamespace(
            encode_text=lambda text: [byte % VOCABULARY for byte in text.encode()]
        ),
    )


@pytest.mark.long
def test_first_layers_of_families_run_alone_or_are_refused() -> None:
    """Refused where a layer's cache cannot be ahead of another's: those that only grow can."""
    offered, plain = set(), set()
    for name in FAMILIES:
        if kinds(kv_cache.new_cache(build(name))) <= {"KVCache"}:
            plain.add(name)
        if isinstance(find_exit(build(name), engine_of(build(name))), int):
            offered.add(name)
    assert offered == plain


def test_the_exit_is_where_the_layers_behind_it_add_nothing() -> None:
    model = tiny_llama(num_hidden_layers=8)
    for layer in model.layers[3:]:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight = mx.zeros_like(module.weight)
    assert find_exit(model, engine_of(model)) == 3


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
        loop = StepLoop(engine, UnsavedState(CostCurve(FREE)))
        answer = loop.answer(prompt, GenerateOptions(60, mode))
        passes[mode] = answer.stats.target_passes
        assert ("exit 1" in loop.learned.neural_drafters) == (mode == "exit")
    assert passes["exit"] < 0.7 * passes["off"]
    sliding = replace(engine, model=build("llama-sliding"))
    with pytest.raises(UsageError, match=r"--draft exit: .*RotatingKVCache"):
        StepLoop(sliding).request(prompt, GenerateOptions(draft="exit"))
