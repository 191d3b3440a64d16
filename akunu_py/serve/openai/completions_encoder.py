"""Answers as Completions has them: events in, chunks or one object out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from akunu_py.decoding.generate.events import Begun, Ended, Event, Logprobs, Text, Thinking
from akunu_py.serve import sse
from akunu_py.serve.dialect import CommentHeartbeat, WholeAnswer
from akunu_py.serve.errors import RequestError
from akunu_py.serve.openai.shapes import completion_logprobs, error_body, finish_reason, usage
from akunu_py.serve.statistics import statistics


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of a reply have in common."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, choices: Sequence[Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk, or the whole."""
        common = {"id": self.id, "object": "text_completion", "created": self.created}
        return {**common, "model": self.model, "choices": choices, **extra}


class CompletionsEncoder(CommentHeartbeat):
    """The chunks of a streamed answer. Its thinking, for models that think in plain texts too, is
    apart from the text."""

    def __init__(
        self, head: Head, echoed: Sequence[str], count: int = 1, *, usage: bool = False
    ) -> None:
        """echoed: what the text of each choice begins with. count: of choices for each prompt.
        usage: whether a last chunk tells it."""
        self._head, self._echoed, self._count, self._usage = head, echoed, count, usage
        self._offsets = [len(text) for text in echoed]
        self._ended: list[Ended] = []

    def encode(self, event: Event, choice: int) -> list[bytes]:
        """See `Encoder`."""
        match event:
            case Begun() if self._echoed[choice]:
                return [self._chunk(_choice(choice, self._echoed[choice]))]
            case Text(text):
                return [self._chunk(_choice(choice, text))]
            case Thinking(text):
                return [self._chunk(_choice(choice, "", text))]
            case Logprobs(tokens):  # in a chunk of their own, before that of their text
                told = completion_logprobs(tokens, self._offsets[choice])
                self._offsets[choice] += sum(len(token.text) for token in tokens)
                return [self._chunk(_choice(choice, "") | {"logprobs": told})]
            case Ended():
                return self._end(event, choice)
            case _:
                return []

    def fail(self, error: RequestError) -> list[bytes]:
        """See `Encoder`."""
        return [sse.frame(error_body(error))]

    def _end(self, event: Ended, choice: int) -> list[bytes]:
        self._ended.append(event)
        reason = finish_reason(event, calls=False)
        frames = [self._chunk(_choice(choice, "", "", reason), {"akunu": statistics(event)})]
        if len(self._ended) < len(self._echoed):
            return frames
        if self._usage:
            told = usage(self._ended[:: self._count], self._ended)
            frames.append(sse.frame(self._head.object([], {"usage": told})))
        return [*frames, sse.DONE]

    def _chunk(self, choice: Mapping[str, Any], extra: Mapping[str, Any] = {}) -> bytes:
        none = {"usage": None} if self._usage else {}
        return sse.frame(self._head.object([choice], {**none, **extra}))


def whole_completions(
    head: Head, answers: Sequence[WholeAnswer], echoed: Sequence[str], count: int = 1
) -> dict[str, Any]:
    """The body of a reply that is not streamed; see `CompletionsEncoder`."""
    ended = [answer.ended for answer in answers if answer.ended]
    choices = [
        _choice(number, echo + answer.text, answer.thinking, finish_reason(end, calls=False))
        | {"logprobs": completion_logprobs(answer.logprobs, len(echo)) if answer.logprobs else None}
        for number, (answer, echo, end) in enumerate(zip(answers, echoed, ended, strict=True))
    ]
    extra = {"usage": usage(ended[::count], ended), "akunu": statistics(*ended)}
    return head.object(choices, extra)


def _choice(
    number: int, text: str, thinking: str = "", reason: str | None = None
) -> dict[str, Any]:
    return {
        "text": text,
        "index": number,
        "logprobs": None,
        "finish_reason": reason,
        **({"reasoning_content": thinking} if thinking else {}),
    }
