"""The same request in every dialect: its body, its parsed reply, and the expected reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from akunu_py.completion.completer import Completer
from akunu_py.completion.request import CompleteOptions, CompletionRequest
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import DraftMode, GenerateOptions, Message, SamplingOptions
from tests.support.complete import complete
from tests.support.serving import Reply


@dataclass(frozen=True, slots=True)
class DialectRequest:
    """A request, independent of the dialect."""

    turns: tuple[str, ...]  # user, assistant, ..., user
    tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    draft: DraftMode = "auto"  # only akunu's own clients set it

    @property
    def text(self) -> str:
        """The prompt of dialects without turns."""
        return "".join(self.turns)

    @property
    def messages(self) -> list[Message]:
        return [
            Message("assistant" if number % 2 else "user", text)
            for number, text in enumerate(self.turns)
        ]

    @property
    def sampling(self) -> SamplingOptions:
        return SamplingOptions(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class ReplyData:
    """The parts of a reply that all dialects have."""

    text: str
    prompt: int  # tokens
    cached: int  # tokens
    drafted: int  # tokens


@dataclass(frozen=True, slots=True)
class DialectClient:
    """A client of one dialect."""

    path: str
    body: Callable[[DialectRequest], Mapping[str, Any]]  # without `stream`
    collect: Callable[[list[dict[str, Any]]], ReplyData]  # from one JSON reply, or all frames
    expected: Callable[[DialectRequest, Engine], ReplyData]  # from a session without drafts
    streams: bool = True  # the body may set `stream`
    seeded: bool = True  # the body may set a seed
    requests_usage: bool = False  # a stream has usage only if the body requests it

    def request_body(self, request: DialectRequest, *, stream: bool) -> dict[str, Any]:
        """Return the body of a request."""
        usage = (
            {"stream_options": {"include_usage": True}} if self.requests_usage and stream else {}
        )
        return {**self.body(request), **usage, **({"stream": stream} if self.streams else {})}

    def parse(self, reply: Reply) -> ReplyData:
        """Parse a reply, streamed or not."""
        assert reply.status == 200, reply.body
        if reply.headers["content-type"].startswith("text/event-stream"):
            return self.collect([*_data(reply.body.decode())])
        if reply.headers["content-type"] == "application/x-ndjson":
            return self.collect([json.loads(line) for line in reply.body.splitlines()])
        return self.collect([reply.json()])


def _data(stream: str) -> Iterable[dict[str, Any]]:
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


def _run(
    encode: Callable[[Engine, DialectRequest], list[int]], request: DialectRequest, engine: Engine
) -> ReplyData:
    """Return the reply of `akunu run --draft off`."""
    options = GenerateOptions(request.tokens, "off", sampling=request.sampling)
    answer = Session(engine).generate(encode(engine, request), options).answer()
    return ReplyData(answer.text, answer.stats.prompt_tokens, 0, 0)


def _complete(request: DialectRequest, engine: Engine) -> ReplyData:
    """Return the reply of `akunu complete --draft off`."""
    completer = Completer(engine, CompleteOptions(draft="off"))
    completion = CompletionRequest(
        request.text, "\n", max_tokens=request.tokens, temperature=request.temperature
    )
    done = complete(completer, completion, sampling=request.sampling)
    return ReplyData(done.text, done.stats.prompt_tokens, 0, 0)


def _sampling_fields(request: DialectRequest) -> dict[str, Any]:
    return {"temperature": request.temperature, "seed": request.seed}


def _ollama_options(request: DialectRequest) -> dict[str, Any]:
    return _sampling_fields(request) | {"num_predict": request.tokens}


def _limit_fields(request: DialectRequest) -> dict[str, Any]:
    return _sampling_fields(request) | {"max_tokens": request.tokens}


def _turns(request: DialectRequest) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in request.messages]


def _openai(text: Callable[[Any], str | None], values: list[dict[str, Any]]) -> ReplyData:
    choices = [choice for value in values for choice in value["choices"]]
    (usage,) = [value["usage"] for value in values if value.get("usage")]
    return ReplyData(
        "".join(text(choice) or "" for choice in choices),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        _drafted(values),
    )


def _messages(values: list[dict[str, Any]]) -> ReplyData:
    if len(values) == 1:
        message = values[0]
        text = "".join(block["text"] for block in message["content"])
    else:
        message = next(value["message"] for value in values if value["type"] == "message_start")
        deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
        text = "".join(delta["text"] for delta in deltas)
    new, cached = (message["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_"))
    return ReplyData(text, new + cached, cached, _drafted(values))


def _responses(values: list[dict[str, Any]]) -> ReplyData:
    response = values[-1].get("response", values[-1])
    parts = [part for item in response["output"] for part in item["content"]]
    text, usage = "".join(part["text"] for part in parts), response["usage"]
    if len(values) > 1:
        deltas = [each for each in values if each["type"] == "response.output_text.delta"]
        assert "".join(each["delta"] for each in deltas) == text
    details = usage["input_tokens_details"]
    return ReplyData(text, usage["input_tokens"], details["cached_tokens"], _drafted(values))


def _infill(values: list[dict[str, Any]]) -> ReplyData:
    timings = values[-1]["timings"]
    return ReplyData(
        "".join(value["content"] for value in values),
        timings["cache_n"] + timings["prompt_n"],
        timings["cache_n"],
        _drafted(values),
    )


def _ollama(values: list[dict[str, Any]]) -> ReplyData:
    text = "".join(
        value["message"]["content"] if "message" in value else value["response"] for value in values
    )
    end = values[-1]
    assert [value["done"] for value in values] == [False] * (len(values) - 1) + [True]
    return ReplyData(
        text, end["prompt_eval_count"], end["akunu"]["cached_tokens"], _drafted(values)
    )


def _akunu_chat(values: list[dict[str, Any]]) -> ReplyData:
    stats = values[-1]["stats"]
    pieces = [value["AnnotatedPiece"] for value in values if "AnnotatedPiece" in value]
    text = "".join(each["piece"]["text"] for each in pieces)
    return ReplyData(text, stats["prompt_tokens"], stats["cached_tokens"], stats["drafted"])


def _akunu_complete(values: list[dict[str, Any]]) -> ReplyData:
    done = values[-1]["Completion"]
    deltas = [value["TextDelta"]["text"] for value in values if "TextDelta" in value]
    assert "".join(deltas) == done["text"]
    stats = done["stats"]
    return ReplyData(done["text"], stats["prompt_tokens"], stats["cached_tokens"], stats["drafted"])


def _drafted(values: list[dict[str, Any]]) -> int:
    places = [place for value in values for place in (value, value.get("response") or {})]
    return sum(place["akunu"]["drafted"] for place in places if "akunu" in place)


def _akunu_complete_body(request: DialectRequest) -> dict[str, Any]:
    completion = CompletionRequest(request.text, "\n", max_tokens=request.tokens)
    return {
        "id": "1",
        "request": asdict(completion),
        "options": asdict(CompleteOptions(draft=request.draft)),
    }


_chat_run = partial(_run, lambda engine, request: engine.tokens.encode_chat(request.messages))
_text_run = partial(_run, lambda engine, request: engine.tokens.encode(request.text))

DIALECTS: dict[str, DialectClient] = {
    "chat": DialectClient(
        "/v1/chat/completions",
        lambda request: {"messages": _turns(request)} | _limit_fields(request),
        partial(
            _openai,
            lambda choice: (choice.get("message") or choice["delta"]).get("content"),
        ),
        _chat_run,
        requests_usage=True,
    ),
    "completions": DialectClient(
        "/v1/completions",
        lambda request: {"prompt": request.text} | _limit_fields(request),
        partial(_openai, lambda choice: choice["text"]),
        _text_run,
        requests_usage=True,
    ),
    "messages": DialectClient(
        "/v1/messages",
        lambda request: {"model": "alias", "messages": _turns(request)} | _limit_fields(request),
        _messages,
        _chat_run,
    ),
    "responses": DialectClient(
        "/v1/responses",
        lambda request: (
            {"model": "alias", "input": _turns(request), "max_output_tokens": request.tokens}
            | _sampling_fields(request)
        ),
        _responses,
        _chat_run,
    ),
    "infill": DialectClient(
        "/infill",
        lambda request: (
            {"input_prefix": request.text, "input_suffix": "\n", "n_predict": request.tokens}
            | _sampling_fields(request)
        ),
        _infill,
        _complete,
    ),
    "ollama chat": DialectClient(
        "/api/chat",
        lambda request: {"messages": _turns(request), "options": _ollama_options(request)},
        _ollama,
        _chat_run,
    ),
    "ollama generate": DialectClient(
        "/api/generate",
        lambda request: {
            "prompt": request.text,
            "raw": True,
            "options": _ollama_options(request),
        },
        _ollama,
        _text_run,
    ),
    "own chat": DialectClient(
        "/akunu/chat",
        lambda request: {
            "id": "1",
            "messages": [asdict(message) for message in request.messages],
            "options": asdict(
                GenerateOptions(request.tokens, request.draft, sampling=request.sampling)
            ),
        },
        _akunu_chat,
        _chat_run,
        streams=False,
    ),
    "own complete": DialectClient(
        "/akunu/complete",
        _akunu_complete_body,
        _akunu_complete,
        _complete,
        streams=False,
        seeded=False,
    ),
}
CONVERSATIONS = ("chat", "completions", "messages", "responses", "ollama chat", "own chat")
