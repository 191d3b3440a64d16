"""Fields that are unknown, or known from other servers: what they do, and how they are named."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp

from akunu_py.serve.dialect.bodies import parse
from akunu_py.serve.dialect.interface import Endpoint
from akunu_py.serve.http.asgi import DIALECTS, IGNORED_HEADER, create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from tests.support.serving import Reply, Served, ask

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, INFILL, OLLAMA = "/v1/responses", "/infill", "/api/chat"
USER = {"role": "user", "content": "hello"}
LOOK = {"name": "look", "description": "d", "parameters": {"type": "object"}}
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "seen"}]},
            USER],
        "tools": [{"type": "function", "function": LOOK}],
        "response_format": {"type": "text"}, "thinking": {"type": "enabled"},
        "structured_outputs": {"choice": ["yes", "no"]}, "reasoning": {"effort": "low"},
        "prediction": {"type": "content", "content": [{"type": "text", "text": "p"}]},
        "max_tokens": 4, "tool_choice": "none",
    },
    COMPLETIONS: {"prompt": ["abc", "de"], "max_tokens": 4},
    MESSAGES: {
        "model": "alias", "max_tokens": 4, "system": [{"type": "text", "text": "s"}],
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [
                    {"type": "text", "text": "seen"}]},
                {"type": "text", "text": "and?"}]}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"}, "thinking": {"type": "enabled", "budget_tokens": 9},
        "output_config": {"effort": "low"}, "context_management": {"edits": [
            {"type": "clear_thinking_20251015"}]},
    },
    RESPONSES: {
        "model": "alias", "max_output_tokens": 4, "tools": [{"type": "function", "name": "look"}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [
                {"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [
                {"type": "input_text", "text": "seen"}]}],
        "text": {"format": {"type": "text"}}, "tool_choice": "none",
    },
    OLLAMA: {
        "messages": [USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "look", "arguments": {}}}]}, {"role": "tool", "content": "x"}],
        "tools": [{"type": "function", "function": LOOK}], "stream": False,
        "options": {"num_predict": 1, "temperature": 0.0},
    },
    INFILL: {"input_prefix": "def f(", "input_extra": [{"filename": "a.py", "text": "x = 1"}],
             "n_predict": 2},
}  # fmt: skip
# Below these fields clients send anything; it reaches the model, or is copied to the reply.
FREE = {"parameters", "input_schema", "arguments", "metadata", "chat_template_kwargs"}
ENDPOINTS: dict[str, Endpoint] = {each.path: each for one in DIALECTS for each in one.endpoints}


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a body, those in lists too."""
    if isinstance(value, dict):
        yield value
        is_call = value.get("type") == "tool_use"
        for name, inner in value.items():
            if name not in FREE and not (is_call and name == "input"):
                yield from objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner)


def with_more(body: dict[str, Any], choose: random.Random) -> tuple[dict[str, Any], int]:
    """Return a body with unknown members at some places, and their number."""
    body = copy.deepcopy(body)
    places = list(objects(body))
    chosen = choose.sample(places, choose.randint(1, min(4, len(places))))
    values = [None, 0, 2.5, True, "x", "\x00é😀", [], {}, [{"type": "text"}], {"type": {"a": [1]}}]
    for place in chosen:
        name = choose.choice(["x_", "é", "", "0", "str", "list[Part]", "a.b", "X" * 200])
        place[f"{name}{choose.randint(0, 99)}"] = copy.deepcopy(choose.choice(values))
    return body, len(chosen)


@pytest.mark.parametrize("path", WHOLE)
def test_unknown_members_change_nothing_that_is_parsed(path: str) -> None:
    """1,000 bodies in all dialects with members at every depth equal the body without them."""
    choose, kind = random.Random(path), ENDPOINTS[path].body
    expected = parse(json.dumps(WHOLE[path]).encode(), kind)
    assert not expected.ignored
    for _ in range(200):
        body, count = with_more(WHOLE[path], choose)
        found = parse(json.dumps(body).encode(), kind)
        assert found.model_dump() == expected.model_dump()
        assert 1 <= len(found.ignored) <= count
        with pytest.raises(Exception, match="unsupported parameter"):
            parse(json.dumps(body).encode(), kind, strict=True)


def answer(reply: Reply) -> Any:
    """Return the parts of a reply that do not differ from one run to the next."""
    assert reply.status == 200, reply.body
    value = reply.json()
    if "stop_type" in value:  # counts differ if the completion is cached
        return value["content"]
    for name in ("id", "created", "created_at", "completed_at", "akunu", "usage"):
        value.pop(name, None)
    for name in ("total_duration", "prompt_eval_duration", "eval_duration"):
        value.pop(name, None)
    for item in value.get("output", ()):
        del item["id"]
    return value


@pytest.mark.parametrize("path", WHOLE)
async def test_unknown_members_change_no_answer(tiny: Served, path: str) -> None:
    """1,000 requests in all dialects with members at every depth; 16 at a time share the passes."""
    choose, count = random.Random(path), 1000 // len(WHOLE)
    limits = {name: 1 for name in WHOLE[path] if name.startswith("max_")}
    body = WHOLE[path] | limits
    expected = answer(await ask(tiny.app, path, body))
    for _ in range(0, count, 16):
        bodies = [with_more(body, choose)[0] for _ in range(16)]
        for reply in await asyncio.gather(*(ask(tiny.app, path, body) for body in bodies)):
            assert answer(reply) == expected
            assert reply.headers[IGNORED_HEADER].isascii()


