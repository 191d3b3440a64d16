"""Chat Completions and Completions, as OpenAI's clients use them."""

from __future__ import annotations

from akunu_py.serve.dialect.interface import Dialect, Endpoint
from akunu_py.serve.openai.chat_completions import ChatBody, chat_encoder, prepare_chat
from akunu_py.serve.openai.completions import (
    CompletionsBody,
    completions_encoder,
    prepare_completions,
)
from akunu_py.serve.openai.embeddings import EmbeddingsBody, embeddings
from akunu_py.serve.openai.shapes import error_body

OPENAI = Dialect(
    (
        Endpoint(
            "/v1/chat/completions",
            ChatBody,
            prepare_chat,
            "Answer a conversation.",
            encoder=chat_encoder,
        ),
        Endpoint(
            "/v1/completions",
            CompletionsBody,
            prepare_completions,
            "Continue texts, or fill in their middle.",
            encoder=completions_encoder,
        ),
        Endpoint("/v1/embeddings", EmbeddingsBody, embeddings, "Embed texts.", needs="embedder"),
    ),
    error_body,
)
