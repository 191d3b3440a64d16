"""Published drafters follow the target, and change no token."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma4_text

from akunu_py.engine import kv_cache
from akunu_py.engine.drafters import states as states_module
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.drafters.neural import NeuralDrafterBase
from akunu_py.engine.drafters.states import published_drafter
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import output_rows
from akunu_py.engine.model.device import weight_bytes
from akunu_py.engine.model.drafters import PublishedDrafter, quantize_drafter
from akunu_py.engine.target import Target
from akunu_py.errors import UnsupportedModel
from akunu_py.models.drafters import load_drafter
from akunu_py.models.drafters.drafter_config import read_config
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import DraftMode, GenerateOptions
from tests.support import tiny_drafters as tiny
from tests.support.drafters import Mixture
from tests.support.families import build
from tests.support.identity import plain_tokens
from tests.support.published_drafters import (
    BLOCK,
    NEEDS,
    Untimed,
    block_drafter,
    eagle3_drafter,
    save_drafter,
    write_drafter,
)
from tests.support.targets import Timeless, drafted
from tests.support.tiny import VOCABULARY, TreeAdversary
from tests.support.tiny_fim import byte_level, write_model

COUNT = 40
PROMPT = [random.Random(7).randrange(VOCABULARY) for _ in range(40)]
FREE = CostCurve({1: 1.0, 33: 1.01})  # a curve with which everything pays


class Scripted(Untimed):
    """Drafts `whole`, and from some place on wrong tokens; compares its logits."""

    def __init__(self, published: PublishedDrafter, target: Target, whole: Sequence[int]) -> None:
        super().__init__(published, target)
        self.published, self.whole, self.begun, self.compared = published, whole, 0, 0
        cache, rows = kv_cache.new_cache(target.model), mx.array([list(whole)])
        kept = output_rows.run(target.model, rows, cache, lambda x: x, self.taps)[1]
        hidden = mx.concatenate([kept[tap] for tap in self.taps], -1)
        self.all_states = published.model.states(hidden)

    def start_draft(self, known: Sequence[int]) -> bool:
        self.right = len(known) + self.begun % BLOCK
        self.begun += 1
        return super().start_draft(known)

    def begin(self, states: mx.array, tokens: Sequence[int]) -> Any:
        draft = super().begin(states, tokens)
        if draft is not None:
            anchor, first = len(self._known) - 1, self._history.first
            own = self.published.model.make_cache(states_module._WINDOW, first)
            self.published.model.extend(self.all_states[:, first:anchor], None, own)
            parts, token = self._parts, self._known[-1]
            alone = self.published.model.start(parts.embed, parts.lm_head, token, own)
            np.testing.assert_allclose(
                np.array(draft.logits(0, token)), np.array(alone.logits(0, token)), atol=5e-3
            )
            self.compared += 1
        return draft

    def draft_token(self) -> tuple[int, float]:
        known = len(self._known)
        token, chance = super().draft_token()
        if token < 0:
            return token, chance
        token = self.whole[known] if known < len(self.whole) else 0
        token = self._known[-1] = (token + (known >= self.right)) % VOCABULARY
        return token, 0.99


@pytest.mark.parametrize("kept", [512, 16])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_rows_follow_the_target(
    family: str, kind: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of rejected tokens, also without the states of the prompt's beginning."""
    monkeypatch.setattr(states_module, "_WINDOW", kept)
    model = build(family)
    width = model.layers[0].input_layernorm.weight.size
    published = block_drafter(kind, model, width, VOCABULARY)
    truth = plain_tokens(model, PROMPT, COUNT)
    target = Timeless(model)
    drafts = Scripted(published, target, [*PROMPT, *truth])
    drafter = AutoDrafter(FREE, neural_drafters=[drafts], ngrams=False)
    pieces = drafted(target, drafts, drafter, PROMPT, COUNT)
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert drafts.compared > COUNT // (2 * BLOCK)
    assert {piece.accepted for piece in pieces} >= set(range(BLOCK - 1))


