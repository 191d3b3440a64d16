"""EAGLE-3 and P-EAGLE drafters: the drafts of independent implementations, and loading."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.eagle3 import Eagle3
from tests.support import tiny_drafters as tiny
from tests.support.published_drafters import Target, cut, draft_rounds, greedy, load, save_drafter
from tests.support.tiny_drafters import LENGTHS, Array

LAYERS = 12  # of the target
GOLDEN = Path(__file__).parents[1] / "golden" / "drafters" / "eagle3.json"
CASES = json.loads(GOLDEN.read_text())["cases"]
ROUNDS = [case for case in CASES if case["by"] == "eagle3_rounds"]
FORCED = [case for case in CASES if case["by"] == "eagle3_forced"]


def no_lm_head(hidden: mx.array) -> mx.array:
    raise AssertionError("these drafters have lm_heads")


def target_config(config: dict[str, Any]) -> dict[str, Any]:
    layer = config["transformer_layer_config"]
    width = config["target_hidden_size"]
    return {
        "num_hidden_layers": LAYERS, "hidden_size": width, "vocab_size": layer["vocab_size"]
    }  # fmt: skip


def loaded(directory: Path, target: dict[str, Any]) -> Eagle3:
    drafter = load(directory, target)
    assert isinstance(drafter, Eagle3)
    return drafter


def opened(directory: Path, case: dict[str, Any], **changes: Any) -> Eagle3:
    config = case["config"] | changes
    weights = tiny.eagle3_checkpoint(config, case["seed"])
    return loaded(save_drafter(directory, config, weights), target_config(config))


def ends(case: dict[str, Any]) -> Target:
    """Return a target with the embedding of the drafter's checkpoint."""
    weight = mx.array(tiny.eagle3_checkpoint(case["config"], case["seed"])["embed_tokens.weight"])
    return Target(lambda tokens: weight[tokens], no_lm_head, taps_width(case), vocabulary(case))


def taps_width(case: dict[str, Any]) -> int:
    return 3 * int(case["config"]["target_hidden_size"])


def rounds(drafter: Eagle3, case: dict[str, Any]) -> list[list[int]]:
    return draft_rounds(drafter, ends(case), case["seed"])


def vocabulary(case: dict[str, Any]) -> int:
    return int(case["config"]["transformer_layer_config"]["vocab_size"])


@pytest.mark.parametrize("case", ROUNDS, ids=lambda case: f"seed{case['seed']}")
def test_drafts_equal_mlx_vlm(case: dict[str, Any], tmp_path: Path) -> None:
    drafter = opened(tmp_path, case)
    assert rounds(drafter, case) == case["drafts"]
    drafted = {token for draft in case["drafts"] for token in draft}
    assert len(drafted) > 5  # of 20: a constant draft would prove nothing


def forced(drafter: Eagle3, case: dict[str, Any]) -> Iterator[tuple[int, list[int]]]:
    """Yield each row with the draft tokens behind it, given the text's tokens."""
    rows, depths = LENGTHS[0] + 4, LENGTHS[1]
    tokens = tiny.draw_tokens(case["seed"], rows + 1, vocabulary(case))
    taps = tiny.draw_states(case["seed"], rows, taps_width(case))
    states, cache = drafter.states(mx.array(taps)), drafter.make_cache()
    target = ends(case)
    for row in range(rows):
        embeddings = drafter.embed(mx.array([[tokens[row + 1]]]), target)
        hidden = drafter.extend(states[:, row : row + 1], embeddings, cache)
        count = min(depths, rows - row)
        made = drafter.start(target, hidden, cache)
        drafted = [greedy(made.logits(d, tokens[row + d + 1])) for d in range(count)]
        yield row, drafted
        cut(cache, row + 1)


@pytest.mark.parametrize("case", FORCED, ids=lambda case: f"seed{case['seed']}")
def test_drafts_equal_speculators(case: dict[str, Any], tmp_path: Path) -> None:
    """Compare every depth behind every row."""
    drafter, compared = opened(tmp_path, case), 0
    assert drafter.is_parallel == (case["config"]["speculators_model_type"] == "peagle")
    for row, tokens in forced(drafter, case):
        wanted = [case["drafts"][depth][row] for depth in range(len(tokens))]
        if window := case["config"]["transformer_layer_config"]["sliding_window"]:
            # In training, rows of a draft see the positions that its first row sees.
            wanted[1:] = [-1 if row + d >= window else w for d, w in enumerate(wanted)][1:]
        known = [(own, other) for own, other in zip(tokens, wanted, strict=True) if other >= 0]
        assert [own for own, _ in known] == [other for _, other in known]
        compared += len(known)
    assert compared > 15


