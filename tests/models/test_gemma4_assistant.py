"""Assistants of Gemma 4: the drafts of an independent implementation, and loading."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.gemma4_assistant import Gemma4Assistant
from tests.support import tiny_drafters as tiny
from tests.support.published_drafters import Target, greedy, is_divisible, load, save_drafter

UNCHANGED: Mapping[str, Any] = {}
SCALE = 2.0  # of the target's embedding
GOLDEN = Path(__file__).parents[1] / "golden" / "drafters" / "gemma4_assistant.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


def loaded(
    directory: Path, case: dict[str, Any], target: Mapping[str, Any] = UNCHANGED
) -> Gemma4Assistant:
    """Return the assistant of a case. target: changes of the target."""
    config = case["config"]
    weights = tiny.assistant_checkpoint(config, case["seed"])
    del weights["target.weight"]
    return opened(directory, config, weights | case.get("changed", {}), target)


def opened(
    directory: Path, config: dict[str, Any], weights: dict[str, Any],
    target: Mapping[str, Any] = UNCHANGED,
) -> Gemma4Assistant:  # fmt: skip
    save_drafter(directory, config, weights)
    settings = tiny.assistant_target(config)
    settings["text_config"] |= target
    assistant = load(directory, settings)
    assert isinstance(assistant, Gemma4Assistant)
    return assistant


def cache(case: dict[str, Any], length: int, *, at_once: bool) -> list[Any]:
    """Return the target's cache after `length` positions, all at once or one after the other."""
    entries: dict[str, Any] = {
        "full_attention": KVCache(), "sliding_attention": RotatingKVCache(tiny.WINDOW)
    }  # fmt: skip
    attended = tiny.assistant_attended(case["config"], case["seed"] + length, length)
    for kind, entry in entries.items():
        keys, values = (mx.array(each) for each in attended[kind])
        step = length if at_once else 1
        for at in range(0, length, step):
            entry.update_and_fetch(keys[..., at : at + step, :], values[..., at : at + step, :])
    return [entries[kind] for kind in tiny.TARGET_TYPES[:2]]


def drafts(assistant: Gemma4Assistant, case: dict[str, Any], *, at_once: bool) -> list[list[int]]:
    weight = mx.array(tiny.assistant_checkpoint(case["config"], case["seed"])["target.weight"])
    target = Target(lambda tokens: weight[tokens] * SCALE, lambda _: mx.zeros(()))
    found = []
    for length in tiny.ATTENDED:
        taps = tiny.draw_states(case["seed"] + length, 1, weight.shape[1])
        embedding = assistant.embed(mx.array([[length]]), target)
        hidden = assistant.extend(assistant.states(mx.array(taps)), embedding, [])
        draft = assistant.start(target, hidden, cache(case, length, at_once=at_once))
        made: list[int] = []
        for depth in range(tiny.LENGTHS[1]):
            made.append(greedy(draft.logits(depth, made[-1] if made else length)))
        found.append(made)
    return found


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "rotated"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case['seed']}")
def test_drafts_equal_mlx_vlm(case: dict[str, Any], at_once: bool, tmp_path: Path) -> None:
    assistant = loaded(tmp_path, case)
    assert drafts(assistant, case, at_once=at_once) == case["drafts"]
    assert len({token for draft in case["drafts"] for token in draft}) > 4


def test_quantized_cache_of_the_target(tmp_path: Path) -> None:
    case = CASES[0]
    assistant = loaded(tmp_path, case)
    full = cache(case, 20, at_once=True)[0]
    plain = assistant.attach([full, full])["full_attention"]
    wide = KVCache()
    wide.update_and_fetch(*(mx.concatenate([each] * 4, axis=-1) for each in plain[:2]))
    keys, values, position = assistant.attach([wide.to_quantized(64, 8), full])["full_attention"]
    assert position == 19
    assert mx.abs(keys[..., :16] - plain[0]).max().item() < 0.05
    assert mx.abs(values[..., :16] - plain[1]).max().item() < 0.05


def test_quantized_assistant(tmp_path: Path) -> None:
    """The clusters' scores come from a quantized embedding, too."""
    config = tiny.assistant_config(1, clusters=True)
    config["text_config"]["hidden_size"] = 32
    case = {"config": config, "seed": 1}
    plain = loaded(tmp_path / "plain", case)
    nn.quantize(plain, 32, 8, class_predicate=lambda _, part: is_divisible(part))
    weights = dict(tree_flatten(plain.parameters()))
    assert drafts(opened(tmp_path / "packed", config, weights), case, at_once=True) == drafts(
        plain, case, at_once=True
    )


@pytest.mark.parametrize(("target", "changed", "error", "words"), [
    ({"hidden_size": 7}, {}, UnsupportedModel, "width .*, the model has 7"),
    ({"head_dim": 4}, {}, UnsupportedModel, "its head_dim is 8, the model's is 4"),
    ({"sliding_window": 9}, {}, UnsupportedModel, "sliding_window is 6, the model's is 9"),
    ({"num_kv_shared_layers": 3}, {}, UnsupportedModel, "no layers of type 'sliding_"),
    ({}, {"model.layers.0.self_attn.k_proj.weight": np.ones(3)}, UnsupportedModel, "unknown"),
    ({}, {"masked_embedding.token_ordering": np.full(96, 96)}, DamagedModel, "orders token 96"),
])  # fmt: skip
def test_other_assistants_are_rejected(
    target: dict[str, Any], changed: dict[str, Any], error: type[Exception], words: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    case = CASES[1] | {"changed": changed}
    with pytest.raises(error, match=words):
        loaded(tmp_path, case, target)
