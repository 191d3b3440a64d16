"""Bodies of Messages and Responses: the same conversation in each format, and clear errors for
unsupported content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.serve.dialect import bodies
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.messages import MessagesBody, tools_of
from akunu_py.serve.messages import messages_of as from_messages
from akunu_py.serve.openai.bodies import ChatBody
from akunu_py.serve.openai.bodies import messages_of as from_chat
from akunu_py.serve.responses.bodies import ResponsesBody
from akunu_py.serve.responses.dialect import encode_thinking
from akunu_py.serve.responses.dialect import messages_of as from_responses
from akunu_py.serve.responses.tools import map_tools, to_arguments
from akunu_py.types import Message, Tool, ToolCall

WORDS = st.text("abc é\n", min_size=1, max_size=9)
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Generate questions, calls with results, and answers, as chat templates expect them."""
    turns = [Message("system", draw(WORDS))] if draw(st.booleans()) else []
    calls = 0
    for _ in range(draw(st.integers(0, 2))):
        turns.append(Message("user", draw(WORDS)))
        made = [
            ToolCall("weather", json.dumps({"city": draw(WORDS)}, ensure_ascii=False), f"c{number}")
            for number in range(calls, calls + draw(st.integers(0, 2)))
        ]
        calls += len(made)
        if made:
            text = draw(st.just("") | WORDS)
            thinking = draw(st.just("") | WORDS)
            turns.append(Message("assistant", text, thinking, tuple(made)))
            turns += [
                Message("tool", draw(WORDS), tool_call_id=call.id, name=call.name) for call in made
            ]
        turns.append(Message("assistant", draw(WORDS), draw(st.just("") | WORDS)))
    return [*turns, Message("user", draw(WORDS))]


def as_messages(turns: list[Message], *, in_blocks: bool) -> dict[str, Any]:
    """Return a body as Anthropic's clients send it."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        blocks: list[dict[str, Any]] = []
        if turn.thinking:
            blocks += [{"type": "thinking", "thinking": turn.thinking, "signature": "x"}]
        if turn.role == "tool":
            result = [{"type": "text", "text": turn.content}] if in_blocks else turn.content
            block = {"type": "tool_result", "tool_use_id": turn.tool_call_id, "content": result}
            blocks.append(block | EPHEMERAL)
        elif turn.content:
            blocks.append({"type": "text", "text": turn.content} | EPHEMERAL)
        for call in turn.tool_calls:
            values = json.loads(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": values})
        role = "user" if turn.role == "tool" else turn.role
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        else:
            found.append({"role": role, "content": blocks})
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": found}
    if found[0]["role"] == "system":
        text = found.pop(0)["content"]
        body["system"] = text if in_blocks else text[0]["text"]
    for turn_body in found:
        content = turn_body["content"]
        if not in_blocks and [block["type"] for block in content] == ["text"]:
            turn_body["content"] = content[0]["text"]
    return body


def as_responses(turns: list[Message], *, in_parts: bool) -> dict[str, Any]:
    """Return a body as OpenAI's clients and Codex send it."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        if turn.thinking:
            item = {"type": "reasoning", "id": "rs_1", "summary": []}
            found.append(item | {"encrypted_content": encode_thinking(turn.thinking)})
        if turn.role == "tool":
            found.append(
                {
                    "type": "function_call_output",
                    "call_id": turn.tool_call_id,
                    "output": turn.content,
                }
            )
        elif turn.content:
            role = "developer" if turn.role == "system" and in_parts else turn.role
            kind = "output_text" if turn.role == "assistant" else "input_text"
            content = [{"type": kind, "text": turn.content}] if in_parts else turn.content
            found.append({"role": role, "content": content})
        for call in turn.tool_calls:
            made = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            found.append({"type": "function_call", **made})
    return {"model": "tiny", "input": found}


def read_messages(body: dict[str, Any]) -> MessagesBody:
    return bodies.parse(json.dumps(body).encode(), MessagesBody)


def read_responses(body: dict[str, Any]) -> ResponsesBody:
    return bodies.parse(json.dumps(body).encode(), ResponsesBody)


@given(conversations(), st.booleans())
def test_conversations_round_trip(turns: list[Message], in_parts: bool) -> None:
    assert from_messages(read_messages(as_messages(turns, in_blocks=in_parts))) == turns
    assert from_responses(read_responses(as_responses(turns, in_parts=in_parts))) == turns


