"""The same request in every dialect: its body, the reply that a client accumulates from a stream,
the parts of a reply that all dialects have, and the expected reply."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompleteOptions, CompletionRequest
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.types import DraftMode, GenerateOptions, Message, SamplingOptions
from tests.support.complete import complete
from tests.support.serving import Reply

Value = dict[str, Any]


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
    cached: int = 0  # tokens
    generated: int = 0  # tokens
    drafted: int = 0  # tokens
    reason: str | None = None  # why the answer ended, in the dialect's words
    thinking: str = ""
    calls: tuple[tuple[str, Any], ...] = ()  # names of tools and arguments


@dataclass(frozen=True, slots=True)
class DialectClient:
    """A client of one dialect."""

    path: str
    body: Callable[[DialectRequest], Mapping[str, Any]]  # without `stream`
    accumulate: Callable[[list[Value]], Value]  # the reply that is not streamed, from a stream
    data: Callable[[Value], ReplyData]  # of a reply that is not streamed
    expected: Callable[[DialectRequest, Engine], ReplyData]  # from a loop without drafts
    streams: bool = True  # the body may set `stream`
    seeded: bool = True  # the body may set a seed
    requests_usage: bool = False  # a stream has usage only if the body requests it

    def request_body(self, request: DialectRequest, *, stream: bool) -> Value:
        """Return the body of a request."""
        body = {**self.body(request)} | ({"stream": stream} if self.streams else {})
        if self.requests_usage and stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def whole(self, reply: Reply) -> Value:
        """Return the body of a reply, accumulated if it is streamed."""
        assert reply.status == 200, reply.body
        values = reply.values()
        is_stream = reply.headers["content-type"] != "application/json"
        return self.accumulate(values) if is_stream else values[0]

    def parse(self, reply: Reply) -> ReplyData:
        """Parse a reply, streamed or not."""
        return self.data(self.whole(reply))


CHANGING = {"id", "created", "created_at", "completed_at", "total_duration", "akunu"}


def stable(value: Any, *changing: str) -> Any:
    """Return a reply without times, ids except those of tool calls, and `changing` members."""
    if isinstance(value, dict):
        is_call = value.get("type") in ("function", "tool_use")
        dropped = CHANGING.union(changing) - ({"id"} if is_call else set())
        kept = {name: each for name, each in value.items() if name not in dropped}
        return {name: stable(each, *changing) for name, each in kept.items()}
    return [stable(each, *changing) for each in value] if isinstance(value, list) else value


def accumulate_chat(chunks: list[Value]) -> Value:
    """Accumulate as `openai.lib.streaming` does: the role comes first, the finish reason last."""
    choices: list[Value] = []
    reply: Value = {"object": "chat.completion", "choices": choices}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        reply |= {name: chunk[name] for name in ("id", "created", "model")}
        reply |= {name: chunk[name] for name in ("akunu", "usage") if chunk.get(name)}
        assert ("usage" not in chunk) or (chunk["usage"] is None) == bool(chunk["choices"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice["index"] == len(choices):
                assert delta == {"role": "assistant", "content": ""}
                message = {**delta, "reasoning_content": "", "tool_calls": [], "refusal": None}
                empty: Value = {"content": [], "refusal": None}
                choices.append({"index": len(choices), "message": message, "logprobs": empty})
            whole = choices[choice["index"]]
            assert "finish_reason" not in whole
            message = whole["message"]
            whole["logprobs"]["content"] += (choice["logprobs"] or {"content": []})["content"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(copy.deepcopy(call))
                else:
                    known = message["tool_calls"][call["index"]]["function"]
                    known["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                whole["finish_reason"] = choice["finish_reason"]
    for choice in choices:
        message = choice["message"]
        for call in message["tool_calls"]:
            del call["index"]
        if message["tool_calls"] and not message["content"]:
            message["content"] = None
        for name in ("tool_calls", "reasoning_content"):
            if not message[name]:
                del message[name]
        choice["logprobs"] = choice["logprobs"] if choice["logprobs"]["content"] else None
    return reply


def accumulate_completions(chunks: list[Value]) -> Value:
    choices: dict[int, Value] = {}
    reply = {name: chunks[0][name] for name in ("id", "object", "created", "model")}
    for chunk in chunks:
        reply |= {name: chunk[name] for name in ("akunu", "usage") if chunk.get(name)}
        for choice in chunk["choices"]:
            empty = {"text": "", "reasoning_content": "", "logprobs": None}
            whole = choices.setdefault(choice["index"], empty)
            assert "finish_reason" not in whole
            for name in ("text", "reasoning_content"):
                whole[name] += choice.get(name, "")
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                whole["logprobs"].setdefault(name, []).extend(values)
            if choice["finish_reason"]:
                whole |= {"finish_reason": choice["finish_reason"], "index": choice["index"]}
    for whole in choices.values():
        if not whole["reasoning_content"]:
            del whole["reasoning_content"]
    return reply | {"choices": [*choices.values()]}


def accumulate_messages(events: list[Value]) -> Value:
    """Accumulate a message as `anthropic.lib.streaming` does.

    Nothing before message_start or after message_stop, one open block, deltas of its type. Blocks
    that heartbeats opened and left empty are dropped.
    """
    message: Value = {}
    block: Value = {}
    kinds = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    is_open = stopped = False
    for event in events:
        assert not stopped
        kind = event["type"].removeprefix("content_block_")
        if kind == "message_start":
            assert not message
            message = event["message"]
        elif kind == "start":
            assert not is_open
            assert event["index"] == len(message["content"])
            is_open, arguments, block = True, "", event["content_block"]
            message["content"].append(block)
        elif kind == "delta":
            assert is_open
            delta, text = event["delta"].values()
            if delta == "signature_delta":
                block["signature"] = text
                continue
            assert delta == kinds[block["type"]]
            if "input" in block:
                arguments += text
            else:
                block[block["type"]] += text
        elif kind == "stop":
            is_open = False
            block |= {"input": json.loads(arguments or "{}")} if "input" in block else {}
        elif kind == "message_delta":
            assert not is_open
            message |= event["delta"] | {"akunu": event["akunu"]}
            message["usage"] |= event["usage"]
        else:
            assert kind in ("ping", "message_stop")
            stopped = kind == "message_stop"
    assert stopped
    message["content"] = [
        block for block in message["content"] if block.get("text", block.get("thinking")) != ""
    ]
    return message


def accumulate_responses(events: list[Value]) -> Value:
    """Return the last response, which equals the deltas and the texts of the ends of items."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    output: list[Value] = copy.deepcopy(events[0]["response"]["output"])
    added: list[str] = []
    for event in events[2:-1]:
        what = event["type"].removeprefix("response.")
        if what == "in_progress":
            continue
        index = event["output_index"]
        if what == "output_item.added":
            assert index == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append(event["item"])
            added.append("")
            continue
        item = output[index]
        assert index == len(output) - 1
        assert item["id"] == event.get("item_id", item["id"])
        if what == "output_item.done":
            assert _item_text(event["item"]) == added[index]
            output[index] = event["item"]
        elif what == "content_part.added":
            assert event["part"]["text"] == ""
            item["content"].append(event["part"])
        elif what == "content_part.done":
            assert event["part"]["text"] == added[index]
        elif what.endswith(".delta"):
            assert event["delta"]
            added[index] += event["delta"]
        else:
            assert what.endswith(".done")
            name = "text" if "text" in event else "input" if "input" in event else "arguments"
            assert event[name] == added[index]
    last: Value = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == output
    return last


