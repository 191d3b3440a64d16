"""Answers as Chat Completions has them: events in, chunks or one object out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from akunu_py.decoding.generate.events import (
    Begun,
    CallArguments,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Failed,
    Logprobs,
    Reading,
    Text,
    Thinking,
)
from akunu_py.serve import sse
from akunu_py.serve.dialect import CommentHeartbeat, WholeAnswer
from akunu_py.serve.errors import RequestError
from akunu_py.serve.openai.shapes import chat_logprobs, error_body, finish_reason, usage
from akunu_py.serve.statistics import statistics
from akunu_py.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChatHead:
    """What all chunks of a reply have in common."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        common = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return common | {"choices": choices} | more


class ChatEncoder(CommentHeartbeat):
    """The chunks of a streamed answer; the first of each choice has the role."""

    def __init__(self, head: ChatHead, count: int = 1, *, usage: bool = False) -> None:
        """count: of choices. usage: whether a last chunk tells it."""
        self._head, self._count, self._usage = head, count, usage
        self._calls = [0] * count
        self._begun = [False] * count
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._ended: list[Ended] = []

    def encode(self, event: Event, choice: int) -> list[bytes]:
        """See `Encoder`."""
        if isinstance(event, Ended):
            return self._end(event, choice)
        if isinstance(event, Logprobs):
            self._logprobs[choice] += event.tokens
            return []
        delta = self._delta(event, choice)
        if delta is None:
            return []
        return [*self._role(choice), self._chunk(choice, delta)] if delta else self._role(choice)

    def fail(self, error: RequestError) -> list[bytes]:
        """See `Encoder`."""
        return [sse.frame(error_body(error))]

    def _delta(self, event: Event, choice: int) -> dict[str, Any] | None:
        """What is new with an event; empty where that is only that it began, None for nothing."""
        match event:
            case Begun():
                return {}
            case Text(text):
                return {"content": text}
            case Thinking(text):
                return {"reasoning_content": text}
            case CallBegun(id, name):
                self._calls[choice] += 1
                function = {"name": name, "arguments": ""}
                more = {"id": id, "type": "function", "function": function}
            case CallArguments(text):
                more = {"function": {"arguments": text}}
            case Reading() | Logprobs() | CallEnded() | Ended() | Failed():
                return None
        return {"tool_calls": [{"index": self._calls[choice] - 1, **more}]}

    def _role(self, choice: int) -> list[bytes]:
        if self._begun[choice]:
            return []
        self._begun[choice] = True
        return [self._chunk(choice, {"role": "assistant", "content": ""})]

    def _end(self, event: Ended, choice: int) -> list[bytes]:
        self._ended.append(event)
        reason = finish_reason(event, calls=self._calls[choice] > 0)
        extra = {"akunu": statistics(event)}
        frames = [*self._role(choice), self._chunk(choice, {}, reason, extra)]
        if len(self._ended) < self._count:
            return frames
        if self._usage:
            frames.append(self._frame([], {"usage": usage(self._ended[:1], self._ended)}))
        return [*frames, sse.DONE]

    def _chunk(
        self,
        choice: int,
        delta: Mapping[str, Any],
        reason: str | None = None,
        extra: Mapping[str, Any] = {},
    ) -> bytes:
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
        if self._logprobs[choice] and "role" not in delta:
            entry["logprobs"] = chat_logprobs(self._logprobs[choice])
            self._logprobs[choice] = []
        return self._frame([entry], {**({"usage": None} if self._usage else {}), **extra})

    def _frame(self, choices: list[Any], extra: Mapping[str, Any]) -> bytes:
        return sse.frame(self._head.object("chat.completion.chunk", choices, **extra))


def whole_chat(head: ChatHead, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    ended = [answer.ended for answer in answers if answer.ended]
    return head.object(
        "chat.completion",
        [_choice(number, answer) for number, answer in enumerate(answers)],
        usage=usage(ended[:1], ended),
        akunu=statistics(*ended),
    )


def _choice(number: int, answer: WholeAnswer) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.calls
    ]
    message = {
        "role": "assistant",
        "content": None if calls and not answer.text else answer.text,
        "refusal": None,
        **({"reasoning_content": answer.thinking} if answer.thinking else {}),
        **({"tool_calls": calls} if calls else {}),
    }
    assert answer.ended is not None
    reason = finish_reason(answer.ended, calls=bool(calls))
    logprobs = chat_logprobs(answer.logprobs) if answer.logprobs else None
    return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}
