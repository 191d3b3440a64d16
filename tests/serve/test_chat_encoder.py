"""Chat Completions: the answer that clients accumulate from chunks equals the complete reply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.decoding.events import Event
from akunu_py.serve.openai.chat_completions import ChatEncoder, build_chat_completion
from akunu_py.serve.openai.shapes import ReplyHead
from tests.support.serve_events import answers, collect_answer

HEAD = ReplyHead("tiny", "chatcmpl")


def streamed(choices: list[list[Event]], *, usage: bool) -> list[dict[str, Any]]:
    """Return the chunks, with heartbeats, parsed like the official client does."""
    encoder = ChatEncoder(HEAD, len(choices), usage=usage)
    frames = [[encoder.heartbeat()]]
    for number, each in enumerate(choices):
        for event in each:
            frames.append(encoder.encode(event, number))
            last = number == len(choices) - 1 and event is each[-1]
            frames += [] if last else [[encoder.heartbeat()]]
    assert frames[-1][-1] == b"data: [DONE]\n\n"
    text = b"".join(frame for group in frames for frame in group).decode()
    events = text.split("\n\n")[:-2]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def accumulated(chunks: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Accumulate choices as `openai.lib.streaming` does.

    Texts are joined, calls are found by index; the role comes first, the finish reason last.
    """
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            message, delta = found[choice["index"]], choice["delta"]
            assert "finish_reason" not in message
            assert ("role" in delta) == (not message)
            if "role" in delta:
                message |= {"role": delta["role"], "content": "", "reasoning_content": ""}
                message |= {"tool_calls": [], "logprobs": []}
            message["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(json.loads(json.dumps(call)))
                else:
                    known = message["tool_calls"][call["index"]]["function"]
                    known["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                message["finish_reason"] = choice["finish_reason"]
    return found


@pytest.mark.long
@settings(max_examples=40)
@given(st.lists(answers(), min_size=1, max_size=3), st.booleans())
def test_accumulated_chunks_equal_complete_reply(choices: list[list[Event]], usage: bool) -> None:
    chunks = streamed(choices, usage=usage)
    whole = build_chat_completion(HEAD, [collect_answer(events) for events in choices])
    assert {chunk["id"] for chunk in chunks} == {whole["id"]}
    found = accumulated(chunks, len(choices))
    for choice, message in zip(whole["choices"], found, strict=True):
        calls = [call | {"index": number} for number, call in enumerate(message["tool_calls"])]
        assert (choice["message"]["content"] or "") == message["content"]
        assert choice["message"].get("reasoning_content", "") == message["reasoning_content"]
        assert [
            call | {"index": number}
            for number, call in enumerate(choice["message"].get("tool_calls", []))
        ] == calls
        assert choice["finish_reason"] == message["finish_reason"]
        assert (choice["logprobs"] or {"content": []})["content"] == message["logprobs"]
    if usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)