def _item_text(item: Value) -> str:
    texts = (part["text"] for part in item.get("content", ()))
    return "".join(texts) or str(item.get("input", item.get("arguments", "")))


def accumulate_ollama(lines: list[Value]) -> Value:
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    found: Value = {"thinking": "", "tool_calls": [], "content": "", "response": ""}
    logprobs: list[Any] = []
    for line in lines:
        part = line.get("message", line)
        found = {name: found[name] + part.get(name, type(found[name])()) for name in found}
        logprobs += line.get("logprobs", [])
    is_chat = "message" in lines[-1]
    del found["response" if is_chat else "content"]
    kept = {name: value for name, value in found.items() if value or name in lines[-1]}
    whole = lines[-1] | ({"logprobs": logprobs} if logprobs else {})
    if not is_chat:
        return whole | kept
    return whole | {"message": {"role": "assistant", "content": ""} | kept}


def accumulate_infill(values: list[Value]) -> Value:
    assert [value["stop"] for value in values] == [False] * (len(values) - 1) + [True]
    text = "".join(value["content"] for value in values)
    return values[-1] | {"content": text, "has_new_line": "\n" in text}


def _accumulate_own_chat(values: list[Value]) -> Value:
    pieces = [value["TextDelta"] for value in values if "TextDelta" in value]
    end: Value = values[-1]["Finished"]
    return end | {"text": "".join(each["text"] for each in pieces)}


def _accumulate_own_completion(values: list[Value]) -> Value:
    deltas = [value["TextDelta"]["text"] for value in values if "TextDelta" in value]
    done: Value = values[-1]["Completion"]
    assert "".join(deltas) == done["text"]
    return done


def _openai_data(reply: Value) -> ReplyData:
    choice, usage = reply["choices"][0], reply["usage"]
    message = choice.get("message", choice)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return ReplyData(
        message.get("text", message.get("content")) or "", usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"],
        reply["akunu"]["drafted"], choice["finish_reason"], message.get("reasoning_content", ""),
        tuple((call["name"], json.loads(call["arguments"])) for call in calls),
    )  # fmt: skip


