"""One conversation in every dialect: how a client asks, what it reads of the reply, and what a
plain session says."""

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
from tests.support.serving import Reply


@dataclass(frozen=True, slots=True)
class Asked:
    """turns: of the user and of the model, the user's first and last. draft: of our own clients;
    the others have that of the server."""

    turns: tuple[str, ...]
    tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    draft: DraftMode = "auto"

    @property
    def text(self) -> str:
        """For dialects without turns."""
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
class Told:
    """What a reply tells. prompt, cached, drafted: numbers of tokens."""

    text: str
    prompt: int
    cached: int
    drafted: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """A dialect. body: without whether it is streamed. read: what the values of a reply tell, of
    which there are several where it is streamed. plain: what a plain session says, without drafts.
    streams: whether that can be chosen. seeded: whether it has seeds. asks_usage: whether a stream
    tells it only where it is asked to."""

    path: str
    body: Callable[[Asked], Mapping[str, Any]]
    read: Callable[[list[dict[str, Any]]], Told]
    plain: Callable[[Asked, Engine], Told]
    streams: bool = True
    seeded: bool = True
    asks_usage: bool = False

    def asks(self, asked: Asked, *, stream: bool) -> dict[str, Any]:
        """The body of a request."""
        usage = {"stream_options": {"include_usage": True}} if self.asks_usage and stream else {}
        return {**self.body(asked), **usage, **({"stream": stream} if self.streams else {})}

    def told(self, reply: Reply) -> Told:
        """What a reply tells."""
        assert reply.status == 200, reply.body
        if reply.headers["content-type"].startswith("text/event-stream"):
            return self.read([*_data(reply.body.decode())])
        return self.read([reply.json()])


def _data(stream: str) -> Iterable[dict[str, Any]]:
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


def _run(encode: Callable[[Engine, Asked], list[int]], asked: Asked, engine: Engine) -> Told:
    """What `akunu run --draft off` says."""
    options = GenerateOptions(asked.tokens, "off", sampling=asked.sampling)
    answer = Session(engine).generate(encode(engine, asked), options).answer()
    return Told(answer.text, answer.stats.prompt_tokens, 0, 0)


def _complete(asked: Asked, engine: Engine) -> Told:
    """What `akunu complete --draft off` says."""
    completer = Completer(engine, CompleteOptions(draft="off"))
    request = CompletionRequest(
        asked.text, "\n", max_tokens=asked.tokens, temperature=asked.temperature
    )
    steps = completer.steps(completer.session, request, sampling=asked.sampling)
    while True:
        try:
            next(steps)
        except StopIteration as last:
            return Told(last.value.text, last.value.stats.prompt_tokens, 0, 0)


def _sampled(asked: Asked) -> dict[str, Any]:
    return {"temperature": asked.temperature, "seed": asked.seed}


def _limited(asked: Asked) -> dict[str, Any]:
    return _sampled(asked) | {"max_tokens": asked.tokens}


def _turns(asked: Asked) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in asked.messages]


def _openai(text: Callable[[Any], str | None], values: list[dict[str, Any]]) -> Told:
    choices = [choice for value in values for choice in value["choices"]]
    (used,) = [value["usage"] for value in values if value.get("usage")]
    return Told(
        "".join(text(choice) or "" for choice in choices),
        used["prompt_tokens"],
        used["prompt_tokens_details"]["cached_tokens"],
        _drafted(values),
    )


def _messages(values: list[dict[str, Any]]) -> Told:
    if len(values) == 1:
        begun = values[0]
        text = "".join(block["text"] for block in begun["content"])
    else:
        begun = next(value["message"] for value in values if value["type"] == "message_start")
        deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
        text = "".join(delta["text"] for delta in deltas)
    new, cached = (begun["usage"][f"{kind}input_tokens"] for kind in ("", "cache_read_"))
    return Told(text, new + cached, cached, _drafted(values))


