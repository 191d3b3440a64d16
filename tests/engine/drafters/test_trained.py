"""Trained drafters reach an acceptance that wrong wiring cannot.

A wrong tap or anchor raises nothing: only the acceptance of a drafter that was trained shows it.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama

from akunu_py.engine import kv_cache
from akunu_py.engine.drafters.states import ScaledTrunk
from akunu_py.engine.model import output_rows
from akunu_py.engine.model.drafters import PublishedDrafter
from akunu_py.ngram.cost import CostCurve
from tests.support.learned import (
    KEYS,
    SYMBOLS,
    learn_texts,
    random_texts,
    text,
    tokens_per_pass,
    train,
)
from tests.support.published_drafters import NEEDS, block_drafter, eagle3_drafter

pytestmark = pytest.mark.slow

WIDTH, VOCABULARY = 64, KEYS + SYMBOLS + 1
# For measurements: beginnings of texts with every key.
PROMPTS = [text(key, symbol, 10) for key in range(KEYS) for symbol in range(0, SYMBOLS, 7)]


@cache
def trained_target() -> Any:
    mx.random.seed(0)
    settings = {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": 3,
        "vocab_size": VOCABULARY, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    model, draw = llama.Model(llama.ModelArgs.from_dict(settings)), np.random.default_rng(1)
    learn_texts(model, lambda: random_texts(draw, 16), 150, 1)
    return model


def drafter_loss(model: Any, drafter: Any, texts: Sequence[list[int]]) -> mx.array:
    """Return the loss of drafts after a few places of the texts."""
    parts, losses = ScaledTrunk(model), []
    found = output_rows.run(
        model, mx.array(texts), kv_cache.new_cache(model), lambda rows: rows, drafter.taps
    )[1]
    hidden = mx.concatenate([found[tap] for tap in drafter.taps], -1)
    for row, tokens in enumerate(texts):
        states = drafter.states(hidden[row : row + 1])
        for place in (4, 11):
            entries = drafter.make_cache()
            if drafter.kind == "eagle3":
                after = parts.embed(mx.array([tokens[1 : place + 1]]))
                made = drafter.extend(states[:, :place], after, entries)
                draft = drafter.start(parts, made, entries)
            else:
                drafter.extend(states[:, :place], None, entries)
                draft = drafter.start(parts, tokens[place], entries)
            count = 3 if drafter.kind == "eagle3" else drafter.longest
            logits = [draft.logits(depth, tokens[place + depth]) for depth in range(count)]
            truth = mx.array(tokens[place + 1 : place + 1 + count])
            losses.append(nn.losses.cross_entropy(mx.concatenate(logits), truth).mean())
    return mx.mean(mx.stack(losses))


def swap_taps(drafts: Any) -> None:
    keep_states = drafts.keep_states

    def swapped(hidden: mx.array) -> None:
        parts = mx.split(hidden, len(drafts.taps), -1)
        keep_states(mx.concatenate(parts[::-1], -1))

    drafts.keep_states = swapped


def shift_positions(drafts: Any) -> None:
    before_pass = drafts.before_pass

    def shifted(entries: Any) -> None:
        before_pass(entries)
        drafts._position = max(0, drafts._position - 1)

    drafts.before_pass = shifted


def confuse_tokens(drafts: Any) -> None:
    """The newest token, and those after each position, are others."""
    parts = ScaledTrunk(trained_target())
    embed = parts.embed
    parts.embed = lambda tokens: embed((tokens + 1) % SYMBOLS)  # type: ignore[method-assign]
    drafts._ends = parts


def trained_drafter(kind: str, steps: int) -> PublishedDrafter:
    model = trained_target()
    with TemporaryDirectory() as directory:
        if kind == "eagle3":
            drafter = eagle3_drafter(
                Path(directory), model, WIDTH, VOCABULARY, draft_vocab_size=VOCABULARY
            )
        else:
            drafter = block_drafter(kind, model, WIDTH, VOCABULARY).model
        mx.eval(drafter.parameters())
    draw = np.random.default_rng(2)
    drafter.train()
    train(drafter, lambda made: drafter_loss(model, made, random_texts(draw, 6)), steps)
    return PublishedDrafter(kind, Path(), drafter, NEEDS, 1e-6)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle3"])
def test_wrong_wiring_is_seen_in_the_acceptance(kind: str) -> None:
    model, published = trained_target(), trained_drafter(kind, 200)
    right = tokens_per_pass(model, published, PROMPTS, 30)
    assert right > 2
    changes = [swap_taps, shift_positions]
    if kind != "dspark":  # which has its own embedding
        changes.append(confuse_tokens)
    for change in changes:
        changed = tokens_per_pass(model, published, PROMPTS, 30, change)
        assert changed < 0.85 * right, change.__name__


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_tree_yields_more_tokens_than_a_chain_of_as_many_rows(kind: str) -> None:
    model, published = trained_target(), trained_drafter(kind, 60)
    for rows in (5, 8):
        curve = CostCurve({1: 1.0, rows: 1.01, rows + 1: 50.0})
        chain, tree = (
            tokens_per_pass(model, published, PROMPTS, 30, curve=curve, trees=trees)
            for trees in (False, True)
        )
        assert tree > chain
