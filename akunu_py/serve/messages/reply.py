"""Messages from the events of an answer, whole or streamed.

A stream sends pings until the prompt is processed, because message_start has its token counts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from akunu_py.decoding.events import (
    Begun,
    CallArguments,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Text,
    Thinking,
)
from akunu_py.serve.dialect.errors import ErrorKind, RequestError
from akunu_py.serve.dialect.interface import WholeAnswer, frame, statistics
from akunu_py.types import FinishReason, ToolCall

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "cancelled": "end_turn",  # never sent
}
_ERRORS: dict[ErrorKind, str] = {
    "invalid": "invalid_request_error",
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "method": "invalid_request_error",
    "too_large": "request_too_large",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


def error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    kind = _ERRORS[error.kind]
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return body | ({"request_id": request_id} if request_id else {})


def whole_message(
    model: str, answers: Sequence[WholeAnswer], *, shows_thinking: bool
) -> dict[str, Any]:
    """Return the answer as a message."""
    answer = answers[0]
    assert answer.ended is not None
    content: list[dict[str, Any]] = []
    for part in answer.parts:
        if isinstance(part, Text):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, ToolCall):
            content.append(_called(part))
        elif shows_thinking:
            signed = _signature(part.text)
            content.append({"type": "thinking", "thinking": part.text, "signature": signed})
    begun = answer.begun or _begun(answer.ended)
    message = _message(model, begun)
    message |= {"content": content} | _stop(answer.ended, bool(answer.calls))
    message["usage"] |= {"output_tokens": answer.ended.stats.generated_tokens}
    return message | {"akunu": statistics(answer.ended)}


def _called(call: ToolCall) -> dict[str, Any]:
    """Return a call as a block, or as text if its JSON is incomplete."""
    try:
        values = json.loads(call.arguments or "{}")
    except ValueError:
        return {"type": "text", "text": f"{call.name} {call.arguments}"}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": values}


def _message(model: str, begun: Begun) -> dict[str, Any]:
    """Return a message without content."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _input_usage(begun) | {"output_tokens": 0},
    }


def _begun(ended: Ended) -> Begun:
    return Begun(ended.stats.prompt_tokens, ended.stats.cached_tokens)


def _input_usage(begun: Begun) -> dict[str, int]:
    """Return the token counts; input_tokens excludes cached tokens."""
    return {
        "input_tokens": begun.prompt_tokens - begun.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": begun.cached_tokens,
    }


def _stop(ended: Ended, called: bool) -> dict[str, str | None]:
    reason = _STOP_REASONS[ended.reason]
    if ended.reason == "stop":
        reason = "tool_use" if called else "stop_sequence" if ended.stop else reason
    return {"stop_reason": reason, "stop_sequence": ended.stop or None}


def _signature(thinking: str) -> str:
    """Return a signature, because clients keep only signed thinking; it is never verified."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


class MessageEncoder:
    """Encodes a streamed message."""

    def __init__(self, model: str, *, shows_thinking: bool) -> None:
        self._model, self._shows_thinking = model, shows_thinking
        self._started = False
        self._open = ""  # type of the open block, or ""
        self._index = -1  # of the last block
        self._thinking = ""
        self._called = False

    def heartbeat(self) -> bytes:
        return _frame({"type": "ping"})

    def fail(self, error: RequestError) -> list[bytes]:
        return [_frame(error_body(error, ""))]

    def encode(self, event: Event, choice: int) -> list[bytes]:
        return [_frame(value) for value in self._values(event)]

    def _values(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Begun():
                return self._start(event)
            case Thinking(text):
                self._thinking += text
                return self._delta("thinking", text) if self._shows_thinking else []
            case Text(text):
                return self._delta("text", text)
            case CallBegun(id, name):
                self._called = True
                block = {"type": "tool_use", "id": id, "name": name, "input": {}}
                return [*self._close(), *self._begin(block)]
            case CallArguments(text):
                delta = {"type": "input_json_delta", "partial_json": text}
                return [self._block("delta", delta=delta)] if text else []
            case CallEnded():
                return self._close()
            case Ended():
                return self._end(event)
            case _:
                return []

    def _start(self, begun: Begun) -> list[dict[str, Any]]:
        if self._started:
            return []
        self._started = True
        return [{"type": "message_start", "message": _message(self._model, begun)}]

    def _end(self, ended: Ended) -> list[dict[str, Any]]:
        usage = _input_usage(_begun(ended)) | {"output_tokens": ended.stats.generated_tokens}
        delta = {"type": "message_delta", "delta": _stop(ended, self._called), "usage": usage}
        return [
            *self._start(_begun(ended)),
            *self._close(),
            delta | {"akunu": statistics(ended)},
            {"type": "message_stop"},
        ]

    def _delta(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Extend a block of thinking or text, or begin one."""
        if not text:
            return []
        values: list[dict[str, Any]] = []
        if self._open != kind:
            extra = {"signature": ""} if kind == "thinking" else {}
            values = [*self._close(), *self._begin({"type": kind, kind: "", **extra})]
        return [*values, self._block("delta", delta={"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._open, self._index = block["type"], self._index + 1
        return [self._block("start", content_block=block)]

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        values = []
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": _signature(self._thinking)}
            values = [self._block("delta", delta=signed)]
            self._thinking = ""
        self._open = ""
        return [*values, self._block("stop")]

    def _block(self, what: str, **values: Any) -> dict[str, Any]:
        return {"type": f"content_block_{what}", "index": self._index, **values}


def _frame(value: dict[str, Any]) -> bytes:
    return frame(value, value["type"])
