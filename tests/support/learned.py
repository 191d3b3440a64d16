"""Tiny networks that learn an invented language, so that drafts can be right."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from akunu_py.engine.drafters.states import published_drafter
from akunu_py.engine.model.drafters import PublishedDrafter
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from tests.support.targets import Timeless, drafted
from tests.support.tiny_gguf import CONTROL, vocabulary
from tests.support.tiny_model import tiny_directory

KEYS, SYMBOLS, LENGTH = 4, 20, 24
_FREE = CostCurve({1: 1.0, 33: 1.01})  # a curve with which everything pays
_draw = np.random.default_rng(0)
_tables = [_draw.permutation(SYMBOLS) for _ in range(KEYS)]


def text(key: int, symbol: int, length: int = LENGTH) -> list[int]:
    """Return a key, then symbols: the key decides which symbol follows another."""
    tokens = [SYMBOLS + key, symbol]
    while len(tokens) < length:
        tokens.append(int(_tables[key][tokens[-1]]))
    return tokens


def random_texts(draw: np.random.Generator, count: int) -> list[list[int]]:
    return [text(int(draw.integers(KEYS)), int(draw.integers(SYMBOLS))) for _ in range(count)]


def train(model: nn.Module, loss: Callable[..., mx.array], steps: int) -> None:
    optimizer = optimizers.Adam(3e-3)
    step = nn.value_and_grad(model, loss)
    for _ in range(steps):
        _, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
    model.eval()


def learn_texts(
    model: Any, texts: Callable[[], Sequence[Sequence[int]]], steps: int, skipped: int = 0
) -> None:
    """Train a language model on texts. skipped: tokens at the start that nothing predicts."""

    def loss(model: Any) -> mx.array:
        tokens = mx.array(texts())
        logits = model(tokens[:, :-1])
        return nn.losses.cross_entropy(logits, tokens[:, 1:])[:, skipped:].mean()

    train(model, loss, steps)


def write_chat_model(work: Path) -> Path:
    """Write a model whose users write a key and a symbol, and whose answers continue the text."""
    directory = tiny_directory(work)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization"]
    (directory / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)
    model, draw = llama.Model(llama.ModelArgs.from_dict(config)), np.random.default_rng(1)
    tokens = vocabulary()
    letters = [tokens.index(each) for each in "abcdefghijklmnopqrstABCD"]
    begin, end = tokens.index(CONTROL[1]), tokens.index(CONTROL[2])

    def chats() -> list[list[int]]:
        chosen = [[letters[each] for each in text] for text in random_texts(draw, 16)]
        return [[begin, *each[:2], end, *each[2:], end] for each in chosen]

    learn_texts(model, chats, 150)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


def tokens_per_pass(
    model: Any, published: PublishedDrafter, prompts: Sequence[Sequence[int]], count: int,
    change: Callable[[Any], None] = lambda drafts: None, curve: CostCurve = _FREE, *,
    trees: bool = False,
) -> float:  # fmt: skip
    """Return the tokens a pass of answers of `count` tokens, drafted for by `published` alone."""
    tokens = passes = 0
    for prompt in prompts:
        target = Timeless(model)
        drafts: Any = published_drafter(published, target)
        drafts.clock = lambda: 0.0
        change(drafts)
        drafter = AutoDrafter(curve, neural_drafters=[drafts], ngrams=False)
        drafter.branches = trees
        pieces = drafted(target, drafts, drafter, prompt, count)
        tokens, passes = tokens + sum(len(each.tokens) for each in pieces), passes + len(pieces)
    return tokens / passes
