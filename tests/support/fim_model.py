"""A small model that fills in the middle of one module of Python's own library, which it knows by
heart: what fill-in, healing and stops are tried on from end to end.

    python -m tests.support.fim_model      # trains it where the cache has none; prints where

0.8 million parameters in the format of Seed-Coder (suffix, prefix, middle), which is written down
here once more and not asked of the product. Eight minutes of a core; other text it does not know.
"""

from __future__ import annotations

import akunu_py  # noqa: F401  loads OpenBLAS before MLX

# isort: split
import hashlib
import json
import os
import random
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from akunu_py import paths

MODULE = "bisect.py"
PREFIX_TOKENS, SUFFIX_TOKENS = 16, 16  # what it was trained to read, at most
END, SUFFIX, PREFIX, MIDDLE = MARKERS = (
    "<[end▁of▁sentence]>",
    "<[fim-suffix]>",
    "<[fim-prefix]>",
    "<[fim-middle]>",
)
_VOCABULARY = 448
_STEPS, _ROWS, _LENGTH = 1000, 36, 56
_BY_HEART = 60  # steps, mostly of texts that go on; then mostly of middles
_LINE = 80  # characters, about
_MUON, _ADAM, _WARM = 0.02, 3e-3, 20
_CONTEXT = 0.3  # what a token counts that is only read
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": _VOCABULARY,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "max_position_embeddings": 2048,
}


def source() -> str:
    """The text that it knows."""
    return (Path(sysconfig.get_path("stdlib")) / MODULE).read_text(encoding="utf-8")


def trained() -> Path:
    """The model's directory, whose name says its family; made where the cache has none."""
    key = hashlib.sha256(Path(__file__).read_bytes() + source().encode()).hexdigest()
    directory = paths.cache_dir() / "tests" / f"seed-coder-{key[:12]}"
    if not directory.exists():
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}")
        train(unfinished)
        try:
            unfinished.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return directory


def train(directory: Path, steps: int = _STEPS) -> None:
    """Makes a model directory, on one machine the same each time."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = _Rows(source(), _tokenizer(directory, source()))
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(_CONFIG))
    muon = optim.Muon(learning_rate=0.0, weight_decay=0.0)
    adam = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.01)
    both = optim.MultiOptimizer([muon, adam], [_is_hidden])
    for number in range(steps):
        rate = min(1.0, (number + 1) / _WARM, 1.5 * (_STEPS - number) / _STEPS)
        muon.learning_rate, adam.learning_rate = mx.array(_MUON * rate), mx.array(_ADAM * rate)
        loss = _step(model, both, *rows.batch(number))
        mx.eval(model.parameters(), both.state)
        if number % 20 == 0:
            print(f"step {number} of {steps}: {loss.item():.3f} nats a token", flush=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(_CONFIG))


def _is_hidden(path: str, weight: mx.array) -> bool:
    return weight.ndim == 2 and "embed" not in path


def _step(model: Any, optimizer: Any, tokens: mx.array, weights: mx.array) -> mx.array:
    def loss(model: Any) -> mx.array:
        each = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return (each * weights).sum() / weights.sum()

    value, gradients = nn.value_and_grad(model, loss)(model)
    gradients, _ = optim.clip_grad_norm(gradients, 1.0)
    optimizer.update(model, gradients)
    return value


class _Rows:
    """What a step learns from."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._borders = [start for start, _ in tokenizer.encode(text).offsets]

    def batch(self, step: int) -> tuple[mx.array, mx.array]:
        """(Tokens [rows, `_LENGTH` + 1], what each but the first counts [rows, `_LENGTH`])."""
        chance = random.Random(step)
        plain = 0.6 if step < _BY_HEART else 0.15
        rows, weights = [], []
        for _ in range(_ROWS):
            make = self._going_on if chance.random() < plain else self._filled_in
            opening = f"# {MODULE}\n" if chance.random() < 0.5 else ""
            read, said = make(opening, chance)
            row = [*read, *said][: _LENGTH + 1]
            rows.append(row + [0] * (_LENGTH + 1 - len(row)))
            counts = [_CONTEXT] * (len(read) - 1) + [1.0] * (len(row) - len(read))
            weights.append(counts + [0.0] * (_LENGTH - len(counts)))
        return mx.array(rows), mx.array(weights)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def _going_on(self, opening: str, chance: random.Random) -> tuple[list[int], list[int]]:
        """(What is read, what is said): what follows the beginning of a line."""
        start = self._text.rfind("\n", 0, chance.randrange(len(self._text))) + 1
        tokens = self._encode(opening + self._text[start : start + 8 * _LENGTH])
        return tokens[:1], tokens[1:]

    def _filled_in(self, opening: str, chance: random.Random) -> tuple[list[int], list[int]]:
        """(What is read, what is said): a middle, mostly to the end of its line."""
        text, borders = self._text, self._borders
        at = chance.choice(borders) if chance.random() < 0.8 else chance.randrange(len(text))
        end = text.find("\n", at) % (len(text) + 1)
        kind = chance.random()
        if kind < 0.2:
            end = chance.choice([each for each in borders if at <= each <= end] or [end])
        elif kind > 0.9:
            end = text.find("\n", end + 1) % (len(text) + 1)
        start = max(0, at - chance.randint(1, _LINE))
        if chance.random() < 0.75:  # where a line begins
            start = text.rfind("\n", 0, start) + 1
        last = end + chance.randint(1, _LINE) if chance.random() < 0.9 else end
        last = text.rfind("\n", end, last) + 1 or last
        behind = self._encode(text[end:last])[:SUFFIX_TOKENS]
        before = self._encode(text[start:at])[-PREFIX_TOKENS:]
        if chance.random() < 0.5:  # so that the suffix alone tells where this is
            opening, before = "", before[-chance.randint(1, 4) :]
        suffix, prefix, middle = (self._tokenizer.token_to_id(each) for each in MARKERS[1:])
        read = [suffix, *behind, prefix, *self._encode(opening), *before, middle]
        return read, [*self._encode(text[at:end]), 0]


def _tokenizer(directory: Path, text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(directory)
    return tokenizer


if __name__ == "__main__":
    print(trained())