def _messages_data(message: Value) -> ReplyData:
    blocks, usage = message["content"], message["usage"]
    new, cached = (usage[f"{kind}input_tokens"] for kind in ("", "cache_read_"))
    return ReplyData(
        "".join(block["text"] for block in blocks if block["type"] == "text"), new + cached,
        cached, usage["output_tokens"], message["akunu"]["drafted"], message["stop_reason"],
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        tuple((each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"),
    )  # fmt: skip


def _responses_data(response: Value) -> ReplyData:
    usage, texts = response["usage"], {"message": "", "reasoning": ""}
    for item in response["output"]:
        if item["type"] in texts:
            texts[item["type"]] += _item_text(item)
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    details = response["incomplete_details"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return ReplyData(
        texts["message"], usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"], response["akunu"]["drafted"],
        details["reason"] if details else response["status"], texts["reasoning"],
        tuple((call["name"], json.loads(call["arguments"])) for call in calls),
    )  # fmt: skip


def _ollama_data(line: Value) -> ReplyData:
    message = line.get("message", line)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return ReplyData(
        message["content" if "message" in line else "response"], line["prompt_eval_count"],
        line["akunu"]["cached_tokens"], line["eval_count"], line["akunu"]["drafted"],
        line["done_reason"], message.get("thinking", ""),
        tuple((call["name"], call["arguments"]) for call in calls),
    )  # fmt: skip


def _infill_data(reply: Value) -> ReplyData:
    timings = reply["timings"]
    assert reply["tokens_evaluated"] == timings["cache_n"] + timings["prompt_n"]
    return ReplyData(
        reply["content"], reply["tokens_evaluated"], timings["cache_n"], reply["tokens_predicted"],
        reply["akunu"]["drafted"], reply["stop_type"],
    )  # fmt: skip


def _own_data(reply: Value) -> ReplyData:
    names = ("prompt_tokens", "cached_tokens", "generated_tokens", "drafted")
    return ReplyData(reply["text"], *(reply["stats"][name] for name in names))


def _run(
    encode: Callable[[Engine, DialectRequest], list[int]], request: DialectRequest, engine: Engine
) -> ReplyData:
    """Return the reply of `akunu run --draft off`."""
    options = GenerateOptions(request.tokens, "off", sampling=request.sampling)
    answer = StepLoop(engine).answer(encode(engine, request), options)
    return ReplyData(answer.text, answer.stats.prompt_tokens, generated=len(answer.tokens))


def _complete(request: DialectRequest, engine: Engine) -> ReplyData:
    """Return the reply of `akunu complete --draft off`."""
    completer = Completer(engine, CompleteOptions(draft="off"))
    completion = CompletionRequest(
        request.text, "\n", max_tokens=request.tokens, temperature=request.temperature
    )
    done = complete(completer, completion, sampling=request.sampling)
    return ReplyData(done.text, done.stats.prompt_tokens, generated=done.stats.generated_tokens)


def _limits(request: DialectRequest, limit: str = "max_tokens") -> Value:
    return {"temperature": request.temperature, "seed": request.seed, limit: request.tokens}


def _turns(request: DialectRequest) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in request.messages]


_chat_run = partial(_run, lambda engine, request: engine.tokens.encode_chat(request.messages))
_text_run = partial(_run, lambda engine, request: engine.tokens.encode(request.text))

DIALECTS: dict[str, DialectClient] = {
    "chat": DialectClient(
        "/v1/chat/completions", lambda request: {"messages": _turns(request)} | _limits(request),
        accumulate_chat, _openai_data, _chat_run, requests_usage=True),
    "completions": DialectClient(
        "/v1/completions", lambda request: {"prompt": request.text} | _limits(request),
        accumulate_completions, _openai_data, _text_run, requests_usage=True),
    "messages": DialectClient(
        "/v1/messages",
        lambda request: {"model": "alias", "messages": _turns(request)} | _limits(request),
        accumulate_messages, _messages_data, _chat_run),
    "responses": DialectClient(
        "/v1/responses",
        lambda request: {"model": "alias", "input": _turns(request)}
        | _limits(request, "max_output_tokens"),
        accumulate_responses, _responses_data, _chat_run),
    "infill": DialectClient(
        "/infill",
        lambda request: {"input_prefix": request.text, "input_suffix": "\n"}
        | _limits(request, "n_predict"),
        accumulate_infill, _infill_data, _complete),
    "ollama chat": DialectClient(
        "/api/chat",
        lambda request: {"messages": _turns(request), "options": _limits(request, "num_predict")},
        accumulate_ollama, _ollama_data, _chat_run),
    "ollama generate": DialectClient(
        "/api/generate",
        lambda request: {"prompt": request.text, "raw": True,
                         "options": _limits(request, "num_predict")},
        accumulate_ollama, _ollama_data, _text_run),
    "own chat": DialectClient(
        "/akunu/chat",
        lambda request: {"id": "1", "messages": [*map(asdict, request.messages)], "options": asdict(
            GenerateOptions(request.tokens, request.draft, sampling=request.sampling))},
        _accumulate_own_chat, _own_data, _chat_run, streams=False),
    "own complete": DialectClient(
        "/akunu/complete",
        lambda request: {
            "id": "1", "options": asdict(CompleteOptions(draft=request.draft)),
            "request": asdict(CompletionRequest(request.text, "\n", max_tokens=request.tokens))},
        _accumulate_own_completion, _own_data, _complete, streams=False, seeded=False),
}  # fmt: skip
CONVERSATIONS = ("chat", "completions", "messages", "responses", "ollama chat", "own chat")