def app_of(tiny: Served, records: RequestRecords, *, strict: bool = False) -> ASGIApp:
    return create_app(replace(tiny.backend(records), strict=strict), AccessRules())


USELESS = [
    (CHAT, {"frobnicate": 1}, "frobnicate"),
    (CHAT, {"keep_alive": "5m"}, "keep_alive"),
    (CHAT, {"mirostat": 2, "typical_p": 0.9}, "mirostat, typical_p"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.*.custom"),
    (CHAT, {"structured_outputs": {"pattern": "", "choice": ["a"]}}, "structured_outputs.pattern"),
    (COMPLETIONS, {"best_of": 3}, "best_of"),
    (MESSAGES, {"container": "c"}, "container"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]},
     "tools.*.web_search_20250305"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]},
     "include.*.message.output_text.logprobs"),
    (RESPONSES, {"tools": [{"type": "web_search", "filters": {"a": 1}}, {"type": "mcp"}]},
     "tools.*.web_search, tools.*.mcp"),
    (RESPONSES, {"input": [{"type": "computer_call", "id": "x"}, USER]}, "input.*.computer_call"),
]  # fmt: skip
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "x"},
    MESSAGES: {"model": "alias", "max_tokens": 2, "messages": [USER]},
    RESPONSES: {"model": "alias", "input": "x"},
}


@pytest.mark.parametrize(("path", "more", "names"), USELESS)
async def test_fields_without_effect_are_named_once(
    tiny: Served, path: str, more: dict[str, Any], names: str
) -> None:
    """In a header of each reply, and in the log once; a strict server refuses them."""
    logged: list[RequestRecord] = []
    app = app_of(tiny, RequestRecords(logged.append))
    for stream in (False, True):
        reply = await ask(app, path, LEAST[path] | more | {"stream": stream})
        assert reply.status == 200, reply.body
        assert reply.headers[IGNORED_HEADER] == names
    assert [", ".join(record.news) for record in logged] == [names, ""]
    strict = app_of(tiny, RequestRecords(), strict=True)
    reply = await ask(strict, path, LEAST[path] | more)
    assert reply.status == 400
    assert "unsupported parameter" in reply.json()["error"]["message"]
    assert (await ask(strict, path, LEAST[path])).status == 200


async def test_a_long_list_of_names_stays_a_header(tiny: Served) -> None:
    app = app_of(tiny, RequestRecords())
    names = {f"{'x' * 500}\r\n{number}": 1 for number in range(2000)}
    reply = await ask(app, CHAT, LEAST[CHAT] | names)
    assert reply.status == 200
    assert len(reply.headers[IGNORED_HEADER]) < 4096
    assert reply.headers[IGNORED_HEADER].endswith("and 1980 more")


# Fields of other servers, and the same request in our words.
SAME = [
    ({"repeat_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"n_predict": 3}, {"max_tokens": 3}),
    ({"num_predict": 3}, {"max_tokens": 3}),
    ({"max_new_tokens": 3}, {"max_tokens": 3}),
    ({"max_tokens": -1, "stop": "a"}, {"max_tokens": 4000, "stop": "a"}),
    ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
    ({"json_schema": {"const": 1}}, {"guided_json": {"const": 1}}),
    ({"format": {"const": 1}}, {"guided_json": {"const": 1}}),
    ({"format": "json"}, {"guided_json": {"type": "object"}}),
    ({"grammar": 'root ::= "yes" | "no"'}, {"guided_choice": ["yes", "no"]}),
    ({"grammar": 'start: "yes" | "no"'}, {"guided_choice": ["yes", "no"]}),
    ({"cache_prompt": True, "user": "me"}, {}),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
async def test_fields_of_other_servers_do_what_they_say(
    tiny: Served, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    common = {"max_tokens": 12} if "max_tokens" not in ours else {}
    replies = [await ask(tiny.app, CHAT, LEAST[CHAT] | common | more) for more in (theirs, ours)]
    assert answer(replies[0]) == answer(replies[1])
    assert IGNORED_HEADER not in replies[0].headers


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"n_predict": 0}, "n_predict"),
        ({"min_tokens": -2}, "min_tokens"),
        ({"thinking_budget": "much"}, "thinking_budget"),
        ({"think": "maybe"}, "think"),
        ({"enable_thinking": 3}, "enable_thinking"),
        ({"format": "xml"}, "format"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": 'root ::= "a"', "guided_regex": "a"}, "grammar"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
    ],
)
async def test_impossible_values_are_refused(
    tiny: Served, more: dict[str, Any], param: str
) -> None:
    reply = await ask(tiny.app, CHAT, LEAST[CHAT] | more)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


async def test_length_of_answers(tiny: Served) -> None:
    """`min_tokens` and `ignore_eos` forbid the end of the answer."""
    ends = {str(token): 100.0 for token in tiny.in_thread(lambda e: e.tokens.stop_tokens)}
    body = LEAST[CHAT] | {"logit_bias": ends, "max_tokens": 9}
    for more, length in (({}, 1), ({"min_tokens": 5}, 6), ({"ignore_eos": True}, 9)):
        reply = await ask(tiny.app, CHAT, body | more)
        assert reply.json()["usage"]["completion_tokens"] == length
