"""Fields that are unknown, or known from other servers: what they do, and how they are named."""

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from pydantic import WrapValidator

from akunu_py.serve.dialect.bodies import Body, parse
from akunu_py.serve.dialect.fields import SamplingFields, generate_options
from akunu_py.serve.dialect.interface import Endpoint
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.http.asgi import DIALECTS
from akunu_py.serve.http.guard import IGNORED_HEADER
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.messages import MessagesBody
from akunu_py.serve.ollama import OptionsBody
from akunu_py.serve.responses import ResponsesBody
from akunu_py.types import GenerateOptions
from tests.support.dialects import stable
from tests.support.serving import BODIES, Reply, Served, at_a_socket, fetch

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, INFILL, OLLAMA = "/v1/responses", "/infill", "/api/chat"
USER = {"role": "user", "content": "hello"}
STREAMED = ("stream", "stream_options", "logprobs", "top_logprobs")  # logprobs depend on the batch
WHOLE: dict[str, dict[str, Any]] = {
    path: {name: value for name, value in BODIES[path].items() if name not in STREAMED}
    for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES, OLLAMA, INFILL)
}
WHOLE[OLLAMA]["stream"] = False
# Below these fields clients send anything; it reaches the model, or is copied to the reply.
FREE = {
    "logit_bias", "schema", "parameters", "input_schema", "arguments", "metadata",
    "chat_template_kwargs",
}  # fmt: skip
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


def with_more(
    body: dict[str, Any], choose: random.Random, kind: type[Body]
) -> tuple[dict[str, Any], int]:
    """Return a body with unknown members at some places, unknown values, and their number."""
    body = copy.deepcopy(body)
    sets = [
        name
        for name, field in kind.model_fields.items()
        if name not in body and any(isinstance(each, WrapValidator) for each in field.metadata)
    ]
    unknown = choose.sample(sets, choose.randint(0, len(sets)))
    body |= {name: choose.choice(["odd", "é\r\n", "X" * 200, "Auto"]) for name in unknown}
    places = list(objects(body))
    chosen = choose.sample(places, choose.randint(1, min(4, len(places))))
    values = [None, 0, 2.5, True, "x", "\x00é😀", [], {}, [{"type": "text"}], {"type": {"a": [1]}}]
    for place in chosen:
        name = choose.choice(["x_", "é", "", "0", "str", "list[Part]", "a.b", "X" * 200])
        place[f"{name}{choose.randint(0, 99)}"] = copy.deepcopy(choose.choice(values))
    return body, len(chosen) + len(unknown)


def answer(reply: Reply) -> Any:
    """Return the parts of a reply that are the same in every run."""
    assert reply.status == 200, reply.body
    value = reply.json()
    if "stop_type" in value:  # counts differ if the completion is cached
        return value["content"]
    return stable(value, "usage", "prompt_eval_duration", "eval_duration")


@pytest.mark.parametrize("path", WHOLE)
async def test_unknown_members_change_nothing(tiny: Served, path: str) -> None:
    """Unknown values of known fields, too. Neither the parsed body nor the answer changes.

    At every depth. A strict server refuses them.
    """
    choose, kind = random.Random(path), ENDPOINTS[path].body
    body = WHOLE[path] | {name: 1 for name in WHOLE[path] if name.startswith("max_")}
    plain = parse(json.dumps(body).encode(), kind)
    assert not plain.ignored
    bodies = [with_more(body, choose, kind) for _ in range(40)]
    for changed, count in bodies:
        found = parse(json.dumps(changed).encode(), kind)
        assert found.model_dump() == plain.model_dump()
        assert 1 <= len(found.ignored) <= count
        with pytest.raises(RequestError, match="unsupported parameter"):
            parse(json.dumps(changed).encode(), kind, strict=True)
    expected = answer(await fetch(tiny.app, path, body))
    replies = [fetch(tiny.app, path, changed) for changed, _ in bodies[:4]]
    for reply in await asyncio.gather(*replies):
        assert answer(reply) == expected
        assert reply.headers[IGNORED_HEADER].isascii()


