"""DFlash, DFlash2 and DSpark drafters draft what independent implementations draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from akunu_py.models.drafters import load_drafter
from akunu_py.models.drafters.block import BlockDrafter
from tests.support import tiny_block_drafters as tiny

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/drafters/block.json").read_text())
CASES = [pytest.param(seed, config, id=name) for seed, (name, _, config) in enumerate(tiny.CASES)]
TARGET = {"hidden_size": 32, "num_hidden_layers": 12, "vocab_size": tiny.TOKENS}


def write(
    directory: Path, config: tiny.Config, seed: int, weights: dict[str, Any] | None = None
) -> Path:
    directory.mkdir(exist_ok=True)
    weights = weights or tiny.checkpoint(config, seed)
    arrays = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path) -> BlockDrafter:
    drafter = load_drafter(directory, TARGET)
    assert isinstance(drafter, BlockDrafter)
    return drafter


def drafts(
    drafter: BlockDrafter,
    config: tiny.Config,
    seed: int,
    pieces: int = 100,
    length: int | None = None,
) -> list[dict[str, Any]]:
    """Return the greedy drafts of all rounds. pieces: rows of each `extend`."""
    matrix, head = map(mx.array, tiny.target(config, seed))
    cache, found = drafter.make_cache(), []
    for hidden, anchor in tiny.rounds(config, seed):
        states = drafter.states(mx.array(hidden))
        for first in range(0, states.shape[1], pieces):
            drafter.extend(states[:, first : first + pieces], None, cache)
        draft = drafter.start(lambda t: matrix[t], lambda h: h @ head.T, anchor, cache, length)
        tokens: list[int] = []
        chances: list[float | None] = []
        for depth in range(draft.length):
            previous = tokens[-1] if tokens else anchor
            chances.append(draft.confidence(depth, previous))
            logits = draft.logits(depth, previous)
            assert logits.shape == (1, tiny.TOKENS)
            tokens.append(int(mx.argmax(logits).item()))
        found.append({"tokens": tokens})
        if chances[0] is not None:
            found[-1]["confidences"] = [round(chance or 0, 4) for chance in chances]
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
            assert found.get("confidences") == pytest.approx(wanted.get("confidences"), abs=3e-4)


@pytest.mark.parametrize(("seed", "config"), CASES)
def test_a_short_draft_is_the_beginning_of_a_long_one(
    seed: int, config: tiny.Config, tmp_path: Path
) -> None:
    drafter = load(write(tmp_path, config, seed))
    long = [draft["tokens"][:2] for draft in drafts(drafter, config, seed)]
    assert [draft["tokens"] for draft in drafts(drafter, config, seed, length=2)] == long


def packagings() -> list[tuple[str, tiny.Config, tiny.Config]]:
    """Return names of packagings, with two config.json of the same drafter."""
    sliding = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 20}
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
        (
            "speculators, anchor by name",
            tiny.dspark(),
            without | {"sample_from_anchor": True},
        ),
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
        (
            "taps by default",
            tiny.dflash({"target_layer_ids": [1, 5, 9]}),
            tiny.dflash({"target_layer_ids": None}),
        ),
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
    return drafter.start(lambda t: matrix[t], lambda h: h @ head.T, 7, cache).logits(2, 3)


@pytest.mark.parametrize("name", ["dflash, sliding", "dflash", "dspark"])
def test_a_window_drops_old_positions(name: str, tmp_path: Path) -> None:
    seed = [case[0] for case in tiny.CASES].index(name)
    drafter = load(write(tmp_path, tiny.CASES[seed][2], seed))
    states = context(drafter, 2600)
    late = drafter.make_cache(window=50, position=2550)
    drafter.extend(states[:, 2550:], None, late)
    for pieces in (900, 2600):
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
    draft = drafts(drafter, config, 0)
    assert drafts(drafter, config, 0, pieces=3) == draft


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
