"""Messages: the message that clients accumulate from a stream equals the complete reply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.decoding.events import (
    Event,
    Finished,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
    ToolCallArguments,
    ToolCallStarted,
)
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.messages import MessageEncoder, build_message, error_body
from akunu_py.types import Stats
from tests.support.serve_events import answers, collect_answer
from tests.support.sse_reader import named_events


def shown_events(events: list[Event], *, shows_thinking: bool) -> list[Event]:
    """Return the events that the server encodes."""
    return [event for event in events if shows_thinking or not isinstance(event, ThinkingDelta)]


def streamed(events: list[Event], *, shows_thinking: bool) -> list[dict[str, Any]]:
    encoder = MessageEncoder("tiny", thinks=shows_thinking)
    events = shown_events(events, shows_thinking=shows_thinking)
    frames = [encoder.heartbeat()]
    for event in events:
        frames += [*encoder.encode(event, 0), encoder.heartbeat()]
    return named_events(frames)


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Accumulate a message as `anthropic.lib.streaming` does.

    Nothing before message_start or after message_stop, one open block, deltas of its type.
    """
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    kinds = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    is_open = stopped = False
    for event in events:
        if event["type"] == "ping":
            continue
        assert not stopped
        if event["type"] == "message_start":
            assert not message
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            is_open = True
            message["content"].append(event["content_block"])
            texts[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            assert is_open
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
                continue
            assert delta["type"] == kinds[block["type"]]
            texts[event["index"]] += [*delta.values()][1]
        elif event["type"] == "content_block_stop":
            is_open = False
            block, text = message["content"][event["index"]], texts[event["index"]]
            if block["type"] == "tool_use":
                block["input"] = json.loads(text) if text else {}
            else:
                block[block["type"]] = text
        elif event["type"] == "message_delta":
            assert not is_open
            message |= event["delta"] | {"akunu": event["akunu"]}
            message["usage"] |= event["usage"]
        else:
            assert event["type"] == "message_stop"
            stopped = True
    assert stopped
    return message


@pytest.mark.long
@given(answers(), st.booleans())
def test_accumulated_stream_equals_complete_reply(
    events: list[Event], shows_thinking: bool
) -> None:
    found = accumulated(streamed(events, shows_thinking=shows_thinking))
    kind = "thinking" if shows_thinking else "text"
    if found["content"][0][kind] == "":  # the block of the heartbeats before the answer
        del found["content"][0]
    events = shown_events(events, shows_thinking=shows_thinking)
    whole = build_message("tiny", [collect_answer(events)])
    assert found | {"id": ""} == whole | {"id": ""}
    shown = [event.text for event in events if isinstance(event, ThinkingDelta) and shows_thinking]
    thought = [block["thinking"] for block in whole["content"] if block["type"] == "thinking"]
    assert "".join(shown) == "".join(thought)
    usage = whole["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert read == next(
        event.prompt_tokens for event in events if isinstance(event, PromptProcessed)
    )


@pytest.mark.parametrize(
    ("ended", "called", "reason"),
    [
        (Finished("stop", Stats()), False, "end_turn"),
        (Finished("stop", Stats(), "END"), False, "stop_sequence"),
        (Finished("stop", Stats()), True, "tool_use"),
        (Finished("length", Stats()), True, "max_tokens"),
        (Finished("context", Stats()), False, "model_context_window_exceeded"),
    ],
)
def test_stop_reason(ended: Finished, called: bool, reason: str) -> None:
    events: list[Event] = (
        [ToolCallStarted("a", "b"), ToolCallArguments("{}")] if called else [TextDelta("x")]
    )
    answer = collect_answer([*events, ended])
    whole = build_message("tiny", [answer])
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, ended.stop or None)


def test_truncated_call_becomes_text() -> None:
    events: list[Event] = [
        ToolCallStarted("a", "rm"),
        ToolCallArguments('{"path": "/tmp/x'),
        _cut(),
    ]
    whole = build_message("tiny", [collect_answer(events)])
    assert whole["content"] == [{"type": "text", "text": 'rm {"path": "/tmp/x'}]


def _cut() -> Finished:
    return Finished("length", Stats())


def test_errors() -> None:
    error = RequestError("prompt is too long: 9 tokens > 8 maximum", param="messages")
    assert error_body(error, "req_1") == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": error.message},
        "request_id": "req_1",
    }
    assert named_events(MessageEncoder("tiny").fail(error, error_body(error, ""))) == [
        error_body(error, "")
    ]