USELESS = [
    (CHAT, {"mirostat": 2, "typical_p": 0.9}, "mirostat, typical_p"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"reasoning_effort": "odd", "think": "odd"}, "reasoning_effort=odd, think=odd"),
    (CHAT, {"tool_choice": "maybe"}, "tool_choice=maybe"),
    (CHAT, {"tool_choice": {"type": "mcp", "name": "x"}}, "tool_choice=mcp"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format=xml"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities.*.audio"),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "updates"}},
     "thinking.display=updates"),
    (MESSAGES, {"output_config": {"effort": "odd", "format": {"type": "xml", "schema": {}}}},
     "output_config.effort=odd, output_config.format=xml"),
    (RESPONSES, {"reasoning": {"effort": "odd"}}, "reasoning.effort=odd"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}, "truncation": "odd"},
     "truncation=odd, text.format=xml"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.*.custom"),
    (CHAT, {"structured_outputs": {"pattern": "", "choice": ["a"]}}, "structured_outputs.pattern"),
    (COMPLETIONS, {"best_of": 3}, "best_of"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]},
     "tools.*.web_search_20250305"),
    (MESSAGES, {"tools": [{"name": "w", "input_schema": {}, "odd": 1}]}, "tools.*.odd"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
     "context_management.edits.*.clear_tool_uses_20250919"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "odd": 1}]}, "tools.*.odd"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]},
     "include.*.message.output_text.logprobs"),
    (RESPONSES, {"tools": [{"type": "web_search", "filters": {"a": 1}}, {"type": "mcp"}]},
     "tools.*.web_search, tools.*.mcp"),
    (RESPONSES, {"input": [{"type": "computer_call", "id": "x"}, USER]}, "input.*.computer_call"),
]  # fmt: skip
SHORT = {
    CHAT: {"max_tokens": 2},
    COMPLETIONS: {"max_tokens": 2},
    RESPONSES: {"max_output_tokens": 2},
}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "x"},
    MESSAGES: {"model": "alias", "max_tokens": 2, "messages": [USER]}, RESPONSES: {"input": "x"},
}  # fmt: skip


@pytest.mark.parametrize(("path", "more", "names"), USELESS)
async def test_fields_without_effect_are_named_once(
    tiny: Served, path: str, more: dict[str, Any], names: str
) -> None:
    """In a header of each reply, and in the log once; a strict server refuses them."""
    logged: list[RequestRecord] = []
    app = tiny.application(records=RequestRecords(logged.append))
    least = LEAST[path] | SHORT.get(path, {})
    for stream in (False, True):
        reply = await fetch(app, path, least | more | {"stream": stream})
        assert reply.status == 200, reply.body
        assert reply.headers[IGNORED_HEADER] == names
    assert [", ".join(record.first_ignored) for record in logged] == [names, ""]
    strict = tiny.application(strict=True)
    reply = await fetch(strict, path, least | more)
    assert reply.status == 400
    assert "unsupported parameter" in reply.json()["error"]["message"]
    assert (await fetch(strict, path, least)).status == 200


async def test_a_long_list_of_names_stays_a_header(tiny: Served) -> None:
    names = {f"{'x' * 500}\r\n{number}": 1 for number in range(2000)}
    reply = await fetch(tiny.app, CHAT, LEAST[CHAT] | names)
    assert reply.status == 200
    assert len(reply.headers[IGNORED_HEADER]) < 4096
    assert reply.headers[IGNORED_HEADER].endswith("and 1980 more")


def test_any_name_is_safe_in_a_header(tiny: Served) -> None:
    """h11 drops the connection instead of sending an invalid value."""
    letters = [*map(chr, range(256)), "\u2028", "\U0001f600"]
    places = ("{}", "{}a", "a{}", "{} {}")
    with at_a_socket(tiny.app) as url:
        client = HTTPConnection(url.removeprefix("http://"))
        for some in (letters[at : at + 5] for at in range(0, len(letters), 5)):
            names = [place.format(letter, letter) for letter in some for place in places]
            client.request("POST", "/akunu/end", json.dumps({"id": "0"} | dict.fromkeys(names, 1)))
            reply = client.getresponse()
            reply.read()
            value = reply.headers[IGNORED_HEADER]
            assert (reply.status, value.isprintable(), value) == (200, True, value.strip())
        client.close()


