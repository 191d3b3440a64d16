"""Bodies of all dialects: the same conversation in each format, and parts that a text model cannot
read become one line of text."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from akunu_py.serve.dialect.bodies import parse
from akunu_py.serve.dialect.unreadable import describe
from akunu_py.serve.messages import MessagesBody, tools_of
from akunu_py.serve.messages import messages_of as from_messages
from akunu_py.serve.ollama import OllamaChatBody
from akunu_py.serve.ollama import messages_of as from_ollama
from akunu_py.serve.openai.bodies import ChatBody
from akunu_py.serve.openai.bodies import messages_of as from_chat
from akunu_py.serve.responses.bodies import ResponsesBody
from akunu_py.serve.responses.dialect import encode_thinking
from akunu_py.serve.responses.dialect import messages_of as from_responses
from akunu_py.serve.responses.tools import map_tools, to_arguments
from akunu_py.types import Message, Tool, ToolCall, ToolChoice

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLS = tuple(ToolCall(f"find{i}", f'{{"city": "é{i}"}}', f"c{i}") for i in range(3))
TURNS = [
    Message("system", "be brief"),
    Message("user", "a\nb"),
    Message("assistant", "let me see", "hm", CALLS[:2]),
    *(Message("tool", each.id, tool_call_id=each.id, name=each.name) for each in CALLS[:2]),
    Message("assistant", "", tool_calls=CALLS[2:]),
    Message("tool", "c2", tool_call_id="c2", name="find2"),
    Message("assistant", "there", "so"),
    Message("user", "and?"),
]


def as_chat(turns: list[Message], *, in_parts: bool) -> dict[str, Any]:
    """Return a body as OpenAI's clients send it."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        content = [{"type": "text", "text": turn.content}] if in_parts else turn.content
        calls = [
            {"id": c.id, "type": "function",
             "function": {"name": c.name, "arguments": c.arguments}} for c in turn.tool_calls
        ]  # fmt: skip
        role = "developer" if turn.role == "system" and in_parts else turn.role
        body = {"role": role, "content": content, "reasoning_content": turn.thinking or None}
        result = {"tool_call_id": turn.tool_call_id} if turn.role == "tool" else {}
        found.append(body | result | ({"tool_calls": calls} if calls else {}))
    return {"messages": found}


def as_messages(turns: list[Message], *, in_parts: bool) -> dict[str, Any]:
    """Return a body as Anthropic's clients send it: results of tools in one turn of the user."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        text = [{"type": "text", "text": turn.content} | EPHEMERAL] if turn.content else []
        content: Any = text if in_parts else turn.content
        if turn.role == "tool":
            block = {"type": "tool_result", "tool_use_id": turn.tool_call_id, "content": content}
            content = [block | EPHEMERAL]
        elif turn.role == "assistant":
            thought = {"type": "thinking", "thinking": turn.thinking, "signature": "x"}
            uses = [
                {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
                for c in turn.tool_calls
            ]
            content = [*([thought] if turn.thinking else []), *text, *uses]
        if turn.role == "tool" and turn.tool_call_id == "c1":
            found[-1]["content"] += content
        else:
            found.append({"role": "user" if turn.role == "tool" else turn.role, "content": content})
    return {"system": found.pop(0)["content"], "messages": found}


def as_responses(turns: list[Message], *, in_parts: bool) -> dict[str, Any]:
    """Return a body as OpenAI's clients and Codex send it."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        if turn.thinking:
            item = {"type": "reasoning", "id": "rs_1", "summary": []}
            found.append(item | {"encrypted_content": encode_thinking(turn.thinking)})
        if turn.role == "tool":
            result = {"call_id": turn.tool_call_id, "output": turn.content}
            found.append({"type": "function_call_output", **result})
        elif turn.content:
            role = "developer" if turn.role == "system" and in_parts else turn.role
            kind = "output_text" if turn.role == "assistant" else "input_text"
            content = [{"type": kind, "text": turn.content}] if in_parts else turn.content
            found.append({"role": role, "content": content})
        for call in turn.tool_calls:
            made = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            found.append({"type": "function_call", **made})
    return {"input": found}


def chat(**body: Any) -> list[Message]:
    return from_chat(parse(json.dumps(body).encode(), ChatBody).messages)


def messages(**body: Any) -> list[Message]:
    common = {"model": "m", "max_tokens": 1}
    return from_messages(parse(json.dumps(common | body).encode(), MessagesBody))


def responses(**body: Any) -> list[Message]:
    return from_responses(parse(json.dumps({"model": "m"} | body).encode(), ResponsesBody))


