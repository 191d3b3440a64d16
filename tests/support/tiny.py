"""Tiny random-weight models from mlx-lm's own classes, and drafters to torment them with."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama

from akunu_py.ngram.token_tree import TokenTree
from tests.support.drafters import OffersAll

VOCABULARY = 96


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """As LLAMA says, but for `changes`; its weights are large enough that it does not repeat one
    token for ever."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA | changes))
    model.update(tree_map(lambda weight: mx.random.normal(weight.shape) * 0.3, model.parameters()))
    mx.eval(model.parameters())
    return model


def write_tiny_llama(directory: Path, seed: int = 0, **changes: Any) -> None:
    """Writes its config.json and model.safetensors."""
    weights = dict(tree_flatten(tiny_llama(seed, **changes).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))


def write_like_starter(directory: Path, starter: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a llama of random weights with the starter's tokenizer and template."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(starter / name, directory / name)
    write_tiny_llama(directory, seed, vocab_size=49_152, eos_token_id=2, **changes)
    return directory


class Adversary(OffersAll):
    """Knows the truth and drafts right, partly right or wrong tokens, in a seeded pattern."""

    def __init__(self, prompt: Sequence[int], truth: Sequence[int], seed: int = 0) -> None:
        self.prompt, self.truth = list(prompt), list(truth)
        self.history: list[int] = []
        self._random = random.Random(seed)

    def extend(self, tokens: Sequence[int]) -> None:
        self.history += tokens

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        answered = len(self.history) - len(self.prompt) + ahead
        count = min(limit, self._random.randrange(17))
        draft = self.truth[answered : answered + count]
        draft += [self._random.randrange(VOCABULARY) for _ in range(count - len(draft))]
        kind = self._random.randrange(4)
        if draft and kind == 0:
            draft = [(token + 1) % VOCABULARY for token in draft]
        elif draft and kind == 1:
            wrong = self._random.randrange(len(draft))
            draft[wrong] = (draft[wrong] + 1) % VOCABULARY
        return draft

    @property
    def pipelines(self) -> bool:
        return self._random.random() < 0.7

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        assert not seconds <= 0.0  # NaN if unknown


class TreeAdversary(Adversary):
    """Drafts random trees: several roots, duplicates, the right token in any branch; or chains."""

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        count, choose = self._random.randrange(2, 17), self._random.random
        if limit < 1 or choose() < 0.2:
            return super().propose(limit, ahead=ahead)
        answered = len(self.history) - len(self.prompt) + ahead
        tokens, parents, depths, right = list[int](), list[int](), [0], [True]
        while len(tokens) < count:
            on_path = [node for node in range(len(depths)) if right[node]]
            parent = self._random.choice(on_path if choose() < 0.6 else range(len(depths)))
            if depths[parent] >= limit:
                parent = 0
            place = answered + depths[parent]
            token = self._random.randrange(VOCABULARY)
            if right[parent] and place < len(self.truth) and choose() < 0.6:
                token = self.truth[place]
            twin = any(p == parent - 1 and t == token for p, t in zip(parents, tokens, strict=True))
            known = right[parent] and self.truth[place : place + 1] == [token]
            tokens.append(token)
            parents.append(parent - 1)
            depths.append(depths[parent] + 1)
            right.append(known and not twin)
        return TokenTree(tokens, parents)
