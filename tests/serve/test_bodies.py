"""Bodies of all dialects: the same conversation in each format, and parts that a text model cannot
read become one line of text."""

import base64
import json
from typing import Any

import pytest

from akunu_py.serve.dialect.bodies import describe, parse
from akunu_py.serve.messages import MessagesBody, tools_of
from akunu_py.serve.messages import messages_of as from_messages
from akunu_py.serve.ollama import OllamaChatBody
from akunu_py.serve.ollama import messages_of as from_ollama
from akunu_py.serve.openai import ChatBody
from akunu_py.serve.openai import messages_of as from_chat
from akunu_py.serve.responses import ResponsesBody, encode_thinking, map_tools, to_arguments
from akunu_py.serve.responses import messages_of as from_responses
from akunu_py.types import Message, Tool, ToolCall, ToolChoice
from tests.support.serving import BODIES

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HELLO, SEEN = Message("user", "hello"), Message("tool", "seen", tool_call_id="a", name="look")
CALLS = (ToolCall("look", "{}", "a"), ToolCall("find", '{"at": "é"}', "b"))


def chat(**body: Any) -> list[Message]:
    return from_chat(parse(json.dumps(body).encode(), ChatBody).messages)


def messages(**body: Any) -> list[Message]:
    common = {"model": "m", "max_tokens": 1}
    return from_messages(parse(json.dumps(common | body).encode(), MessagesBody))


def responses(**body: Any) -> list[Message]:
    return from_responses(parse(json.dumps({"model": "m"} | body).encode(), ResponsesBody))


def ollama(**body: Any) -> list[Message]:
    return from_ollama(parse(json.dumps(body).encode(), OllamaChatBody).messages)


def test_conversations_become_messages() -> None:
    called, system = Message("assistant", "", "t", CALLS), Message("system", "be brief")
    found = chat(messages=BODIES["/v1/chat/completions"]["messages"])
    assert found == [system, HELLO, called, SEEN, HELLO]
    assert messages(**BODIES["/v1/messages"]) == [system, HELLO, called, SEEN, HELLO]
    assert responses(**BODIES["/v1/responses"]) == [system, HELLO, called, SEEN]


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
    assert chat(messages=[{"role": "developer", "content": "be"}, refused, older]) == [
        Message("system", "be"),
        Message("assistant", "no"),
        Message("assistant", "no", "so"),
    ]
    item = {"type": "reasoning", "summary": [], "encrypted_content": encode_thinking("so")}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    assert responses(input=[item, answer]) == [Message("assistant", "x", "so")]


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
    body["tools"] = [tool | {"type": "custom", "cache_control": {"type": "ephemeral"}}]
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


@pytest.mark.parametrize(("source", "text"), [
    ({"type": "text", "media_type": "text/plain", "data": "abc"}, "T\n\nabc"),
    ({"type": "content", "content": "abc"}, "T\n\nabc"),
    ({"type": "content", "content": [{"type": "text", "text": "abc"}]}, "T\n\nabc"),
    ({"type": "content", "content": [{"type": "image", "source": SOURCE}]},
     f"T\n\n[image, 84 kB{UNREADABLE}"),
    ({"type": "url", "url": "https://x/y.pdf"}, f"[document T{UNREADABLE}"),
])  # fmt: skip
def test_text_of_documents_is_part_of_the_message(source: dict[str, Any], text: str) -> None:
    block = {"type": "document", "title": "T", "source": source}
    (found,) = messages(messages=[{"role": "user", "content": [block]}])
    assert found.content == text
