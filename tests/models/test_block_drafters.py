"""DFlash, DFlash2 and DSpark drafters draft what independent implementations draft."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from akunu_py.errors import ModelError
from akunu_py.models.drafters.block import BlockDrafter
from akunu_py.models.drafters.drafter_config import read_config
from tests.support import tiny_block_drafters as tiny
from tests.support.published_drafters import Target, save_drafter
from tests.support.published_drafters import load as load_any

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/drafters/block.json").read_text())
CASES = [pytest.param(seed, config, id=name) for seed, (name, _, config) in enumerate(tiny.CASES)]
TARGET = {"hidden_size": 32, "num_hidden_layers": 12, "vocab_size": tiny.TOKENS}


def write(
    directory: Path, config: tiny.Config, seed: int, weights: dict[str, Any] | None = None
) -> Path:
    return save_drafter(directory, config, weights or tiny.checkpoint(config, seed))


def load(directory: Path) -> BlockDrafter:
    drafter = load_any(directory, TARGET)
    assert isinstance(drafter, BlockDrafter)
    return drafter


def drafts(
    drafter: BlockDrafter, config: tiny.Config, seed: int, pieces: int = 100
) -> list[dict[str, Any]]:
    """Return the greedy drafts of all rounds. pieces: rows of each `extend`."""
    matrix, head = map(mx.array, tiny.target(config, seed))
    cache = drafter.make_cache()
    found: list[dict[str, Any]] = []
    for hidden, anchor in tiny.rounds(config, seed):
        states = drafter.states(mx.array(hidden))
        for first in range(0, states.shape[1], pieces):
            drafter.extend(states[:, first : first + pieces], None, cache)
        ends = Target(lambda t: matrix[t], lambda h: h @ head.T)
        draft = drafter.start(ends, anchor, cache)
        tokens: list[int] = []
        chances: list[float | None] = []
        for depth in range(drafter.longest):
            previous = tokens[-1] if tokens else anchor
            chances.append(draft.confidence(depth, previous))
            logits = draft.logits(depth, previous)
            assert logits.shape == (1, tiny.TOKENS)
            tokens.append(int(mx.argmax(logits).item()))
        found.append({"tokens": tokens, "confidences": chances})
    return found


@pytest.mark.parametrize(("seed", "config"), CASES)
def test_drafts_equal_those_of_independent_implementations(
    seed: int, config: tiny.Config, tmp_path: Path
) -> None:
    expected = list(GOLDEN["drafts"].values())[seed]
    drafter = load(write(tmp_path, config, seed))
    assert drafter.longest == len(expected[0]["tokens"])
    for pieces in (100, 5):
        for found, wanted in zip(drafts(drafter, config, seed, pieces), expected, strict=True):
            assert found["tokens"] == wanted["tokens"], pieces
            chances = wanted.get("confidences", [None] * drafter.longest)
            assert found["confidences"] == pytest.approx(chances, abs=3e-4)


def test_the_lm_head_runs_on_few_rows_when_they_are_needed(tmp_path: Path) -> None:
    drafter = load(write(tmp_path, tiny.dflash({"block_size": 13}), 0))
    matrix, head = map(mx.array, tiny.target(tiny.dflash(), 0))
    cache = drafter.make_cache()
    drafter.extend(context(drafter, 9), None, cache)
    lm_head = Mock(side_effect=lambda hidden: hidden @ head.T)
    draft = drafter.start(Target(lambda tokens: matrix[tokens], lm_head), 7, cache)
    for depth, expected in ((0, [5]), (4, [5]), (5, [5, 5]), (11, [5, 5, 2])):
        draft.logits(depth, 3)
        assert [call.args[0].shape[1] for call in lm_head.call_args_list] == expected


def packagings() -> list[tuple[str, tiny.Config, tiny.Config]]:
    """Return names of packagings, with two config.json of the same drafter."""
    sliding: tiny.Config = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 20}
    fill_in = tiny.speculators(tiny.dspark(), "dspark")
    first = fill_in["speculators_config"]["proposal_methods"][0]
    first["speculative_tokens"] -= 1
    without = {key: value for key, value in fill_in.items() if key != "speculators_config"}
    return [
        ("speculators, DFlash", tiny.dflash(), tiny.speculators(tiny.dflash(), "dflash")),
        (
            "speculators, DFlash, sliding",
            tiny.dflash(**sliding),
            tiny.speculators(tiny.dflash(**sliding), "dflash"),
        ),
        (
            "speculators, DFlash2, bidirectional",
            tiny.dflash2(**sliding, is_causal=False),
            tiny.speculators(tiny.dflash2(**sliding), "dflash2"),
        ),
        ("speculators, DSpark", tiny.dspark(), tiny.speculators(tiny.dspark(), "dspark")),
        ("speculators, anchor apart", tiny.dspark(sample_from_anchor=False), fill_in),
        ("speculators, older", tiny.dspark(sample_from_anchor=False), without),
        ("speculators, anchor by name", tiny.dspark(), without | {"sample_from_anchor": True}),
        ("SpecForge", tiny.dspark(), tiny.specforge(tiny.dspark())),
        ("LFM2", tiny.dspark(), tiny.lfm2(tiny.dspark())),
        (
            "window in dflash_config",
            tiny.dflash(**sliding, is_causal=False),
            tiny.dflash({"use_swa": True, "swa_window_size": 20, "causal": False}),
        ),
        (
            "bonus token in the block",
            tiny.dspark(),
            tiny.specforge(tiny.dspark(block_size=6, dspark_bonus_anchor=True)),
        ),
        ("taps by default", tiny.dflash(), tiny.dflash({"target_layer_ids": None})),
    ]


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param(*two, id=name) for name, *two in packagings()]
)
def test_every_packaging_is_the_same_drafter(
    first: tiny.Config, second: tiny.Config, tmp_path: Path
) -> None:
    weights = tiny.checkpoint(first, 3)
    loaded = [
        load(write(tmp_path / name, config, 3, weights))
        for name, config in (("first", first), ("second", second))
    ]
    assert loaded[0].taps == loaded[1].taps
    assert loaded[0].longest == loaded[1].longest
    assert drafts(loaded[0], first, 3) == drafts(loaded[1], first, 3)


def context(drafter: BlockDrafter, rows: int) -> mx.array:
    return mx.array(np.random.default_rng(5).normal(size=(1, rows, 32)).astype(np.float32))


def first_logits(drafter: BlockDrafter, cache: list[Any]) -> mx.array:
    matrix, head = map(mx.array, tiny.target(tiny.dflash(), 0))
    ends = Target(lambda t: matrix[t], lambda h: h @ head.T)
    return drafter.start(ends, 7, cache).logits(2, 3)


@pytest.mark.parametrize("name", ["dflash, sliding", "dflash", "dspark"])
def test_a_window_drops_old_positions(name: str, tmp_path: Path) -> None:
    seed = [case[0] for case in tiny.CASES].index(name)
    drafter = load(write(tmp_path, tiny.CASES[seed][2], seed))
    states = context(drafter, 2600)
    late = drafter.make_cache(window=50, position=2550)
    drafter.extend(states[:, 2550:], None, late)
    for pieces in (40, 2600):
        cache = drafter.make_cache(window=50)
        for first in range(0, 2600, pieces):
            drafter.extend(states[:, first : first + pieces], None, cache)
        assert mx.allclose(first_logits(drafter, cache), first_logits(drafter, late), atol=1e-4)
        assert all(entry.end == 2600 for entry in cache)
        assert all(entry.offset < 1100 for entry in cache)
        assert all(entry.keys is not None and entry.keys.shape[2] < 2100 for entry in cache)
    everything = drafter.make_cache()
    drafter.extend(states, None, everything)
    assert not mx.allclose(first_logits(drafter, everything), first_logits(drafter, late))


def test_a_draft_leaves_the_cache_as_it_is_and_positions_can_be_cut_off(tmp_path: Path) -> None:
    drafter = load(write(tmp_path, tiny.dflash(), 0))
    states = context(drafter, 300)
    cache = drafter.make_cache()
    drafter.extend(states[:, :250], None, cache)
    before = first_logits(drafter, cache)
    drafter.extend(states[:, 270:290], None, cache)
    assert not mx.allclose(first_logits(drafter, cache), before)
    for entry in cache:
        entry.trim(20)
    assert mx.allclose(first_logits(drafter, cache), before, atol=1e-5)
    assert [entry.end for entry in cache] == [250] * 3


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_markov_heads_bias_as_in_speculators(kind: str, tmp_path: Path) -> None:
    config = tiny.dspark(markov_head_type=kind)
    drafter = load(write(tmp_path, config, 0))
    hidden = np.random.default_rng(0).normal(size=(1, 5, 32)).astype(np.float32)
    states: list[mx.array | None] = [None]
    for row, expected in enumerate(GOLDEN["biases"][kind]):
        rows = mx.array(hidden)[0, row : row + 1]
        bias, state = drafter.markov_head(rows, mx.array([row * 7]), states[-1])
        states.append(state)
        assert np.allclose(bias[0], expected, atol=2e-4)
    tokens = [draft["tokens"] for draft in drafts(drafter, config, 0)]
    assert [draft["tokens"] for draft in drafts(drafter, config, 0, pieces=3)] == tokens


def test_tokens_outside_the_draft_vocabulary_are_impossible(tmp_path: Path) -> None:
    seed = [case[0] for case in tiny.CASES].index("dspark, few tokens")
    config = tiny.CASES[seed][2]
    drafter = load(write(tmp_path, config, seed))
    possible = tiny.checkpoint(config, seed)["d2t"] + np.arange(23)
    cache = drafter.make_cache()
    drafter.extend(context(drafter, 9), None, cache)
    logits = np.array(first_logits(drafter, cache))[0]
    assert sorted(np.flatnonzero(np.isfinite(logits))) == sorted(possible)


@pytest.mark.parametrize("config", [tiny.dflash(), tiny.dspark()], ids=["dflash", "dspark"])
def test_quantized_drafters_load(config: tiny.Config, tmp_path: Path) -> None:
    packed: dict[str, mx.array] = {}
    plain: dict[str, mx.array] = {}
    for name, value in tiny.checkpoint(config, 4).items():
        array = mx.array(value)
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            base = name.removesuffix(".weight")
            parts = mx.quantize(array, group_size=32, bits=8)
            names = (f"{base}.weight", f"{base}.scales", f"{base}.biases")
            packed |= dict(zip(names, parts, strict=True))
            plain[name] = mx.dequantize(*parts, group_size=32, bits=8)
        else:
            packed[name] = plain[name] = array
    quantization = {"quantization": {"group_size": 32, "bits": 8}}
    found = load(write(tmp_path / "packed", config | quantization, 4, packed))
    assert "scales" in found.fc
    same = load(write(tmp_path / "plain", config, 4, plain))
    assert [draft["tokens"] for draft in drafts(found, config, 4)] == [
        draft["tokens"] for draft in drafts(same, config, 4)
    ]


FACTS: list[tuple[tiny.Config, tiny.Config | None]] = [  # None: an ordinary model
    ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, None),
    ({"model_type": "deepseek_v4", "dspark_block_size": 7}, None),
    (
        tiny.dflash(block_size=9) | {"dflash_config": {"target_layer_ids": [0]}},
        {"kind": "dflash", "block": 9, "mask_token": None},
    ),
    (tiny.dflash({"block_size": None}), {"block": 16, "anchor_predicts": False}),
    (tiny.dspark(draft_vocab_size=tiny.TOKENS), {"draft_vocabulary": tiny.TOKENS}),
    (tiny.speculators(tiny.dflash(), "peagle"), {"kind": "eagle3", "suggested_tokens": 5}),
    (tiny.speculators(tiny.dflash(), "mtp"), {"kind": "mtp"}),
]


@pytest.mark.parametrize(("config", "facts"), FACTS)
def test_configurations_are_recognized(
    config: tiny.Config, facts: dict[str, Any] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert (found and {key: getattr(found, key) for key in facts or {}}) == facts


def test_default_taps_follow_the_layers_of_the_target(tmp_path: Path) -> None:
    for config, taps in (
        (tiny.dflash({"target_layer_ids": None}, num_hidden_layers=5), (1, 8, 15, 22, 29)),
        (tiny.dflash({"target_layer_ids": None}, num_hidden_layers=1), (16,)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_config(tmp_path)
        assert found is not None
        assert found.tap_layers(32) == taps


def changed(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def changed_weights(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], None]:
    def write_again(directory: Path) -> None:
        weights = mx.load(str(directory / "model.safetensors"))
        assert isinstance(weights, dict)
        change(weights)
        mx.save_safetensors(str(directory / "model.safetensors"), weights)

    return write_again


def as_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (as_pickle, r"weights as pickle \(pytorch_model.bin\).*safetensors only: use"),
    "no weights": (
        lambda directory: (directory / "model.safetensors").unlink(),
        r"expected \*.safetensors, found none",
    ),
    "damaged weights": (
        lambda directory: (directory / "model.safetensors").write_bytes(b"\x20" * 64),
        "damaged or no safetensors file",
    ),
    "another width": (changed(target_hidden_size=48), "states of width 48, the model has 32"),
    "other layers": (changed(num_target_layers=13), "layers: 13, the model has 12"),
    "a tap beyond": (changed(target_layer_ids=[1, 5, 12]), "layers: 13, the model has 12"),
    "other tokens": (changed(vocab_size=99), "expects tokens: 99, the model has 61"),
    "no mask": (changed(mask_token_id=None), "has no mask_token_id"),
    "no block": (changed(block_size=None), "block_size as an integer from 1 to 1000, found None"),
    "no layers": (changed(target_layer_ids="all"), "expected a list of layers, found 'all'"),
    "many layers": (changed(num_hidden_layers=10**9), "layers as an integer from 1 to 1000"),
    "a new kind": (changed(speculators_model_type="xpress"), "of kind 'xpress'; akunu supports"),
    "another quantization": (changed(quantization_config={"quant_method": "gptq"}), "by 'gptq'"),
    "noise levels": (changed(log_snr_conditioning=True), "with log_snr_conditioning = True"),
    "another Markov head": (changed(markov_head_type="lstm"), "rnn, found 'lstm'"),
    "layer types": (changed(layer_types=["linear"] * 3, is_causal=True), "expected 3 layer_types"),
    "no window": (
        changed(layer_types=["sliding_attention"] * 3, is_causal=True),
        "expected a sliding_window, found None",
    ),
    "no table": (changed(draft_vocab_size=30), "has 30 of the model's 61 tokens, but no d2t; pull"),
    "a table too many": (
        changed_weights(lambda weights: weights.update(d2t=mx.zeros(30, mx.int32))),
        r"has 61 of the model's 61 tokens, but a table of 30 \(d2t\); pull",
    ),
    "a missing tensor": (
        changed_weights(lambda weights: weights.pop("layers.1.self_attn.q_proj.weight")),
        r"misses tensor 'layers.1.self_attn.q_proj.weight' \(1 in all\)",
    ),
    "an unknown tensor": (
        changed_weights(lambda weights: weights.update({"extra.weight": mx.zeros(1)})),
        "has the unknown tensor 'extra.weight'",
    ),
    "another shape": (
        changed_weights(lambda weights: weights.update({"fc.weight": mx.zeros((32, 5))})),
        r"cannot be loaded: Expected shape \(32, 96\)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_other_drafters_are_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSALS[case]
    change(write(tmp_path, tiny.dspark(), 0))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


ODD_VALUES: tuple[Any, ...] = (None, "x", -1, 0, 1.5, 10**30, [], {}, [None], {"factor": "x"}, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "make"), enumerate([tiny.dflash2, tiny.dspark, tiny.gemma4_dspark])
)
def test_odd_settings_are_errors_or_harmless(
    place: int, make: Callable[[], tiny.Config], tmp_path: Path
) -> None:
    config = make()
    write(tmp_path, config, 0)
    more = ["rope_parameters", "sliding_window", "layer_types", "is_causal"]
    more += ["speculators_config", "speculators_model_type", "transformer_layer_config"]
    nested = config.get("dflash_config", {})
    values = ODD_VALUES[place::3]
    changes = [{key: odd} for key in (*config, *more) for odd in values]
    changes += [{"dflash_config": nested | {key: odd}} for key in nested for odd in values]
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with contextlib.suppress(ModelError):
            if read_config(tmp_path) is not None:
                load(tmp_path)