LOOK = {"name": "look", "parameters": {"type": "object"}}
OFFERED = {"tools": [{"type": "function", "function": LOOK | {"name": n}} for n in ("look", "x")]}
ALLOWED = {"type": "function", "function": {"name": "look"}}


def choosing(choice: Any) -> dict[str, Any]:
    return OFFERED | {"tool_choice": choice}


# Fields of other servers, and the same request in our words.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
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
    ({"cache_prompt": True, "user": "me", "seed": -1}, {}),
    ({"top_logprobs": 0, "logprobs": False}, {}),
    ({"repeat_last_n": 0, "repeat_penalty": 1.3}, {"repetition_penalty": 1.0}),
    ({"do_sample": False, "temperature": 1.0, "seed": 3}, {"temperature": 0.0, "seed": 3}),
    ({"do_sample": True, "temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 3}),
    ({"reasoning_effort": "auto"}, {}),
    ({"reasoning_effort": "default", "reasoning": {"effort": "auto"}, "think": "auto"}, {}),
    ({"thinking": {"type": "auto"}}, {"thinking": {"type": "adaptive"}}),
    (choosing({"type": "auto"}), OFFERED),
    (choosing({"type": "none"}), choosing("none")),
    (choosing("any"), choosing("required")),
    (choosing({"type": "any"}), choosing("required")),
    (choosing({"type": "tool", "name": "look"}), choosing(ALLOWED)),
    (choosing({"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [ALLOWED]}}),
     {"tools": [{"type": "function", "function": LOOK}], "tool_choice": "required"}),
    (choosing({"type": "allowed_tools", "tools": [{"name": "look"}]}),
     {"tools": [{"type": "function", "function": LOOK}]}),
]  # fmt: skip
CHOICES = {"tool_choice", "tools", "reasoning_effort", "thinking"}
# Those of all dialects: the limit has another name, grammars are equal only in effect.
SHARED = [pair for pair in SAME if not {*pair[0], *pair[1]} & {"max_tokens", "grammar", *CHOICES}]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
async def test_fields_of_other_servers_do_what_they_say(
    tiny: Served, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    common = {"max_tokens": 6} if "max_tokens" not in ours else {}
    replies = [await fetch(tiny.app, CHAT, LEAST[CHAT] | common | more) for more in (theirs, ours)]
    assert answer(replies[0]) == answer(replies[1])
    assert IGNORED_HEADER not in replies[0].headers


@pytest.mark.parametrize("kind", [MessagesBody, ResponsesBody, OptionsBody])
def test_fields_of_other_servers_mean_the_same_everywhere(tiny: Served, kind: type[Body]) -> None:
    service = tiny.model.service()
    least: dict[type[Body], dict[str, Any]] = {
        MessagesBody: LEAST[MESSAGES],
        ResponsesBody: LEAST[RESPONSES],
        OptionsBody: {},
    }

    def options(more: dict[str, Any]) -> GenerateOptions:
        body = parse(json.dumps(least[kind] | more).encode(), kind)
        assert isinstance(body, SamplingFields)
        assert not set(body.ignored) - {"top_logprobs", "logprobs"}
        return generate_options(body, service, 1)

    for theirs, ours in SHARED:
        assert options(theirs) == options(ours)
    schemas: list[Any] = [
        {"json_schema": {}},
        {"guided_json": {}},
        {"structured_outputs": {"json": {}}},
    ]
    for named in schemas:
        for closed in (None, True, False):
            outputs = named.get("structured_outputs", {}) | {
                "disable_additional_properties": closed
            }
            constraint = options({**named, "structured_outputs": outputs}).sampling.constraint
            assert constraint is not None
            assert constraint.open_objects == (closed is False)
    assert options({"min_tokens": 2}).min_tokens == 2
    assert options({"stop_token_ids": [2]}).stop_tokens == (2,)
    never = options({"ignore_eos": True}).sampling.logit_bias
    assert {token for token, bias in never if bias < -99} == {*service.engine.tokens.stop_tokens}
    assert options({"repeat_last_n": 5}).sampling.penalty_window == 5
    window = options({"repeat_last_n": -1}).sampling.penalty_window
    assert window == service.engine.plan.context_length
