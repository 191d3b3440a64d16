"""Drafters of hidden states follow the target through rejected drafts, and change no token."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import gemma4_text

from akunu_py.engine import kv_cache
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.drafters.neural import NeuralDrafterBase
from akunu_py.engine.drafters.states import HeadDrafter, ParallelDrafter, published_drafter
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import output_rows
from akunu_py.engine.model.device import weight_bytes
from akunu_py.engine.model.drafters import PublishedDrafter, quantize_drafter
from akunu_py.engine.target import Target
from akunu_py.errors import UnsupportedModel
from akunu_py.models.load.mlx_loader import open_directory
from akunu_py.models.mtp import load_heads
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import DraftMode, GenerateOptions
from tests.support import tiny_drafters as drafters
from tests.support.drafters import Mixture
from tests.support.families import build
from tests.support.identity import plain_tokens
from tests.support.published_drafters import NEEDS, block_drafter, load, save_drafter, write_drafter
from tests.support.slow import cover, slow
from tests.support.targets import Timeless, drafted, some
from tests.support.tiny import LLAMA, VOCABULARY, TreeAdversary, tiny_llama
from tests.support.tiny_mtp import CONFIGS, write_checkpoint
from tests.support.tiny_mtp import VOCABULARY as HEAD_VOCABULARY

pytestmark = pytest.mark.long

COUNT = 20
PROMPT = some(40, 7)
FREE = {1: 1.0, 33: 1.01}  # costs with which everything pays
MOST = 4  # right tokens of a draft
MTP_QUICK = ("qwen3_5", "mimo")
BLOCKS = ("dflash", "dflash2", "dspark")
EAGLE3 = {"eagle3": {}, "peagle": {"speculators_model_type": "peagle", "mask_token_id": 3}}


def make(kind: str, family: str, directory: Path) -> tuple[Any, Any, int]:
    """Return a target, its drafter, and the size of the vocabulary."""
    if kind in BLOCKS:
        model = build(family)
        width = model.layers[0].input_layernorm.weight.size
        return model, block_drafter(kind, model, width, VOCABULARY).model, VOCABULARY
    if kind == "mtp":
        write_checkpoint(directory, family)
        opened = open_directory(directory)
        return opened.model, load_heads(directory, opened.model, opened.config), HEAD_VOCABULARY
    if kind == "assistant":
        config = drafters.assistant_config(1, clusters=True)
        settings = drafters.assistant_target(config)["text_config"]
        weights = drafters.assistant_checkpoint(config, 1)
        del weights["target.weight"]
        mx.random.seed(0)
        model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(settings))
        model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters()))
    else:
        config = drafters.eagle3_config(0, **EAGLE3[kind])
        shape = {
            "hidden_size": config["target_hidden_size"], "num_hidden_layers": 6,
            "vocab_size": config["transformer_layer_config"]["vocab_size"],
        }  # fmt: skip
        model, settings = tiny_llama(**shape), LLAMA | shape
        weights = drafters.eagle3_checkpoint(config, 0)
    save_drafter(directory, config, weights)
    return model, load(directory, settings), settings["vocab_size"]


def states_of(drafts: Any, model: Any, tokens: Sequence[int], cache: kv_cache.Cache) -> mx.array:
    """Return what `drafts` keeps of the hidden states of a pass over `tokens`."""
    kept = output_rows.run(model, mx.array([tokens]), cache, lambda rows: rows, drafts.taps)[1]
    return drafts._network.states(mx.concatenate([kept[tap] for tap in drafts.taps], -1))


class Scripted:
    """Drafts `whole`, and from some place on wrong tokens.

    Compares the logits of each token with those of a drafter with new caches.
    """

    begun = 0
    whole: Sequence[int]
    vocabulary: int

    def clock(self) -> float:
        return 0.0

    def begin(self: Any, states: mx.array, tokens: Sequence[int]) -> Any:
        draft = super().begin(states, tokens)  # type: ignore[misc]
        if draft is not None:
            self.right = len(self._known) + self.begun % (MOST + 1)
            self.begun += 1
            self.alone = self.begin_alone(list(self._known), self._history.first)
        return draft

    def begin_alone(self: Any, known: Sequence[int], first: int) -> Any:
        """Begin the same draft with new caches. first: position of the drafter's first row."""
        target_cache, own = kv_cache.new_cache(self._target.model), self.make_cache(first)
        hidden = states_of(self, self._target.model, known[:-1], target_cache)[:, first:]
        if isinstance(self, ParallelDrafter):
            self._network.extend(hidden, None, own)
            return self._network.start(self._ends, known[-1], own)
        embeddings = self._network.embed(mx.array([known[first + 1 :]]), self._ends)
        made = self._network.extend(hidden, embeddings, own)
        cache = target_cache if self._network.attends_to_target else own
        return self._network.start(self._ends, made, cache)

    def draft_token(self: Any) -> tuple[int, float]:
        place, previous = len(self._known), self._known[-1]
        token, chance = super().draft_token()  # type: ignore[misc]
        if token < 0:
            return token, chance
        found, expected = (
            np.array(each.logits(self._depth - 1, previous)) for each in (self._draft, self.alone)
        )
        np.testing.assert_allclose(found, expected, atol=5e-3)
        token = self.whole[place] if place < len(self.whole) else 0
        token = self._known._after[-1] = (token + (place >= self.right)) % self.vocabulary
        return token, 0.99


