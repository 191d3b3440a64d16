"""Chat Completions: builds jobs from bodies, and chunks or replies from events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from akunu_py.decoding.events import (
    Event,
    Finished,
    Logprobs,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
    ToolCallArguments,
    ToolCallStarted,
)
from akunu_py.decoding.generate.answer_jobs import chat_job
from akunu_py.serve.dialect.interface import (
    DONE,
    CollectedAnswer,
    Encoder,
    PreparedRequest,
    frame,
    statistics,
)
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.sampling_body import (
    JSON_OBJECT,
    choice_options,
    generate_options,
    schema_constraint,
    token_limit,
)
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.dialect.thinking_plan import plan_thinking
from akunu_py.serve.openai.bodies import (
    ChatBody,
    Format,
    JsonObjectFormat,
    SchemaFormat,
    messages_of,
    tool_choice_of,
    tools_of,
)
from akunu_py.serve.openai.shapes import ReplyHead, chat_logprobs, finish_reason, usage
from akunu_py.types import Constraint, TokenLogprobs


def prepare_chat(body: ChatBody, service: Service) -> PreparedRequest:
    """Return the prepared request. Raises RequestError."""
    messages = body.check_continuation(messages_of(body.messages))
    limit = token_limit(body.max_completion_tokens or body.max_tokens, service)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "requires logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    constraint = _constraint(body.response_format)
    thinking = plan_thinking(body, service)
    options = generate_options(body, service, limit, constraint, logprobs, thinking.budget)
    tools = tools_of(body.functions_offered)
    choice = tool_choice_of(body.choice, tools)
    jobs = [
        chat_job(
            service.engine,
            messages,
            each,
            tools,
            choice,
            parallel=body.parallel_tool_calls is not False and not body.has_functions,
            predicted=body.prediction.text if body.prediction else "",
            variables=thinking.variables,
        )
        for each in choice_options(options, body.n or 1)
    ]
    head = ReplyHead(service.name, "chatcmpl")
    return PreparedRequest(
        jobs,
        lambda answers: build_chat_completion(head, answers, old=body.has_functions),
        shows_thinking=thinking.shown,
    )


def chat_encoder(body: ChatBody, name: str) -> ChatEncoder:
    """Return the encoder of a streamed reply. name: the model's."""
    head, usage = ReplyHead(name, "chatcmpl"), body.includes_usage
    return ChatEncoder(head, body.n or 1, usage=usage, old=body.has_functions)


def _constraint(format: Format | None) -> Constraint | None:
    if isinstance(format, SchemaFormat):
        return schema_constraint(format.json_schema.json_schema)
    return JSON_OBJECT if isinstance(format, JsonObjectFormat) else None


class ChatEncoder(Encoder):
    """Encodes a stream of chunks; the first chunk of each choice has the role."""

    def __init__(
        self, head: ReplyHead, count: int = 1, *, usage: bool = False, old: bool = False
    ) -> None:
        """count: number of choices. usage: send the usage in the last chunk.

        old: calls have OpenAI's older form, `function_call`.
        """
        self._old = old
        self._head, self._count, self._usage = head, count, usage
        self._calls = [0] * count
        self._has_role = [False] * count
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._finished: list[Finished] = []
        self._kind: dict[str, Any] = {"content": ""}  # an empty delta like the last one
        self._choice = 0  # the last one

    def heartbeat(self) -> bytes:
        """Return an empty delta: clients do not count comments as progress."""
        choice = self._choice
        return b"".join(self._start(choice) or [self._chunk(choice, self._kind)])

    def encode(self, event: Event, choice: int) -> list[bytes]:
        if isinstance(event, Finished):
            return self._end(event, choice)
        if isinstance(event, Logprobs):
            self._logprobs[choice] += event.tokens
            return []
        delta = self._delta(event, choice)
        if delta is None:
            return []
        self._choice = choice
        if "function_call" in delta:
            self._kind = {"function_call": {"arguments": ""}}
        elif "tool_calls" in delta:
            call = {"index": self._calls[choice] - 1, "function": {"arguments": ""}}
            self._kind = {"tool_calls": [call]}
        elif delta:
            self._kind = dict.fromkeys(delta, "")
        return [*self._start(choice), self._chunk(choice, delta)] if delta else self._start(choice)

    def _delta(self, event: Event, choice: int) -> dict[str, Any] | None:
        """Return the delta of an event: {} for PromptProcessed, None for events without a delta."""
        match event:
            case PromptProcessed():
                return {}
            case TextDelta(text):
                return {"content": text}
            case ThinkingDelta(text):
                return {"reasoning_content": text}
            case ToolCallStarted(id, name):
                self._calls[choice] += 1
                function = {"name": name, "arguments": ""}
                more = {"id": id, "type": "function", "function": function}
            case ToolCallArguments(text):
                more = {"function": {"arguments": text}}
            case _:
                return None
        if self._old:
            return {"function_call": more["function"]}
        return {"tool_calls": [{"index": self._calls[choice] - 1, **more}]}

    def _start(self, choice: int) -> list[bytes]:
        """Return the first chunk of a choice, with the role; nothing if it was sent."""
        if self._has_role[choice]:
            return []
        self._has_role[choice] = True
        return [self._chunk(choice, {"role": "assistant", "content": ""})]

    def _end(self, event: Finished, choice: int) -> list[bytes]:
        self._finished.append(event)
        self._choice, self._kind = min(choice + 1, self._count - 1), {"content": ""}
        reason = finish_reason(event, calls=self._calls[choice] > 0, old=self._old)
        extra = {"akunu": statistics(event)}
        frames = [*self._start(choice), self._chunk(choice, {}, reason, extra)]
        if len(self._finished) < self._count:
            return frames
        if self._usage:
            frames.append(self._frame([], {"usage": usage(self._finished[:1], self._finished)}))
        return [*frames, DONE]

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
        return frame(self._head.object("chat.completion.chunk", choices, **extra))


def build_chat_completion(
    head: ReplyHead, answers: Sequence[CollectedAnswer], *, old: bool = False
) -> dict[str, Any]:
    """Return the body of a reply that is not streamed. old: as in `ChatEncoder`."""
    finished = [answer.finished for answer in answers if answer.finished]
    return head.object(
        "chat.completion",
        [_choice(number, answer, old=old) for number, answer in enumerate(answers)],
        usage=usage(finished[:1], finished),
        akunu=statistics(*finished),
    )


def _choice(index: int, answer: CollectedAnswer, *, old: bool) -> dict[str, Any]:
    """Return one entry of `choices`. old: with `function_call` instead of `tool_calls`."""
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
        **({"tool_calls": calls} if calls and not old else {}),
        **({"function_call": calls[0]["function"]} if calls and old else {}),
    }
    assert answer.finished is not None
    reason = finish_reason(answer.finished, calls=bool(calls), old=old)
    logprobs = chat_logprobs(answer.logprobs) if answer.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
