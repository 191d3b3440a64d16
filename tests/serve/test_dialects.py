"""Messages and Responses on a tiny model: prefilled tokens, and the errors of each dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from akunu_py.decoding.events import (
    Event,
    Finished,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
)
from akunu_py.decoding.generate.job import Job
from akunu_py.types import Stats
from tests.support.dialects import CONVERSATIONS, DIALECTS, DialectRequest
from tests.support.serving import (
    STRICT_TEMPLATE,
    Served,
    ask,
    scripted_app,
    served,
    write_served_model,
)
from tests.support.sse_reader import named_events

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TOKENS = 16


def text_of_message(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"])


def text_of_response(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_count_tokens_equals_usage(tiny: Served) -> None:
    body: dict[str, Any] = {"model": "alias", "system": "be brief"}
    body["messages"] = [{"role": "user", "content": "a b\n"}]
    counted = (await ask(tiny.app, f"{MESSAGES}/count_tokens", body)).json()
    used = (await ask(tiny.app, MESSAGES, body | {"max_tokens": 3})).json()["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert used["output_tokens"] == 3


async def test_next_turn_prefills_only_new_tokens(tiny: Served) -> None:
    """In each dialect, whichever dialect the first turn used."""
    long = "a tale of many words " * 20
    turns: list[dict[str, Any]] = [{"role": "user", "content": long}]
    body: dict[str, Any] = {"model": "alias", "max_tokens": TOKENS, "messages": turns}
    first = (await ask(tiny.app, MESSAGES, body)).json()
    turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "b"}]
    usage = (await ask(tiny.app, MESSAGES, body)).json()["usage"]
    assert usage["cache_read_input_tokens"] > len(long)
    assert usage["input_tokens"] < len(text_of_message(first)) + 60
    asking = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    asking[1] = {"role": "assistant", "content": text_of_message(first)}
    response = (await ask(tiny.app, RESPONSES, {"model": "alias", "input": asking})).json()
    details = response["usage"]["input_tokens_details"]
    assert details["cached_tokens"] >= response["usage"]["input_tokens"] - 1


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model whose template refuses late system messages."""
    directory = write_served_model(tmp_path_factory.mktemp("strict") / "model")
    (directory / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    with served(directory) as model:
        yield model


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "completions"])
async def test_late_system_messages_join_turns_and_keep_the_prompt_cached(
    name: str, strict: Served
) -> None:
    """Wherever they stand, if the template refuses them; in every dialect with roles."""
    dialect, before, said = DIALECTS[name], 0, "a tale of many words " * 20
    turns: list[tuple[str, str]] = []
    for number, roles in enumerate(["us", "asu", "aus", "asssu"]):
        words = {"u": ("user", said), "a": ("assistant", "Yes."), "s": ("system", "Mind.")}
        turns += [(words[role][0], f"{number} {words[role][1]}") for role in roles]
        body = dialect.request_body(DialectRequest((said,), 2), stream=False)
        key = "input" if "input" in body else "messages"
        body[key] = [{"role": role, "content": text} for role, text in turns]
        reply = dialect.parse(await ask(strict.app, dialect.path, body))
        assert reply.cached >= before > 0 or number == 0
        before = reply.prompt - 1


async def test_too_long_prompt_error_has_its_length(tiny: Served) -> None:
    body = {
        "model": "alias",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "a" * 9999}],
    }
    for stream in (False, True):
        reply = await ask(tiny.app, MESSAGES, body | {"stream": stream})
        assert reply.status == 400
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ")
        reply = await ask(
            tiny.app, RESPONSES, {"model": "alias", "input": "a" * 9999, "stream": stream}
        )
        assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "more", "names"),
    [
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"conversation": "c"}, "conversation"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
    ],
)
async def test_refusals(tiny: Served, path: str, more: dict[str, Any], names: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        MESSAGES: {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        RESPONSES: {"input": "x"},
    }
    reply = await ask(tiny.app, path, {"model": "alias"} | bodies[path] | more)
    assert reply.status in (400, 404)
    assert names in reply.json()["error"]["message"]
    assert ("type" in reply.json()) == (path == MESSAGES)


@pytest.mark.parametrize(
    ("path", "beat"),
    [(MESSAGES, "content_block_delta"), (RESPONSES, "response.in_progress")],
)
async def test_heartbeats(tiny: Served, path: str, beat: str) -> None:
    """Heartbeats start before the first event and repeat until it arrives.

    They are events that clients' timeouts count, not comments or pings.
    """

    async def slow(job: Job) -> AsyncGenerator[Event]:
        await asyncio.sleep(0.1)
        yield PromptProcessed(9, 4)
        await asyncio.sleep(0.1)
        yield TextDelta("x")
        yield Finished("stop", Stats(prompt_tokens=9, cached_tokens=4, generated_tokens=1))

    body: dict[str, Any] = {"model": "alias", "stream": True}
    if path == MESSAGES:
        body |= {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    else:
        body["input"] = "x"
    reply = await ask(scripted_app(slow, tiny, 0.01), path, body)
    kinds = [event["type"] for event in named_events(reply.frames)]
    assert kinds.count(beat) > 2
    assert kinds.count("message_start") == (path == MESSAGES)
    assert kinds[-1] in ("message_stop", "response.completed")


CHAT, OLLAMA = "/v1/chat/completions", "/api/chat"
USER = {"role": "user", "content": "x"}
HIDDEN: list[tuple[str, dict[str, Any], bool]] = [
    *((path, {}, False) for path in (CHAT, MESSAGES, RESPONSES, OLLAMA)),
    *((path, {"include_reasoning": False}, True) for path in (CHAT, MESSAGES, RESPONSES)),
    *((path, {"reasoning": {"exclude": True}}, True) for path in (CHAT, RESPONSES)),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, True),
    (MESSAGES, {"thinking": {"type": "disabled"}}, True),
    (OLLAMA, {"think": False}, True),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "more", "hidden"), HIDDEN)