@pytest.mark.parametrize("kept", [*slow(512), 16])
@pytest.mark.parametrize(("kind", "family"), [
    *product(BLOCKS, ("llama", "qwen3_next")),
    *((kind, "llama") for kind in EAGLE3),
    ("assistant", "gemma4"),
    *(
        pytest.param("mtp", family, marks=() if family in MTP_QUICK else pytest.mark.slow)
        for family in CONFIGS
    ),
])  # fmt: skip
def test_drafts_equal_those_of_new_caches(
    kind: str, family: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of rejected tokens, also without the states of the prompt's beginning."""
    model, drafter, vocabulary = make(kind, family, tmp_path)
    prompt = [token % vocabulary for token in PROMPT]
    truth, target = plain_tokens(model, prompt, COUNT), Timeless(model)
    base: type[Any] = ParallelDrafter if kind in BLOCKS else HeadDrafter
    monkeypatch.setattr(base, "_kept", kept)
    drafts: Any = type("Scripted", (Scripted, base), {})(drafter, target, "x", 1e-6)
    drafts.whole, drafts.vocabulary = [*prompt, *truth], vocabulary
    proposals = AutoDrafter(CostCurve(FREE), neural_drafters=[drafts], ngrams=False)
    pieces = drafted(target, drafts, proposals, prompt, COUNT)
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert drafts.begun > COUNT // 5
    most = min(drafts.longest, MOST)
    assert {piece.accepted for piece in pieces} >= set(range(most + 1))
    if kind != "assistant":  # which has no rows
        assert drafts._history.first == (0 if kept == 512 else len(PROMPT) - 1 - kept)


def test_hidden_states_follow_an_accepted_branch(tmp_path: Path) -> None:
    model, drafter, _ = make("dflash", "llama", tmp_path)
    truth, target = plain_tokens(model, PROMPT, COUNT), Target(model)
    drafts = published_drafter(PublishedDrafter("x", tmp_path, drafter, NEEDS, 1e-6), target)
    pieces = drafted(target, drafts, TreeAdversary(PROMPT, truth, seed=1), PROMPT, COUNT)
    assert [token for piece in pieces for token in piece.tokens] == truth
    trees = [each for each in pieces if each.drafted > each.accepted + len(each.rejected)]
    assert sum(each.accepted for each in trees) > COUNT // 3
    end = len(target.tokens)
    states = states_of(drafts, model, target.tokens, kv_cache.new_cache(model))
    found = drafts._history.read(0, end)
    np.testing.assert_allclose(np.array(found), np.array(states), atol=5e-3)


def sizes_of(engine: Engine) -> tuple[int, int]:
    """Return the width and the size of the vocabulary of a tiny llama."""
    return engine.model.args.hidden_size, engine.model.args.vocab_size


def test_a_drafter_from_disk_drafts_in_both_modes(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NeuralDrafterBase, "clock", lambda drafter: 0.0)
    drafter = write_drafter(tmp_path / "drafter", *sizes_of(tiny))
    engine = Engine.load(tiny.path, draft_model=("drafter", drafter))
    assert engine.draft_model is not None
    more = engine.plan.fit.needs.weights - tiny.plan.fit.needs.weights
    assert more == engine.draft_model.needs.weights
    engine = replace(engine, draft_model=replace(engine.draft_model, relative_cost=1e-6))
    prompt = engine.tokens.encode_text("The quick brown fox")
    modes: tuple[DraftMode, ...] = ("off", "model", "auto")
    answers = [
        StepLoop(engine, UnsavedState(CostCurve(FREE))).answer(prompt, options)
        for options in (GenerateOptions(COUNT, draft=mode) for mode in modes)
    ]
    assert len({answer.tokens for answer in answers}) == 1
    assert answers[1].stats.drafted > 0


def test_a_drafter_with_its_own_lm_head_is_assumed_to_cost_its_share_of_the_weights(
    tiny: Engine, tmp_path: Path
) -> None:
    """A higher assumption would keep it from drafting until it is measured."""
    width, vocabulary = sizes_of(tiny)
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    shape = {"hidden_size": width, "vocab_size": vocabulary, "target_hidden_size": width}
    config = drafters.eagle3_config(4, **shape, **taps)
    drafter = save_drafter(tmp_path / "drafter", config, drafters.eagle3_checkpoint(config, 4))
    engine = Engine.load(tiny.path, draft_model=("drafter", drafter))
    assert engine.draft_model is not None
    share = engine.draft_model.needs.weights / weight_bytes(engine.model)
    assert engine.draft_model.relative_cost == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(("kind", "length"), cover(["eagle3", "assistant"], [3, len(PROMPT)]))
def test_n_gram_predictions_before_drafts_change_no_token(
    kind: str, length: int, tmp_path: Path
) -> None:
    model, drafter, vocabulary = make(kind, "", tmp_path)
    prompt, target = [token % vocabulary for token in PROMPT[:length]], Timeless(model)
    drafts = published_drafter(PublishedDrafter("x", tmp_path, drafter, NEEDS, 1e-6), target)
    drafts.clock = lambda: 0.0  # type: ignore[method-assign]
    truth = plain_tokens(model, prompt, COUNT)
    mixture = Mixture(drafts, [*prompt, *truth], vocabulary, seed=3)
    pieces = drafted(target, drafts, mixture, prompt, COUNT)
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert any(piece.rejected for piece in pieces)
    assert any(piece.accepted for piece in pieces)


def test_a_quantized_drafter_drafts() -> None:
    """As on Metal, where drafters of 16 bits are quantized at load."""
    model = build("llama")
    width = model.layers[0].input_layernorm.weight.size
    published = block_drafter("dspark", model, width, VOCABULARY, wide=True)
    before = weight_bytes(published.model)
    quantize_drafter(published.model)
    assert weight_bytes(published.model) < before / 2
    target = Timeless(model)
    drafts = published_drafter(published, target)
    drafts.clock = lambda: 0.0  # type: ignore[method-assign]
    drafter = AutoDrafter(CostCurve(FREE), neural_drafters=[drafts], ngrams=False)
    pieces = drafted(target, drafts, drafter, PROMPT, 40)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens == plain_tokens(model, PROMPT, 40)
    assert any(piece.rejected for piece in pieces)


def test_a_drafter_of_another_model_is_refused(tiny: Engine, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", *sizes_of(tiny), num_target_layers=3)
    with pytest.raises(UnsupportedModel, match="layers: 3, the model has 2"):
        Engine.load(tiny.path, draft_model=("drafter", drafter))