def packagings(case: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Array]]]:
    """Return the case's drafter as each publisher packages it."""
    config = case["config"]
    weights = tiny.eagle3_checkpoint(config, case["seed"])
    flags = {name: config.get(name, False) for name in ("norm_before_residual", "norm_output")}
    flat = config | config["transformer_layer_config"]
    flat = {name: flat[name] for name in flat if name[:11] not in ("speculators", "transformer")}
    older = {}
    for name, value in weights.items():
        name = name.replace("layers.0.", "midlayer.")
        for number, level in enumerate(("low", "mid", "high")):
            name = name.replace(f"fc_norm.{number}", f"aux_norm_{level}")
        older[name] = value
    del older["embed_tokens.weight"]
    extra = {
        "verifier_norm.weight": np.ones(3), "verifier_lm_head.weight": np.ones((3, 3)),
        "t2d": np.ones(vocabulary(case), bool), "midlayer.rotary_emb.inv_freq": np.ones(3),
    }  # fmt: skip
    outputs = [1, LAYERS // 2 - 1, LAYERS - 4]
    sglang = {name: value for name, value in flat.items() if name not in flags} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs} | flags,
    }
    rope = {"rope_type": "default", "rope_theta": flat["rope_theta"]}
    layer = config["transformer_layer_config"] | {"rope_theta": None, "rope_parameters": rope}
    inputs = [each + 1 for each in outputs]
    return {
        "safeailab": (flat | {"architectures": ["LlamaForCausalLM"]}, older | extra),
        "sglang": (sglang, {f"model.{name}": value for name, value in weights.items()}),
        "transformers 5": (config | {"transformer_layer_config": layer}, weights | extra),
        "speculators": (config | {"eagle_aux_hidden_state_layer_ids": inputs}, weights),
    }


@pytest.mark.parametrize("case", [ROUNDS[0], FORCED[0]], ids=["llama", "qwen3"])
def test_every_packaging_loads_to_the_same_drafter(case: dict[str, Any], tmp_path: Path) -> None:
    wanted = rounds(opened(tmp_path, case), case)
    for name, (config, weights) in packagings(case).items():
        directory = save_drafter(tmp_path / name, config, weights)
        drafter = loaded(directory, target_config(case["config"]))
        assert drafter.taps == (1, LAYERS // 2 - 1, LAYERS - 4), name
        assert rounds(drafter, case) == wanted, name


@pytest.mark.parametrize(("settings", "taps"), [
    ({}, (1, 5, 8)),
    ({"eagle_aux_hidden_state_layer_ids": [3, 7, 12]}, (2, 6, 11)),
    ({"aux_hidden_state_layer_ids": [0, 7]}, (-1, 6)),
    ({"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, (1, 5, 8)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 6, 9]}}, (1, 6, 9)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}}, (1, 5, 8)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [8, 10, 12]}}, (7, 9, 11)),
])  # fmt: skip
def test_taps_are_outputs(settings: dict[str, Any], taps: tuple[int, ...], tmp_path: Path) -> None:
    config = tiny.eagle3_config(0)
    if "eagle_config" in settings:
        config, _ = packagings({"config": config, "seed": 0})["sglang"]
    config |= settings
    ids = {"eagle_aux_hidden_state_layer_ids": list(taps)}
    plain = tiny.eagle3_config(0) | ids
    weights = tiny.eagle3_checkpoint(plain, 0)
    drafter = loaded(save_drafter(tmp_path, config, weights), target_config(plain))
    assert drafter.taps == taps


def test_trained_embedding_is_used(tmp_path: Path) -> None:
    case = FORCED[0]
    drafter = opened(tmp_path, case, embed_requires_grad=True)
    weight = tiny.eagle3_checkpoint(case["config"], case["seed"])["embed_tokens.weight"]
    assert mx.array_equal(drafter.embed_tokens(mx.array([5])), mx.array(weight[5:6]))
    assert "embed_tokens" not in opened(tmp_path / "target's", case)


def test_target_has_the_lm_head_of_a_drafter_without_one(tmp_path: Path) -> None:
    config = tiny.eagle3_config(0)
    config["draft_vocab_size"] = config["transformer_layer_config"]["vocab_size"]
    weights = tiny.eagle3_checkpoint(config, 0)
    head = mx.array(weights["lm_head.weight"])
    hidden = mx.array(tiny.draw_states(0, 1, head.shape[-1]))
    found = []
    for name in ("own", "target's"):
        drafter = loaded(save_drafter(tmp_path / name, config, weights), target_config(config))
        target = Target(lambda tokens: tokens, lambda normed: normed @ head.T)
        found.append(drafter.logits(hidden[0], target))
        weights.pop("lm_head.weight", None)
    assert mx.allclose(found[0], found[1])


def test_other_drafters_are_rejected(tmp_path: Path) -> None:
    config = tiny.eagle3_config(0)
    weights, target = tiny.eagle3_checkpoint(config, 0), target_config(config)
    offsets = {"d2t": weights["d2t"] + 1000}
    without = {name: value for name, value in weights.items() if name != "d2t"}
    for tensors, words in ((weights | offsets, "drafts token 10"), (without, "but no d2t")):
        directory = save_drafter(tmp_path, config, tensors)
        with pytest.raises(DamagedModel, match=words):
            loaded(directory, target)
    deep = config | {"eagle_aux_hidden_state_layer_ids": [2, 6, 40]}
    with pytest.raises(UnsupportedModel, match="expects layers: 40, the model has 12"):
        loaded(save_drafter(tmp_path, deep, weights), target)