@pytest.mark.parametrize(
    ("sent", "text"), [({"a": "é"}, '{"a": "é"}'), (None, ""), ("{", "{"), ("", "")]
)
def test_arguments_and_results_of_any_form_are_read(sent: Any, text: str) -> None:
    """Clients keep them in their history, so refusing one would end the session."""
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": sent}}
    calling = {"role": "assistant", "content": None, "audio": {"id": "a"}, "tool_calls": [call]}
    chat = bodies.parse(json.dumps({"messages": [calling]}).encode(), ChatBody)
    use = {"type": "tool_use", "id": "c", "name": "f", "input": sent}
    turns = [{"role": "assistant", "content": [use]}]
    messages = read_messages({"model": "m", "max_tokens": 1, "messages": turns})
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": sent}
    result = {"type": "function_call_output", "call_id": "c", "output": sent}
    responses = from_responses(read_responses({"model": "m", "input": [made, result]}))
    for message in (*from_chat(chat.messages), *from_messages(messages), responses[0]):
        assert [call.arguments for call in message.tool_calls] == [text]
    assert responses[1].content == text


def test_consecutive_messages_are_merged() -> None:
    """Reminder blocks, and instructions in several messages."""
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    error = {"type": "tool_result", "tool_use_id": "x", "content": "no file", "is_error": True}
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    assert from_messages(read_messages(asked)) == [Message("user", "a\n\nb")]
    asked["messages"].append({"role": "user", "content": [error, blocks[0]]})  # type: ignore[attr-defined]
    assert from_messages(read_messages(asked))[1:] == [
        Message("tool", "Error: no file", tool_call_id="x"),
        Message("user", "a"),
    ]
    said = [{"role": role, "content": role} for role in ("system", "developer", "user", "user")]
    assert from_responses(read_responses({"model": "m", "instructions": "be", "input": said})) == [
        Message("system", "be\n\nsystem\n\ndeveloper"),
        Message("user", "user\n\nuser"),
    ]


def test_tools_of_messages() -> None:
    tool = {"name": "weather", "description": "d", "input_schema": SCHEMA, "strict": True}
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    asked["tools"] = [tool | EPHEMERAL | {"type": "custom"}]
    assert tools_of(read_messages(asked)) == [Tool("weather", "d", SCHEMA, True)]


def test_tools_of_responses() -> None:
    """A custom tool becomes a function of one string; a namespace becomes part of the name."""
    function = {"type": "function", "name": "close", "parameters": SCHEMA}
    custom = {"type": "custom", "name": "patch", "description": "d"}
    inner = {"type": "namespace", "name": "agents", "description": "", "tools": [function]}
    search = {"type": "web_search", "external_web_access": False}
    body = read_responses({"model": "m", "input": "x", "tools": [function, custom, inner, search]})
    offered = map_tools(body.tools or [], None)
    assert [*offered.by_name] == ["close", "patch", "agents__close"]
    item = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** Begin"}
    asked = read_responses({"model": "m", "input": [item, {"role": "user", "content": "x"}]})
    (call,) = from_responses(asked)[0].tool_calls
    assert call == ToolCall("patch", to_arguments("*** Begin"), "1")
    properties = offered.by_name["patch"].tool.parameters["properties"]
    assert [*properties] == [*json.loads(call.arguments)]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"mcp_servers": []}, "mcp_servers"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "0"),
        ({"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 2}]}, "web_search"),
        ({"tools": [{"name": "w"}]}, "input_schema"),
        ({"tools": [{"name": "w", "input_schema": {}, "odd": 1}]}, "odd"),
        ({"temperature": 3}, "temperature"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits"),
    ],
)
def test_messages_refuses_by_name(more: dict[str, Any], names: str) -> None:
    def read() -> None:
        body = {"model": "m", "max_tokens": 1, "messages": [USER]} | more
        asked = bodies.parse(json.dumps(body).encode(), MessagesBody, strict=True)
        from_messages(asked)
        tools_of(asked)

    with pytest.raises(RequestError, match=names):
        read()


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"odd": 1}, "odd"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not stored"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "computer_call"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "file_search"),
        ({"tools": [{"type": "function", "name": "f", "odd": 1}]}, "odd"),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tool_choice": "required"}, "requires tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "'f'"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
    ],
)
def test_responses_refuses_by_name(more: dict[str, Any], names: str) -> None:
    def read() -> None:
        body = {"model": "m", "input": "x"} | more
        asked = bodies.parse(json.dumps(body).encode(), ResponsesBody, strict=True)
        from_responses(asked)
        map_tools(asked.tools or [], asked.tool_choice)

    with pytest.raises(RequestError, match=names):
        read()