def ollama(**body: Any) -> list[Message]:
    return from_ollama(parse(json.dumps(body).encode(), OllamaChatBody).messages)


@pytest.mark.parametrize("in_parts", [False, True])
def test_conversations_round_trip(in_parts: bool) -> None:
    assert chat(**as_chat(TURNS, in_parts=in_parts)) == TURNS
    assert messages(**as_messages(TURNS, in_parts=in_parts)) == TURNS
    assert responses(**as_responses(TURNS, in_parts=in_parts)) == TURNS


@pytest.mark.parametrize(
    ("sent", "text"), [({"a": "é"}, '{"a": "é"}'), (None, ""), ("{", "{"), ("", "")]
)
def test_arguments_and_results_of_any_form_are_accepted(sent: Any, text: str) -> None:
    """Clients keep them in their history, so refusing one would end the session."""
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": sent}}
    calling = {"role": "assistant", "content": None, "audio": {"id": "a"}, "tool_calls": [call]}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": sent}
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": sent}
    called, result = responses(
        input=[made, {"type": "function_call_output", "call_id": "c", "output": sent}]
    )
    turns = [{"role": "assistant", "content": [use]}]
    for message in (*chat(messages=[calling]), *messages(messages=turns), called):
        assert [call.arguments for call in message.tool_calls] == [text]
    assert result.content == text


def test_consecutive_messages_are_merged() -> None:
    """Reminder blocks, and instructions in several messages."""
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    error = {"type": "tool_result", "tool_use_id": "x", "content": "no file", "is_error": True}
    turns: list[Any] = [{"role": "user", "content": blocks}]
    assert messages(messages=turns) == [Message("user", "a\n\nb")]
    turns.append({"role": "user", "content": [error, blocks[0]]})
    assert messages(messages=turns)[1:] == [
        Message("tool", "Error: no file", tool_call_id="x"),
        Message("user", "a"),
    ]
    roles = [{"role": role, "content": role} for role in ("system", "developer", "user", "user")]
    assert responses(instructions="be", input=roles) == [
        Message("system", "be\n\nsystem\n\ndeveloper"),
        Message("user", "user\n\nuser"),
    ]
    thoughts = [{"type": "thinking", "thinking": text} for text in "ab"]
    turns = [{"role": "assistant", "content": [*thoughts, blocks[0]]}]
    assert messages(messages=turns) == [Message("assistant", "a", "a\n\nb")]


def test_answers_in_the_forms_of_other_servers() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    older = {"role": "assistant", "content": None, "refusal": "no", "reasoning": "so"}
    assert chat(messages=[refused, older]) == [
        Message("assistant", "no"),
        Message("assistant", "no", "so"),
    ]
    thought = [{"type": "reasoning_text", "text": "so"}]
    item = {"type": "reasoning", "summary": [], "content": thought}
    assert responses(input=[item, {"role": "user", "content": "x"}])[0].thinking == "so"


def test_results_of_functions_belong_to_their_calls() -> None:
    """OpenAI's older form names the function, Ollama's results may name the tool."""
    call = {"name": "look", "arguments": "{}"}
    called, result, other = chat(
        messages=[
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "look", "content": "seen"},
            {"role": "function", "name": "find", "content": "found"},
        ]
    )
    assert [(each.name, each.arguments) for each in called.tool_calls] == [("look", "{}")]
    assert (result.role, result.content, result.name) == ("tool", "seen", "look")
    assert result.tool_call_id == called.tool_calls[0].id != other.tool_call_id

    calls: list[Any] = [
        {"function": {"name": name, "arguments": {}}} for name in ("look", "find", "look")
    ]
    results = [{"role": "tool", "content": "1", "tool_name": "find"}]
    results += [{"role": "tool", "content": each} for each in "23"]
    call_turn, *found = ollama(messages=[{"role": "assistant", "tool_calls": calls}, *results])
    ids = [each.id for each in call_turn.tool_calls]
    assert [each.tool_call_id for each in found] == [ids[1], ids[0], ids[2]]
    assert [each.name for each in found] == ["find", "look", "look"]


def test_tools_of_messages() -> None:
    tool = {"name": "weather", "description": "d", "input_schema": SCHEMA, "strict": True}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    body["tools"] = [tool | EPHEMERAL | {"type": "custom"}]
    found = tools_of(parse(json.dumps(body).encode(), MessagesBody))
    assert found == [Tool("weather", "d", SCHEMA, True)]