def _responses(values: list[dict[str, Any]]) -> Told:
    response = values[-1].get("response", values[-1])
    parts = [part for item in response["output"] for part in item["content"]]
    text, used = "".join(part["text"] for part in parts), response["usage"]
    if len(values) > 1:
        deltas = [each for each in values if each["type"] == "response.output_text.delta"]
        assert "".join(each["delta"] for each in deltas) == text
    details = used["input_tokens_details"]
    return Told(text, used["input_tokens"], details["cached_tokens"], _drafted(values))


def _infill(values: list[dict[str, Any]]) -> Told:
    timings = values[-1]["timings"]
    return Told(
        "".join(value["content"] for value in values),
        timings["cache_n"] + timings["prompt_n"],
        timings["cache_n"],
        _drafted(values),
    )


def _own_chat(values: list[dict[str, Any]]) -> Told:
    stats = values[-1]["stats"]
    text = "".join(value["piece"]["piece"]["text"] for value in values if "piece" in value)
    return Told(text, stats["prompt_tokens"], stats["cached_tokens"], stats["drafted"])


def _own_complete(values: list[dict[str, Any]]) -> Told:
    done = values[-1]["completion"]
    assert "".join(value.get("text", "") for value in values) == done["text"]
    stats = done["stats"]
    return Told(done["text"], stats["prompt_tokens"], stats["cached_tokens"], stats["drafted"])


def _drafted(values: list[dict[str, Any]]) -> int:
    places = [place for value in values for place in (value, value.get("response") or {})]
    return sum(place["akunu"]["drafted"] for place in places if "akunu" in place)


def _own_request(asked: Asked) -> dict[str, Any]:
    request = CompletionRequest(asked.text, "\n", max_tokens=asked.tokens)
    return {
        "id": "1",
        "request": asdict(request),
        "options": asdict(CompleteOptions(draft=asked.draft)),
    }


_chat_run = partial(_run, lambda engine, asked: engine.tokens.encode_chat(asked.messages))
_text_run = partial(_run, lambda engine, asked: engine.tokens.encode(asked.text))

DIALECTS: dict[str, Spoken] = {
    "chat": Spoken(
        "/v1/chat/completions",
        lambda asked: {"messages": _turns(asked)} | _limited(asked),
        partial(
            _openai,
            lambda choice: (choice.get("message") or choice["delta"]).get("content"),
        ),
        _chat_run,
        asks_usage=True,
    ),
    "completions": Spoken(
        "/v1/completions",
        lambda asked: {"prompt": asked.text} | _limited(asked),
        partial(_openai, lambda choice: choice["text"]),
        _text_run,
        asks_usage=True,
    ),
    "messages": Spoken(
        "/v1/messages",
        lambda asked: {"model": "alias", "messages": _turns(asked)} | _limited(asked),
        _messages,
        _chat_run,
    ),
    "responses": Spoken(
        "/v1/responses",
        lambda asked: (
            {"model": "alias", "input": _turns(asked), "max_output_tokens": asked.tokens}
            | _sampled(asked)
        ),
        _responses,
        _chat_run,
    ),
    "infill": Spoken(
        "/infill",
        lambda asked: (
            {"input_prefix": asked.text, "input_suffix": "\n", "n_predict": asked.tokens}
            | _sampled(asked)
        ),
        _infill,
        _complete,
    ),
    "own chat": Spoken(
        "/akunu/chat",
        lambda asked: {
            "id": "1",
            "messages": [asdict(message) for message in asked.messages],
            "options": asdict(GenerateOptions(asked.tokens, asked.draft, sampling=asked.sampling)),
        },
        _own_chat,
        _chat_run,
        streams=False,
    ),
    "own complete": Spoken(
        "/akunu/complete", _own_request, _own_complete, _complete, streams=False, seeded=False
    ),
}
CONVERSATIONS = ("chat", "completions", "messages", "responses", "own chat")