async def test_thinking_is_left_out_of_the_reply_on_request(
    tiny: Served, path: str, more: dict[str, Any], hidden: bool, stream: bool
) -> None:
    """Some models think even if thinking is disabled."""

    async def think(job: Job) -> AsyncGenerator[Event]:
        yield PromptProcessed(9, 4)
        yield ThinkingDelta("secret")
        yield TextDelta("said")
        yield Finished("stop", Stats(prompt_tokens=9, generated_tokens=2))

    body = {"model": "alias", "messages": [USER], "max_tokens": 9}
    if path == RESPONSES:
        body = {"model": "alias", "input": "x"}
    reply = await ask(scripted_app(think, tiny, 60), path, body | {"stream": stream} | more)
    assert reply.status == 200, reply.body
    assert (b"secret" not in reply.body, b"said" in reply.body) == (hidden, True)


async def test_structured_output(tiny: Served) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": ["b"]}},
        "required": ["a"],
    }
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    asking: dict[str, Any] = {
        "model": "alias",
        "input": "x",
        "max_output_tokens": 400,
        "temperature": 0.5,
    }
    asking["text"] = {"format": form | {"name": "n", "strict": True}}
    response = (await ask(tiny.app, RESPONSES, asking)).json()
    assert "".join(text_of_response(response).split()).startswith('{"a":"b"')
    turn = {"role": "user", "content": "x"}
    body = {"model": "alias", "max_tokens": 400, "temperature": 0.5, "messages": [turn]}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        message = (await ask(tiny.app, MESSAGES, body | more)).json()
        assert "".join(text_of_message(message).split()).startswith('{"a":"b"')
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " ("x" | "y")'}
    custom = {"type": "custom", "name": "patch", "format": grammar}
    choice = {"type": "custom", "name": "patch"}
    del asking["text"]
    response = (
        await ask(tiny.app, RESPONSES, asking | {"tools": [custom], "tool_choice": choice})
    ).json()
    (item,) = response["output"]
    assert item["type"] == "custom_tool_call"
    assert item["input"] in ("*** x", "*** y")


async def test_paths_for_get(tiny: Served) -> None:
    name = tiny.model.name
    paths = ("/v1/models", f"/v1/models/{name}", "/api/tags", "/api/ps", "/api/version", "/health")
    for path in paths:
        reply = await ask(tiny.app, path)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json"), path
    assert (await ask(tiny.app, f"/v1/models/{name}")).json()["id"] == name
    for path in ("/", "/metrics"):
        reply = await ask(tiny.app, path)
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    described = (await ask(tiny.app, "/openapi.json")).json()["paths"]
    posts = {path for path, methods in described.items() if "post" in methods}
    assert {dialect.path for dialect in DIALECTS.values()} <= posts
    assert {"/v1/models", "/api/ps"} <= {*described} - posts


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/v1/messages", "http://127.0.0.1:8012, or to http://127.0.0.1:8012/v1 "),
        ("/v1/v1/chat/completions", "http://127.0.0.1:8012, or to http://127.0.0.1:8012/v1 "),
        ("/v1/messages/v1/messages/count_tokens", "http://127.0.0.1:8012, "),
        ("/openai/v1/responses", "http://127.0.0.1:8012, or to http://127.0.0.1:8012/v1 "),
        ("/chat/completions", "http://127.0.0.1:8012/v1"),
        ("/messages", "http://127.0.0.1:8012/v1"),
        ("/v1/chat/completions/chat/completions", "http://127.0.0.1:8012/v1"),
    ],
)
async def test_unknown_path_names_the_base_url(tiny: Served, path: str, base: str) -> None:
    reply = await ask(tiny.app, path, {})
    assert reply.status == 404
    assert ("type" in reply.json()) == ("messages" in path)
    message = reply.json()["error"]["message"]
    assert message.startswith(f"unknown path {path}; ")
    assert f"set the client's base URL to {base}" in message
    listed = (await ask(tiny.app, "/v1/v1/models")).json()["error"]["message"]
    assert "for /v1/models, set the client's base URL" in listed
    other = (await ask(tiny.app, "/nowhere", {})).json()["error"]["message"]
    assert other == "unknown path /nowhere"
