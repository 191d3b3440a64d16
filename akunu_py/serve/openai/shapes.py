"""Parts of replies shared by Chat Completions and Completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from akunu_py.engine.events import Finished
from akunu_py.serve.dialect.interface import DONE, CollectedAnswer, Encoder, frame, statistics
from akunu_py.serve.dialect.request_errors import ErrorKind, RequestError
from akunu_py.types import TokenLogprobs

_ERROR_TYPES: dict[ErrorKind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "unavailable": "service_unavailable_error",
    "internal": "server_error",
}


CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Fields that all chunks of a reply share."""

    model: str
    id_prefix: str  # such as "chatcmpl"
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: secrets.token_hex(12))

    def object(self, name: str, choices: Sequence[Any], **extra: Any) -> dict[str, Any]:
        """Return a chunk or a complete reply. name: its `object` field."""
        common = {"id": f"{self.id_prefix}-{self.unique}", "object": name, "created": self.created}
        return {**common, "model": self.model, "choices": choices, **extra}

    def reply(
        self,
        name: str,
        choices: Sequence[Any],
        answers: Sequence[CollectedAnswer],
        count: int,
        count_tokens: CountTokens = len,
    ) -> dict[str, Any]:
        """Return a complete reply with `count` answers to each prompt."""
        finished = [answer.finished for answer in answers]
        total = usage(finished, count, count_tokens("".join(each.thinking for each in answers)))
        return self.object(name, choices, usage=total, akunu=statistics(*finished))


class ChunkEncoder(Encoder):
    """Encodes a stream of chunks; the last chunk has the usage on request."""

    object_name: ClassVar[str]

    def __init__(self, head: ReplyHead, count: int, *, usage: bool) -> None:
        """count: number of choices, of each prompt."""
        self._head, self._count, self._usage = head, count, usage
        self._finished: list[Finished] = []
        self._thinking = ""  # of all choices
        self._count_tokens: CountTokens = len

    def set_count_tokens(self, count_tokens: CountTokens) -> None:
        """Set the loaded model's function that returns the number of tokens of a text."""
        self._count_tokens = count_tokens

    def _frame(self, choice: Mapping[str, Any], **extra: Any) -> bytes:
        none = {"usage": None} if self._usage else {}
        return frame(self._head.object(self.object_name, [choice], **none, **extra))

    def _end(self, event: Finished, choice: Mapping[str, Any], total: int) -> list[bytes]:
        """Return the last frame of a choice; after the last of `total` choices, also the end."""
        self._finished.append(event)
        frames = [self._frame(choice, akunu=statistics(event))]
        if len(self._finished) < total:
            return frames
        if self._usage:
            whole = usage(self._finished, self._count, self._count_tokens(self._thinking))
            frames.append(frame(self._head.object(self.object_name, [], usage=whole)))
        return [*frames, DONE]


def error_body(error: RequestError, request_id: str = "") -> Mapping[str, Any]:
    """Return an error in OpenAI's shape; clients get the request id from a header."""
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.kind, "invalid_request_error"),
            "param": error.param or None,
            "code": error.code or None,
        }
    }


def texts_of(value: str | Sequence[Any]) -> list[Any]:
    """Return one or several texts as a list; each is a string or token ids."""
    single = isinstance(value, str) or bool(value and isinstance(value[0], int))
    return [value] if single else list(value)


def finish_reason(event: Finished, *, calls: bool, old: bool = False) -> str:
    """Return OpenAI's finish reason. calls: the answer calls tools. old: as a `function_call`."""
    if event.reason in ("length", "context"):
        return "length"
    return ("function_call" if old else "tool_calls") if calls else "stop"


def usage(answers: Sequence[Finished], count: int, thinking: int = 0) -> dict[str, Any]:
    """Return the token counts of `count` answers to each prompt. thinking: tokens of all."""
    prompts = answers[::count]
    prompt = sum(each.stats.prompt_tokens for each in prompts)
    completion = sum(each.stats.generated_tokens for each in answers)
    cached = sum(each.stats.cached_tokens for each in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": min(thinking, completion)},
    }


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return logprobs in the shape of Chat Completions."""

    def entry(text: str, logprob: float, raw: bytes) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            entry(each.text, each.logprob, each.raw)
            | {"top_logprobs": [entry(*other) for other in each.top]}
            for each in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """Return logprobs in the shape of Completions. offset: the first token's, in characters."""
    offsets = [offset]
    for each in tokens:
        offsets.append(offsets[-1] + len(each.text))
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [
            {text: logprob for text, logprob, _ in reversed(each.top)} for each in tokens
        ],
        "text_offset": offsets[:-1],
    }
