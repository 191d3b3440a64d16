"""Invalid requests: every dialect names what it refuses, in its own form of an error."""

from typing import Any

import pytest
from starlette.types import ASGIApp

from akunu_py.engine.model.tokens import TokenCodec
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.http.asgi import DIALECTS as SERVED_DIALECTS
from akunu_py.serve.http.asgi import dialect_for_path
from tests.support.dialects import DIALECTS, DialectRequest
from tests.support.serving import Served, fetch

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "x"}}
THOUGHT = {"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}
# The changed fields of a request that is fine otherwise, and the parameter that the error names.
# OpenAI's clients get it in a field, those of other dialects in the message.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOL], "guided_grammar": "start: /a/"}, ""),
        ({"functions": [TOOL["function"]], "function_call": {"name": "other"}}, "tool_choice"),
        ({"messages": []}, "messages"), ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [USER | {"tool_calls": [NAMED]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"), ({"logit_bias": {"99999": 1}}, ""),
        ({"max_tokens": 1.5}, "max_tokens"), ({"guided_regex": "("}, ""),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1 << 40]}, "stop_token_ids"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"n_predict": 0, "max_tokens": None}, "n_predict"), ({"min_tokens": -2}, "min_tokens"),
        ({"thinking_budget": "much"}, "thinking_budget"),
        ({"enable_thinking": 3}, "enable_thinking"), ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": "x" * 2_000_000}, "grammar"),
        ({"grammar": 'root ::= "a"', "guided_regex": "a"}, "grammar"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
    ],
    "completions": [
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": [10**6]}, "prompt"), ({"prompt": []}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo"), ({"prompt": [1], "suffix": "x"}, "suffix"),
        ({"n": 16, "prompt": ["x"] * 9}, "prompt"),
    ],
    "messages": [
        ({"max_tokens": 0}, "max_tokens"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [THOUGHT]}, "messages.0.content.0"),
        ({"tools": [{"name": "w"}]}, "input_schema"), ({"temperature": 3}, "temperature"),
    ],
    "responses": [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"), ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": [{"type": "item_reference", "id": "x"}, USER]}, "input.0"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [
            {"type": "namespace", "name": "b"}]}]}, "tools.0.tools.0.type"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, ""),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ],
    "infill": [({"n_predict": "many"}, "n_predict")],
    "ollama chat": [
        ({"messages": "x"}, "messages"), ({"options": {"num_predict": -3}}, "num_predict"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "expected a call"),
    ],
    "ollama generate": [({"prompt": 1}, "prompt")],
    "own chat": [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"options": {"max_tokens": "x"}}, "options.max_tokens"), ({"id": "x" * 65}, "id"),
    ],
    "own complete": [({"request": {"prefix": "a", "max_tokens": 4000}}, "max_tokens must be")],
}  # fmt: skip


