"""Ollama's API: the lines of a stream add up to the whole reply, and say what the request asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from akunu_py.decoding.events import Event
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.ollama import (
    OllamaChatBody,
    OllamaEncoder,
    OllamaHead,
    build_answer,
    messages_of,
)
from tests.support.serve_events import answers, collect_answer
from tests.support.serving import Reply, Served, ask

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "x"}
LOOK = {"name": "look", "arguments": {"at": "x"}}


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    return [json.loads(line) for line in reply.body.splitlines()]


@settings(max_examples=24)
@given(answers())
def test_lines_add_up_to_the_reply(events: list[Event]) -> None:
    """With heartbeats between the lines, in the form of both endpoints."""
    for head in (OllamaHead("tiny", chat=True), OllamaHead("tiny", chat=False)):
        encoder = OllamaEncoder(head)
        frames = [frame for event in events for frame in encoder.encode(event, 0)]
        whole = build_answer(head, collect_answer(events))
        last = json.loads(frames[-1])
        found: dict[str, Any] = {"text": "", "thinking": "", "tool_calls": [], "logprobs": []}
        for frame in [encoder.heartbeat(), *frames]:
            assert frame.endswith(b"\n")
            line = json.loads(frame)
            part = line["message"] if head.chat else line
            found["text"] += part["content" if head.chat else "response"]
            found["thinking"] += part.get("thinking", "")
            found["tool_calls"] += part.get("tool_calls", [])
            found["logprobs"] += line.get("logprobs", [])
        part = whole["message"] if head.chat else whole
        assert found["text"] == part["content" if head.chat else "response"]
        assert found["thinking"] == part.get("thinking", "")
        assert found["logprobs"] == whole.get("logprobs", [])
        if head.chat:
            assert found["tool_calls"] == part.get("tool_calls", [])
        for name in ("done", "done_reason", "prompt_eval_count", "eval_count"):
            assert last[name] == whole[name]


async def test_options_formats_and_limits(tiny: Served) -> None:
    body = {"model": "alias", "messages": [USER], "options": {"num_predict": 3, "num_ctx": 64}}
    reply = await ask(tiny.app, CHAT, body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.headers["x-akunu-ignored"] == "options.num_ctx"
    found = lines(reply)
    assert (found[-1]["done_reason"], found[-1]["eval_count"]) == ("length", 3)
    schema = {"enum": ["yes", "no"]}
    more = {"format": schema, "stream": False, "options": {"num_predict": -1}}
    answer = (await ask(tiny.app, CHAT, body | more)).json()
    assert json.loads(answer["message"]["content"]) in ("yes", "no")
    assert answer["done_reason"] == "stop"
    top = {"logprobs": True, "top_logprobs": 2, "stream": False}
    answer = (await ask(tiny.app, GENERATE, {"prompt": "x"} | top)).json()
    assert len(answer["logprobs"]) == answer["eval_count"]
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2


async def test_requests_without_a_prompt_load_the_model(tiny: Served) -> None:
    for path in (CHAT, GENERATE):
        reply = (await ask(tiny.app, path, {"model": "alias", "keep_alive": 0})).json()
        assert (reply["done"], reply["done_reason"]) == (True, "load")


async def test_lists_of_models(tiny: Served) -> None:
    name = tiny.model.name
    for path in ("/api/tags", "/api/ps"):
        tiny.model.service()
        assert [each["model"] for each in (await ask(tiny.app, path)).json()["models"]] == [name]
    shown = (await ask(tiny.app, "/api/show", {"model": name})).json()
    assert shown["model_info"]["mlx.context_length"] == 4096
    assert "version" in (await ask(tiny.app, "/api/version")).json()


def test_results_of_tools_belong_to_their_calls() -> None:
    """By name, and in order where names are missing; images become a line."""
    calls = [{"function": LOOK | {"name": name}} for name in ("look", "find", "look")]
    results = [{"role": "tool", "content": "1", "tool_name": "find"}]
    results += [{"role": "tool", "content": each} for each in "23"]
    asked = USER | {"images": ["aaaa" * 999]}
    body = {"messages": [asked, {"role": "assistant", "tool_calls": calls}, *results]}
    user, call, *found = messages_of(OllamaChatBody.model_validate(body).messages)
    assert user.content == "[image, 3 kB: this model reads text only]\nx"
    ids = [each.id for each in call.tool_calls]
    assert [each.tool_call_id for each in found] == [ids[1], ids[0], ids[2]]
    assert [each.name for each in found] == ["find", "look", "look"]
    with pytest.raises(RequestError, match="expected a call"):
        messages_of(OllamaChatBody.model_validate({"messages": results}).messages)


@pytest.mark.parametrize(
    ("path", "more", "names"),
    [
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {"messages": [USER], "options": {"num_predict": -3}}, "num_predict"),
        (CHAT, {"messages": [USER], "format": "xml"}, "format"),
        (CHAT, {"messages": [USER], "think": "maybe"}, "think"),
        (GENERATE, {"prompt": 1}, "prompt"),
        ("/api/embed", {"input": "x"}, "--embedding-model"),
    ],
)
async def test_errors_are_one_line(
    tiny: Served, path: str, more: dict[str, Any], names: str
) -> None:
    reply = await ask(tiny.app, path, more)
    assert reply.status in (400, 404)
    assert names in reply.json()["error"]