def test_hidden_states_follow_an_accepted_branch() -> None:
    model = build("llama")
    width = model.layers[0].input_layernorm.weight.size
    published = block_drafter("dflash", model, width, VOCABULARY)
    truth, target = plain_tokens(model, PROMPT, COUNT), Target(model)
    drafts = Scripted(published, target, [*PROMPT, *truth])
    pieces = drafted(target, drafts, TreeAdversary(PROMPT, truth, seed=1), PROMPT, COUNT)
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert sum(piece.accepted for piece in pieces if piece.rejected_nodes) > COUNT // 3
    states, end = drafts._history.states.read(0, len(target.tokens)), len(target.tokens)
    np.testing.assert_allclose(np.array(states), np.array(drafts.all_states[:, :end]), atol=5e-3)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_model(tmp_path / "target", byte_level(["<|end|>"]), end="<|end|>")


def size_of(target: Path) -> tuple[int, int]:
    config = json.loads((target / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    return config["hidden_size"], config["vocab_size"]


def test_a_drafter_from_disk_drafts_in_both_modes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NeuralDrafterBase, "clock", lambda drafter: 0.0)
    drafter = write_drafter(tmp_path / "drafter", *size_of(target))
    plain, engine = Engine.load(target), Engine.load(target, draft_model=("drafter", drafter))
    assert engine.draft_model is not None
    more = engine.plan.fit.needs.weights - plain.plan.fit.needs.weights
    assert more == engine.draft_model.needs.weights
    engine = replace(engine, draft_model=replace(engine.draft_model, relative_cost=1e-6))
    prompt = engine.tokens.encode_text("The quick brown fox")
    modes: tuple[DraftMode, ...] = ("off", "model", "auto")
    answers = [
        StepLoop(engine, UnsavedState(FREE)).answer(prompt, GenerateOptions(COUNT, draft=mode))
        for mode in modes
    ]
    assert len({answer.tokens for answer in answers}) == 1
    assert answers[1].stats.drafted > 0


def llama_with_eagle3(directory: Path) -> tuple[Any, Any]:
    model = build("llama")
    width = model.layers[0].input_layernorm.weight.size
    return model, eagle3_drafter(directory, model, width, VOCABULARY)


def gemma4_with_assistant(directory: Path) -> tuple[Any, Any]:
    config = tiny.assistant_config(4)
    text = config["text_config"] | {
        "layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "hidden_size": config["backbone_hidden_size"],
    }  # fmt: skip
    weights = tiny.assistant_checkpoint(config, 4)
    del weights["target.weight"]
    save_drafter(directory, config, weights)
    mx.random.seed(4)
    model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(text))
    mx.eval(model.parameters())
    return model, load_drafter(
        read_config(directory), {"model_type": "gemma4", "text_config": text}
    )


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:3]])
@pytest.mark.parametrize("make", [llama_with_eagle3, gemma4_with_assistant])
def test_drafters_of_other_kinds_change_no_token(
    make: Any, prompt: list[int], tmp_path: Path
) -> None:
    """n-gram predictions precede half of their drafts."""
    model, drafter = make(tmp_path)
    target = Timeless(model)
    published = PublishedDrafter("drafter", tmp_path, drafter, NEEDS, 1e-6)
    drafts = published_drafter(published, target)
    drafts.clock = lambda: 0.0  # type: ignore[method-assign]
    truth = plain_tokens(model, prompt, COUNT)
    mixture = Mixture(drafts, [*prompt, *truth], VOCABULARY, seed=3)
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
    drafts = Untimed(published, target)
    drafter = AutoDrafter(FREE, neural_drafters=[drafts], ngrams=False)
    pieces = drafted(target, drafts, drafter, PROMPT, COUNT)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens == plain_tokens(model, PROMPT, COUNT)
    assert any(piece.rejected for piece in pieces)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 3}, "layers: 3, the model has 2"),
        ({"vocab_size": 1 << 20}, "tokens: 1048576, the model has"),
        (
            {"dflash_config": {"target_layer_ids": [0, 9], "mask_token_id": 0}},
            "layers: 10, the model has 2",
        ),
    ],
)
def test_a_drafter_of_another_model_is_refused(
    changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    width, vocabulary = size_of(target)
    drafter = write_drafter(tmp_path / "drafter", width, vocabulary, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        Engine.load(target, draft_model=("drafter", drafter))