async def check_refusal(app: ASGIApp, name: str, body: dict[str, Any], param: str) -> None:
    reply = await fetch(app, DIALECTS[name].path, body)
    assert reply.status == 400, (body, reply.body)
    value = reply.json()
    assert set(value) == set(dialect_for_path(DIALECTS[name].path).error(RequestError("no"), "id"))
    error = value["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message
    assert "\n" not in message
    if "param" not in error:
        assert param in message
    else:
        assert error["param"] == (param or None), body
        assert error["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("name", REFUSED)
async def test_errors_name_the_refused_parameter(tiny: Served, name: str) -> None:
    common = DIALECTS[name].request_body(DialectRequest(("x",), 2), stream=False)
    for change, param in REFUSED[name]:
        body = {field: v for field, v in (common | change).items() if v is not None}
        await check_refusal(tiny.app, name, body, param)
        if DIALECTS[name].streams:
            await check_refusal(tiny.app, name, body | {"stream": True}, param)


# Completions of code are shortened instead.
every_uncut_prompt = pytest.mark.parametrize(
    "name", [name for name in DIALECTS if name not in ("infill", "own complete")]
)


@every_uncut_prompt
async def test_too_long_prompt_error_has_its_length(tiny: Served, name: str) -> None:
    for stream in (False, True):
        body = DIALECTS[name].request_body(DialectRequest(("a" * 9999,), 1), stream=stream)
        reply = await fetch(tiny.app, DIALECTS[name].path, body)
        error = reply.json()["error"]
        assert reply.status == 400
        if "param" in error:
            assert error["code"] == "context_length_exceeded"
        words = (error if isinstance(error, str) else error["message"]).split()
        assert words[:4] == ["prompt", "is", "too", "long:"]
        assert int(words[4]) >= 9999
        assert words[5:] == ["tokens", ">", "4095", "maximum"]


@every_uncut_prompt
@pytest.mark.parametrize("word", ["a", " "])
async def test_a_far_too_long_prompt_is_not_tokenized_as_a_whole(
    tiny: Served, name: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    made = TokenCodec.encode_text

    def encode_text(self: TokenCodec, text: str) -> list[int]:
        lengths.append(len(text))
        return made(self, text)

    monkeypatch.setattr(TokenCodec, "encode_text", encode_text)
    for whole in ("encode", "encode_chat"):
        monkeypatch.setattr(TokenCodec, whole, lambda self, *values: pytest.fail("tokenized"))
    body = DIALECTS[name].request_body(DialectRequest((word * 3_000_000,), 1), stream=False)
    reply = await fetch(tiny.app, DIALECTS[name].path, body)
    assert reply.status == 400
    assert b"prompt is too long: 3000000 tokens > 4095 maximum" in reply.body
    assert lengths == [8 * 4096]


SERVER = "http://127.0.0.1:8012"


@pytest.mark.parametrize(("path", "base"), [
    ("/v1/v1/messages", f"{SERVER}, or to {SERVER}/v1 "),
    ("/v1/messages/v1/messages/count_tokens", f"{SERVER}, "),
    ("/openai/v1/responses", f"{SERVER}, or to {SERVER}/v1 "),
    ("/chat/completions", f"{SERVER}/v1"),
    ("/v1/chat/completions/chat/completions", f"{SERVER}/v1"),
    ("/v1/chat/completion", ""),
    ("/api/pull", ""), ("/v1/messages/batches", ""), ("/v1/files", ""), ("/x", ""),
])  # fmt: skip
async def test_errors_of_unknown_paths_name_the_base_url_in_the_form_of_their_dialect(
    tiny: Served, path: str, base: str
) -> None:
    bodies: list[Any] = [{}, None]
    for body in bodies:
        reply = await fetch(tiny.app, path, body)
        value = reply.json()
        fields = {"type", "error", "request_id"} if "messages" in path else {"error"}
        assert (reply.status, set(value)) == (404, fields)
        assert isinstance(value["error"], str) == path.startswith("/api/")
        message = value["error"] if path.startswith("/api/") else value["error"]["message"]
        start = f"unknown path {path}"
        assert message.startswith(f"{start}; " if base else start)
        assert (f"set the client's base URL to {base}" in message) == bool(base)
        close = "(did you mean '/v1/chat/completions'?)" if path == "/v1/chat/completion" else ""
        assert base or message == f"{start} {close}".rstrip()


async def test_refusals_of_the_server_use_the_form_of_the_dialect(tiny: Served) -> None:
    """On every path, before the body is received, with a request id."""
    for dialect in SERVED_DIALECTS:
        fields = set(dialect.error(RequestError("no"), "id"))
        for endpoint in dialect.endpoints:
            reply = await fetch(tiny.app, endpoint.path, b"{}", headers={"host": "evil.example"})
            assert (reply.status, set(reply.json())) == (403, fields)
            assert reply.headers["request-id"] == reply.headers["x-request-id"]
            reply = await fetch(tiny.app, endpoint.path, method="GET")
            assert (reply.status, set(reply.json())) == (405, fields)
            assert reply.headers["allow"] == "POST"
            for encoding in ("br", "zstd", "gzip, gzip", "x" * 999):
                headers = {"content-encoding": encoding}
                reply = await fetch(tiny.app, endpoint.path, b"\x00", headers=headers)
                error = reply.json()["error"]
                message = error if isinstance(error, str) else error["message"]
                words = f"Content-Encoding {encoding[:100]!r} is not supported; use gzip or deflate"
                assert (reply.status, message) == (415, words)
