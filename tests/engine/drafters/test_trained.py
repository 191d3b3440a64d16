"""Trained drafters reach an acceptance that wrong wiring cannot.

A wrong tap or anchor raises nothing: only the acceptance of a drafter that was trained shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx import optimizers
from mlx_lm.models import llama

from akunu_py.engine import kv_cache
from akunu_py.engine.drafters.states import TargetParts, published_drafter
from akunu_py.engine.model import output_rows
from akunu_py.engine.model.drafters import PublishedDrafter
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from tests.support.published_drafters import NEEDS, block_drafter, eagle3_drafter
from tests.support.targets import Timeless, drafted

pytestmark = pytest.mark.slow

KEYS, SYMBOLS, WIDTH, LENGTH = 4, 20, 64, 24
VOCABULARY = KEYS + SYMBOLS + 1
FREE = CostCurve({1: 1.0, 33: 1.01})  # a curve with which everything pays
_random = np.random.default_rng(0)
_tables = [_random.permutation(SYMBOLS) for _ in range(KEYS)]


def text(length: int) -> list[int]:
    """Return a key, then symbols: the key decides which symbol follows another."""
    key = int(_random.integers(KEYS))
    tokens = [SYMBOLS + key, int(_random.integers(SYMBOLS))]
    while len(tokens) < length:
        tokens.append(int(_tables[key][tokens[-1]]))
    return tokens


def train(model: nn.Module, loss: Callable[..., mx.array], steps: int) -> None:
    optimizer = optimizers.Adam(3e-3)
    step = nn.value_and_grad(model, loss)
    for _ in range(steps):
        _, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
    model.eval()


@cache
def trained_target() -> Any:
    mx.random.seed(0)
    settings = {
        "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": 3,
        "vocab_size": VOCABULARY, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    model = llama.Model(llama.ModelArgs.from_dict(settings))

    def loss(model: Any) -> mx.array:
        tokens = mx.array([text(LENGTH) for _ in range(16)])
        logits = model(tokens[:, :-1])
        return nn.losses.cross_entropy(logits, tokens[:, 1:])[:, 1:].mean()

    train(model, loss, 150)
    return model


def drafter_loss(model: Any, drafter: Any) -> mx.array:
    """Return the loss of drafts after a few places of a few texts."""
    parts, losses = TargetParts(model), []
    texts = [text(LENGTH) for _ in range(6)]
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
                draft = drafter.start(parts.embed, parts.lm_head, made, entries, 3)
            else:
                drafter.extend(states[:, :place], None, entries)
                draft = drafter.start(parts.embed, parts.lm_head, tokens[place], entries)
            count = draft.length
            logits = [draft.logits(depth, tokens[place + depth]) for depth in range(count)]
            truth = mx.array(tokens[place + 1 : place + 1 + count])
            losses.append(nn.losses.cross_entropy(mx.concatenate(logits), truth).mean())
    return mx.mean(mx.stack(losses))


def tokens_per_pass(published: PublishedDrafter, change: Callable[[Any], None]) -> float:
    """Return the tokens a pass of the whole engine, over answers to new texts."""
    tokens = passes = 0
    for _ in range(4):
        prompt = text(10)
        target = Timeless(trained_target())
        drafts: Any = published_drafter(published, target)
        drafts.clock = lambda: 0.0
        change(drafts)
        drafter = AutoDrafter(FREE, neural_drafters=[drafts], ngrams=False)
        pieces = drafted(target, drafts, drafter, prompt, 30)
        tokens, passes = tokens + sum(len(each.tokens) for each in pieces), passes + len(pieces)
    return tokens / passes


def swap_taps(drafts: Any) -> None:
    states = drafts.states

    def swapped(hidden: mx.array) -> mx.array:
        parts = mx.split(hidden, len(drafts.taps), -1)
        return states(mx.concatenate(parts[::-1], -1))

    drafts.states = swapped


def shift_positions(drafts: Any) -> None:
    before_pass = drafts.before_pass

    def shifted(entries: Any) -> None:
        before_pass(entries)
        drafts._position = max(0, drafts._position - 1)

    drafts.before_pass = shifted


def confuse_tokens(drafts: Any) -> None:
    """The newest token, and those after each position, are others."""
    parts = TargetParts(trained_target())
    embed = parts.embed
    parts.embed = lambda tokens: embed((tokens + 1) % SYMBOLS)  # type: ignore[method-assign]
    drafts._parts, drafts._embed = parts, parts.embed


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle3"])
def test_wrong_wiring_is_seen_in_the_acceptance(kind: str) -> None:
    model = trained_target()
    with TemporaryDirectory() as directory:
        if kind == "eagle3":
            drafter = eagle3_drafter(
                Path(directory), model, WIDTH, VOCABULARY, draft_vocab_size=VOCABULARY
            )
        else:
            drafter = block_drafter(kind, model, WIDTH, VOCABULARY).model
        mx.eval(drafter.parameters())
    drafter.train()
    train(drafter, lambda made: drafter_loss(model, made), 200)
    published = PublishedDrafter(kind, Path(), drafter, NEEDS, 1e-6)
    right = tokens_per_pass(published, lambda drafts: None)
    assert right > 2.5
    changes = [swap_taps, shift_positions]
    if kind != "dspark":  # which has its own embedding
        changes.append(confuse_tokens)
    for change in changes:
        assert tokens_per_pass(published, change) < 0.7 * right, change.__name__
