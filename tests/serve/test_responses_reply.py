"""Responses: the response that clients accumulate from a stream equals the complete reply."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.decoding.events import (
    Event,
    Finished,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.responses.bodies import ResponsesTool
from akunu_py.serve.responses.dialect import (
    ResponseContext,
    ResponseEncoder,
    build_response,
    decode_thinking,
    encode_thinking,
)
from akunu_py.serve.responses.tools import (
    ToolMap,
    map_tools,
    to_arguments,
    to_input,
)
from akunu_py.types import Stats
from tests.support.serve_events import TEXTS, answers, collect_answer
from tests.support.sse_reader import named_events

PATCH = ResponsesTool.model_validate(
    {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
    }
)
SHELL = ResponsesTool.model_validate({"type": "custom", "name": "shell"})
AGENTS = ResponsesTool.model_validate(
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]}
)
OFFERED = map_tools([PATCH, SHELL, AGENTS], None)


def reply(tools: ToolMap = OFFERED, *, include_encrypted: bool = False) -> ResponseContext:
    return ResponseContext(
        {"model": "tiny"}, tools, include_encrypted, len, lambda grammar, text: set(text) == {"a"}
    )


def streamed(reply: ResponseContext, events: list[Event]) -> list[dict[str, Any]]:
    """Return the streamed events; checks sequence numbers, with a heartbeat after each event."""
    encoder = ResponseEncoder(reply)
    frames = [encoder.heartbeat()]
    for event in events:
        ended = isinstance(event, Finished)
        frames += [*encoder.encode(event, 0), *([] if ended else [encoder.heartbeat()])]
    found = named_events(frames)
    assert [value.pop("sequence_number") for value in found] == [*range(len(found))]
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response, as clients add it up, who may look at the deltas, at what says that something
    is done, or at the end: all three are the same."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = copy.deepcopy(events[0]["response"])
    output: list[dict[str, Any]] = response["output"]
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
            assert text_of(event["item"]) == added[index]
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
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == output
    return last  # type: ignore[no-any-return]


def text_of(item: dict[str, Any]) -> str:
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return str(item.get("input", item.get("arguments")))


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{**item, "id": item["id"].partition("_")[0]} for item in response["output"]]
    times = {"created_at": 0, "completed_at": 0}
    return response | times | {"id": "", "output": items}


@pytest.mark.long
@given(answers(), st.booleans())
def test_accumulated_stream_equals_complete_reply(
    events: list[Event], include_encrypted: bool
) -> None:
    found = accumulated(streamed(reply(include_encrypted=include_encrypted), events))
    whole = build_response(reply(include_encrypted=include_encrypted), [collect_answer(events)])
    if whole["status"] == "completed":
        assert without_ids(found) == without_ids(whole)
    for item in whole["output"]:
        assert ("encrypted_content" in item) == (include_encrypted and item["type"] == "reasoning")


@given(st.sampled_from(["patch", "shell", "agents__close"]), TEXTS, st.data())
def test_calls_use_the_clients_tool_names(name: str, text: str, data: st.DataObject) -> None:
    arguments = to_arguments(text) if data.draw(st.booleans()) else json.dumps({"input": text})
    cut = data.draw(st.integers(0, len(arguments)))
    events: list[Event] = [
        ToolCallStarted("call_1", name),
        ToolCallArguments(arguments[:cut]),
        ToolCallArguments(arguments[cut:]),
        ToolCallFinished(),
        Finished("stop", Stats()),
    ]
    found = accumulated(streamed(reply(), events))
    assert without_ids(found) == without_ids(build_response(reply(), [collect_answer(events)]))
    (item,) = found["output"]
    if name == "agents__close":
        assert (item["type"], item["name"]) == ("function_call", "close")
        assert (item["namespace"], item["arguments"]) == ("agents", arguments)
    elif name == "patch" and set(text) != {"a"}:
        assert item["type"] == "message"
        assert item["content"][0]["text"].endswith(text)
    else:
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", name, text)


@given(TEXTS, st.integers(0, 200))
def test_partial_custom_tool_input_is_a_prefix(text: str, cut: int) -> None:
    arguments = json.dumps({"input": text})
    assert text.startswith(to_input(arguments[:cut]) if arguments[:cut] else "")
    assert to_input(arguments) == text


def test_truncated_response_is_incomplete() -> None:
    events: list[Event] = [TextDelta("half"), Finished("length", Stats())]
    found = accumulated(streamed(reply(), events))
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"


def test_failed_response_has_error_code() -> None:
    encoder = ResponseEncoder(reply())
    error = RequestError("too long", code="context_length_exceeded")
    found = named_events([*encoder.encode(TextDelta("x"), 0), *encoder.fail(error, {})])
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "context_length_exceeded"


@given(st.text())
def test_encoded_thinking_round_trips(thinking: str) -> None:
    try:
        thinking.encode()
    except UnicodeEncodeError:
        return
    assert decode_thinking(encode_thinking(thinking)) == thinking


def test_thinking_of_another_server_is_dropped() -> None:
    assert [decode_thinking(text) for text in ("gAAAAA", "akunu.!", "akunu.gA==")] == ["", "", ""]
