"""Embeddings of texts: the hidden state of the last token, normalized.

This is how Qwen3-Embedding and similar decoders are trained. Source: Zhang et al., "Qwen3
Embedding" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from akunu_py.engine.engine import Engine
from akunu_py.engine.host import ModelHost
from akunu_py.errors import PromptTooLong, UnsupportedModel, UsageError

Text = str | Sequence[int]  # or token ids


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text."""

    values: list[float]  # of length 1
    tokens: int  # of the text


@dataclass(frozen=True, slots=True)
class Embedder:
    """An embedding model in its own thread."""

    name: str
    host: ModelHost

    def embed(self, texts: Sequence[Text], dimensions: int | None = None) -> list[Embedding]:
        """Return the embeddings of texts; loads the model if needed. Errors: see `embed`."""
        futures = [
            self.host.call(partial(embed, text=text, dimensions=dimensions)) for text in texts
        ]
        return [future.result() for future in futures]


def embed(engine: Engine, text: Text, dimensions: int | None = None) -> Embedding:
    """Return the embedding of a text; call in the thread that owns the model.

    dimensions: keep only the first ones. Raises UsageError for an empty text, token ids outside the
    vocabulary or too many dimensions, PromptTooLong, UnsupportedModel.
    """
    tokens = engine.tokens.encode(text) if isinstance(text, str) else list(text)
    if not tokens or not all(0 <= token < engine.tokens.vocabulary for token in tokens):
        raise UsageError("input: expected a text or token ids of the embedding model")
    if len(tokens) > engine.plan.context_length:
        maximum = engine.plan.context_length
        message = f"input: {len(tokens)} tokens exceed the context of {maximum} tokens"
        raise PromptTooLong(message, len(tokens), maximum)
    body = getattr(engine.model, "model", None)
    if not callable(body):
        raise UnsupportedModel(f"{engine.name} cannot make embeddings; use Qwen3-Embedding")
    hidden = body(mx.array([tokens]))[0, -1].astype(mx.float32)
    if dimensions is not None and dimensions > hidden.size:
        raise UsageError(f"dimensions: expected at most {hidden.size}, got {dimensions}")
    hidden = hidden[:dimensions]
    values = hidden * mx.rsqrt(mx.sum(hidden * hidden) + 1e-12)
    return Embedding([float(each) for each in values.tolist()], len(tokens))
