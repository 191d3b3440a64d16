"""Embeddings, as OpenAI's clients request them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from akunu_py.serve.dialect.bodies import Body, Ignored, KnownOnly
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.service import Embedder
from akunu_py.serve.openai.shapes import texts_of

_MAX_TEXTS = 2048  # OpenAI's limit


class EmbeddingsBody(Body):
    """The body of /v1/embeddings."""

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]  # texts or token ids
    dimensions: int | None = Field(default=None, ge=1)
    encoding_format: Annotated[Literal["float", "base64"] | None, KnownOnly()] = None
    user: Ignored = None


def embeddings(body: EmbeddingsBody, embedder: Embedder) -> Mapping[str, Any]:
    """Return the embeddings of all texts. Raises RequestError."""
    texts = texts_of(body.input)
    if not 1 <= len(texts) <= _MAX_TEXTS:
        raise invalid("input", f"expected 1 to {_MAX_TEXTS} texts, got {len(texts)}")
    found = embedder.embed(texts, body.dimensions)
    in_base64 = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _in_base64(each.values) if in_base64 else each.values,
        }
        for index, each in enumerate(found)
    ]
    tokens = sum(each.tokens for each in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": embedder.name, "data": data, "usage": usage}


def _in_base64(values: Sequence[float]) -> str:
    """Return 32-bit little-endian floats in base64."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
