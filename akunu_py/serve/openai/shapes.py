"""Parts of replies that Chat Completions and Completions have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from akunu_py.decoding.generate.events import Ended
from akunu_py.serve.errors import ErrorKind, RequestError
from akunu_py.types import TokenLogprobs

_ERROR_TYPES: dict[ErrorKind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "unavailable": "service_unavailable_error",
    "internal": "server_error",
}


def error_body(error: RequestError, request_id: str = "") -> Mapping[str, Any]:
    """An error as OpenAI's clients read it; they have the request's id from a header."""
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.kind, "invalid_request_error"),
            "param": error.param or None,
            "code": error.code or None,
        }
    }


def finish_reason(event: Ended, *, calls: bool) -> str:
    """Why an answer ended. calls: whether it calls tools."""
    if event.reason in ("length", "context"):
        return "length"
    return "tool_calls" if calls else "stop"


def usage(prompts: Sequence[Ended], answers: Sequence[Ended]) -> dict[str, Any]:
    """How many tokens it was. prompts: an answer to each prompt. answers: all of them."""
    prompt = sum(each.stats.prompt_tokens for each in prompts)
    completion = sum(each.stats.generated_tokens for each in answers)
    cached = sum(each.stats.cached_tokens for each in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """As Chat Completions has them."""

    def one(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": _bytes(text)}

    return {
        "content": [
            one(each.text, each.logprob) | {"top_logprobs": [one(*other) for other in each.top]}
            for each in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """As Completions has them. offset: where the first token is in the text."""
    offsets = [offset]
    for each in tokens:
        offsets.append(offsets[-1] + len(each.text))
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [dict(reversed(each.top)) for each in tokens],
        "text_offset": offsets[:-1],
    }


def _bytes(text: str) -> list[int] | None:
    """None for a token that is a part of a character."""
    return None if "\ufffd" in text else list(text.encode())
