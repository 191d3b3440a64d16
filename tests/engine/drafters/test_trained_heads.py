"""EAGLE-3, P-EAGLE and Gemma 4 assistants follow the target through rejected drafts."""

import random
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import gemma4_text, llama

from akunu_py.engine import kv_cache
from akunu_py.engine.drafters.states import AssistantDrafter, HeadDrafter
from akunu_py.engine.model import output_rows
from akunu_py.engine.model.drafters import PublishedDrafter
from akunu_py.models.drafters import load_drafter
from akunu_py.models.drafters.drafter_config import read_config
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from tests.support import tiny_drafters as tiny
from tests.support.identity import plain_tokens
from tests.support.published_drafters import save_drafter
from tests.support.targets import Timeless, drafted

COUNT = 40
KINDS = {"eagle3": {}, "peagle": {"speculators_model_type": "peagle", "mask_token_id": 3}}


def make(kind: str, directory: Path) -> tuple[Any, Any, int]:
    """Return a target, its drafter, and the size of the vocabulary."""
    if kind == "assistant":
        config = tiny.assistant_config(1, clusters=True)
        types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
        settings = config["text_config"] | {
            "hidden_size": config["backbone_hidden_size"], "layer_types": types,
            "num_hidden_layers": len(types), "num_kv_shared_layers": 2,
        }  # fmt: skip
        weights, module = tiny.assistant_checkpoint(config, 1), cast(Any, gemma4_text)
        del weights["target.weight"]
    else:
        config = tiny.eagle3_config(0, **KINDS[kind])
        settings = {
            "model_type": "llama", "hidden_size": config["target_hidden_size"],
            "num_hidden_layers": 6, "intermediate_size": 32, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-5,
            "vocab_size": config["transformer_layer_config"]["vocab_size"],
            "tie_word_embeddings": False,
        }  # fmt: skip
        weights, module = tiny.eagle3_checkpoint(config, 0), cast(Any, llama)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(settings))
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters()))
    save_drafter(directory, config, weights)
    return model, load_drafter(read_config(directory), settings), settings["vocab_size"]


@pytest.mark.parametrize("kind", [*KINDS, "assistant"])
def test_drafts_equal_those_of_a_new_cache(kind: str, tmp_path: Path) -> None:
    """After any number of rejected tokens; each draft has right tokens, then wrong ones."""
    model, drafter, vocabulary = make(kind, tmp_path)
    prompt = [random.Random(7).randrange(vocabulary) for _ in range(40)]
    truth = plain_tokens(model, prompt, COUNT)
    whole, base = [*prompt, *truth], AssistantDrafter if kind == "assistant" else HeadDrafter

    class Scripted(base):  # type: ignore[misc, valid-type]
        begun = 0

        def clock(self) -> float:
            return 0.0

        def begin(self, states: mx.array, tokens: list[int]) -> Any:
            draft = super().begin(states, tokens)
            known, target_cache = list(self._known), kv_cache.new_cache(model)
            self.right, self.begun = len(known) + self.begun % 5, self.begun + 1
            rows = mx.array([known[:-1]])
            kept = output_rows.run(model, rows, target_cache, lambda x: x, self.taps)[1]
            hidden = drafter.states(mx.concatenate([kept[tap] for tap in self.taps], -1))
            own = drafter.make_cache()
            made = drafter.extend(hidden, self._embed(mx.array([known[1:]])), own)
            cache = target_cache if kind == "assistant" else own
            alone = drafter.start(self._embed, self._lm_head, made, cache)
            own_logits, wanted = (np.array(each.logits(0, known[-1])) for each in (draft, alone))
            np.testing.assert_allclose(own_logits, wanted, atol=5e-3)
            return draft

        def draft_token(self) -> tuple[int, float]:
            known = len(self._known)
            token, chance = super().draft_token()
            if token < 0:
                return token, chance
            token = whole[known] if known < len(whole) else 0
            token = self._known[-1] = (token + (known >= self.right)) % vocabulary
            return token, 0.99

    target = Timeless(model)
    published = PublishedDrafter("x", tmp_path, drafter, cast(Any, None), 1e-6)
    arguments = (
        [published, target] if kind == "assistant" else [drafter, target, "model", "x", 1e-6]
    )
    drafts: Any = Scripted(*arguments)
    proposals = AutoDrafter(CostCurve({1: 1.0, 33: 1.01}), neural_drafters=[drafts], ngrams=False)
    pieces = drafted(target, drafts, proposals, prompt, COUNT)
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert drafts.begun > COUNT // 5
    assert {piece.accepted for piece in pieces} == set(range(5))
