"""An MTP head as MLX computes it: see `families` for the steps."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from akunu_py.models.mtp.families import HeadFamily


class Head(nn.Module):
    """A head. Its layer is the only one of a model of its family, mlx-lm's own, which sees to masks
    and positions; that has no embedding and no lm_head: those of the target are used.

    Calling it takes the target's embeddings [1, rows, width] of tokens and, for each, the hidden
    state before it [1, rows, width], and writes into `cache`, which `make_cache` made. Returns the
    hidden states [1, rows, width] that `Trunk.logits` makes logits of, for the token after each;
    they are also what a further token is guessed from.
    """

    def __init__(self, family: HeadFamily, config: dict[str, Any]) -> None:
        """config: the target's, of its text."""
        super().__init__()
        module = importlib.import_module(f"mlx_lm.models.{family.module}")
        one = {"num_hidden_layers": 1, "vocab_size": 1, **family.config}
        args = getattr(module, family.args).from_dict(config | one)
        self.body = getattr(module, family.model)(args)
        self.body.pop("lm_head", None)
        self.body.model.embed_tokens = nn.Identity()
        if "ssm_idx" in vars(self.body.model):  # of the first recurrent layer, which there is none
            self.body.model.ssm_idx = 1
        norm = self.body.model.norm
        width = norm.weight.shape[0]
        self.embedding_norm = nn.RMSNorm(width, eps=norm.eps)
        self.hidden_norm = nn.RMSNorm(width, eps=norm.eps)
        self.project = nn.Linear(2 * width, width, bias=False)
        self._embedding_first = family.embedding_first
        self.normed = family.normed

    @property
    def width(self) -> int:
        return int(self.hidden_norm.weight.shape[0])

    @property
    def layers(self) -> list[Any]:
        return list(self.body.layers)

    def make_cache(self) -> list[Any]:
        """An empty cache. Masks keep windows; what is behind one stays for rolling back."""
        made = self.body.make_cache() if hasattr(self.body, "make_cache") else [KVCache()]
        return [KVCache() if type(entry) is RotatingKVCache else entry for entry in made[:1]]

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: list[Any]) -> mx.array:
        both = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        if not self._embedding_first:
            both.reverse()
        return self.body.model(self.project(mx.concatenate(both, -1)), [*cache, None])


class Trunk:
    """The parts of a target that a head needs."""

    def __init__(self, model: Any, *, normed: bool = True) -> None:
        """normed: whether the head takes hidden states behind the target's norm."""
        self._text = getattr(model, "language_model", model)
        self._normed = normed

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """One pass over `tokens` [1, rows]. Returns what `logits` takes, and what the head takes,
        both [1, rows, width]."""
        if self._normed:
            normed = self._text.model(tokens, cache)
            return normed, normed
        bare = copy.copy(self._text.model)  # a handle on the same layers
        bare.norm = nn.Identity()
        hidden = bare(tokens, cache)
        return self._text.model.norm(hidden), hidden

    def embed(self, tokens: mx.array) -> mx.array:
        """The embeddings [1, rows, width] of `tokens` [1, rows]."""
        return self._text.model.embed_tokens(tokens)

    @property
    def lm_head(self) -> nn.Module:
        """What makes logits: often the embedding."""
        return self._text.lm_head if "lm_head" in self._text else self._text.model.embed_tokens

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab] of hidden states [..., width]."""
        head = self.lm_head
        return head(hidden) if "lm_head" in self._text else head.as_linear(hidden)