def test_tools_of_responses() -> None:
    """A custom tool becomes a function of one string; a namespace becomes part of the name."""
    function = {"type": "function", "name": "close", "parameters": SCHEMA}
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    custom = {"type": "custom", "name": "patch", "description": "d", "format": grammar}
    inner = {"type": "namespace", "name": "agents", "description": "", "tools": [function]}
    body: dict[str, Any] = {"model": "m", "input": "x", "tools": [function, custom, inner]}

    def mapped(**more: Any) -> Any:
        found = parse(json.dumps(body | more).encode(), ResponsesBody)
        return map_tools(found.tools or [], found.tool_choice)

    offered = mapped()
    assert [*offered.by_name] == ["close", "patch", "agents__close"]
    item = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** Begin"}
    (call,) = responses(input=[item, {"role": "user", "content": "x"}])[0].tool_calls
    assert call == ToolCall("patch", to_arguments("*** Begin"), "1")
    tool = offered.by_name["patch"].tool
    assert [*tool.parameters["properties"]] == [*json.loads(call.arguments)]
    assert tool.parameters["properties"]["input"]["pattern"] == "^(?:a+)$"
    assert tool.description == "d\n\nThe input must match this regular expression:\na+"
    assert tool.strict
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "close"}]}
    some = mapped(tool_choice=allowed)
    assert ([*some.by_name], some.choice) == (["close"], ToolChoice("required"))
    named = {"type": "function", "name": "close", "namespace": "agents"}
    assert mapped(tool_choice=named).choice == ToolChoice("named", "agents__close")


# Parts that the model cannot read

DATA = base64.b64encode(bytes(84_000)).decode()
URL = f"data:image/png;base64,{DATA}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
UNREADABLE = ": this model reads text only]"
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image", "source": SOURCE}, "[image, 84 kB"),
    ({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, "[image"),
    ({"type": "document", "title": "a\nb.pdf", "source": SOURCE}, "[document a⏎b.pdf, 84 kB"),
    ({"type": "image_url", "image_url": {"url": URL}}, "[image, 84 kB"),
    ({"type": "image_url", "image_url": {"url": "https://x/a,b.png"}}, "[image"),
    ({"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}, "[audio, 84 kB"),
    ({"type": "file", "file": {"filename": "a.pdf", "file_data": URL}}, "[file a.pdf, 84 kB"),
    ({"type": "video_url", "video_url": {"url": "https://x"}}, "[video"),
    ({"type": "input_image", "image_url": URL, "detail": "auto"}, "[image, 84 kB"),
    ({"type": "input_image", "file_id": "f"}, "[image"),
    ({"type": "input_file", "filename": "a.pdf", "file_data": DATA}, "[file a.pdf, 84 kB"),
    ({"type": "search_result", "source": "x", "title": "T"}, "[search_result T"),
]


@pytest.mark.parametrize(("part", "text"), PARTS)
def test_unreadable_part_becomes_one_line_in_every_dialect(part: dict[str, Any], text: str) -> None:
    line = text + UNREADABLE
    assert describe(part) == line
    content = [part, {"type": "text", "text": "What is it?"}]
    user = {"role": "user", "content": content}
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    output = {"type": "function_call_output", "call_id": "c", "output": content}
    found = [
        *messages(messages=[user]),
        *messages(messages=[{"role": "user", "content": [result]}]),
        *responses(input=[user, output]),
    ]
    assert [each.content for each in found] == [f"{line}\n\nWhat is it?"] * 4
    tool = {"role": "tool", "tool_call_id": "c", "content": content}
    assert [each.content for each in chat(messages=[user, tool])] == [f"{line}\nWhat is it?"] * 2


def test_images_of_ollama_become_lines_also_in_results_of_tools() -> None:
    turns = [
        {"role": "user", "content": "What is it?", "images": [DATA, DATA]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "What is it?", "images": [DATA]},
    ]
    user, _, tool = ollama(messages=turns)
    line = f"[image, 84 kB{UNREADABLE}\n"
    assert (user.content, tool.content) == (f"{line}{line}What is it?", f"{line}What is it?")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "abc"}, "T\n\nabc"),
        ({"type": "content", "content": "abc"}, "T\n\nabc"),
        ({"type": "content", "content": [{"type": "text", "text": "abc"}]}, "T\n\nabc"),
        ({"type": "content", "content": [{"type": "image", "source": SOURCE}]},
         f"T\n\n[image, 84 kB{UNREADABLE}"),
        ({"type": "url", "url": "https://x/y.pdf"}, f"[document T{UNREADABLE}"),
    ],
)  # fmt: skip
def test_text_of_documents_is_part_of_the_message(source: dict[str, Any], text: str) -> None:
    block = {"type": "document", "title": "T", "source": source}
    (found,) = messages(messages=[{"role": "user", "content": [block]}])
    assert found.content == text
