"""The reply that a client accumulates from a stream equals the complete reply, in every dialect."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.engine.events import (
    Event,
    Failed,
    Finished,
    Logprobs,
    PrefillProgress,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.engine.job import Job
from akunu_py.errors import PromptTooLong
from akunu_py.serve.responses import encode_thinking, to_arguments
from akunu_py.types import FinishReason, Stats, TokenLogprobs
from tests.support.dialects import DIALECTS, DialectRequest, ReplyData, stable
from tests.support.serving import Served, app_with_events, fetch, scripted_app

ENCODERS = [name for name in DIALECTS if not name.startswith("own")]
WITH_TOOLS = ("chat", "messages", "responses", "ollama chat")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NAMES = st.sampled_from(["look", "find"])
USER = {"role": "user", "content": "x"}
# For "stop", "length", "context", a stop sequence, and "stop" after a tool call.
REASONS: dict[str, Sequence[str]] = {
    "chat": ("stop", "length", "length", "stop", "tool_calls"),
    "completions": ("stop", "length", "length", "stop"),
    "messages": (
        *("end_turn", "max_tokens", "model_context_window_exceeded"),
        *("stop_sequence", "tool_use"),
    ),
    "responses": ("completed", *["max_output_tokens"] * 2, *["completed"] * 2),
    "infill": ("eos", "limit", "limit", "word"),
    "ollama chat": ("stop", "length", "length", "stop", "stop"),
    "ollama generate": ("stop", "length", "length", "stop", "stop"),
}


@st.composite
def tool_calls(draw: st.DrawFn) -> list[Event]:
    arguments = json.dumps(draw(st.dictionaries(TEXTS, TEXTS, max_size=2)), ensure_ascii=False)
    cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=3)))
    parts = [arguments[a:b] for a, b in itertools.pairwise([0, *cuts, len(arguments)])]
    started = ToolCallStarted(draw(TEXTS), draw(NAMES))
    return [started, *map(ToolCallArguments, parts), ToolCallFinished()]


def texts_with_logprobs() -> st.SearchStrategy[list[Event]]:
    top = (("a", -1.0, b"a"), ("b", -2.0, b"b"))
    raw = st.binary(max_size=3)
    token = st.builds(TokenLogprobs, TEXTS, st.floats(-9, 0), raw, st.just(top))
    tokens = st.lists(token, min_size=1, max_size=3)
    return tokens.map(
        lambda found: [Logprobs(tuple(found)), TextDelta("".join(each.text for each in found))]
    )


@st.composite
def answers(draw: st.DrawFn, *, thinks: bool = True, calls: bool = True) -> list[Event]:
    """Generate all events of a finished answer."""
    size = draw(st.integers(1, 9))
    thinking = [ThinkingDelta(text) for text in draw(st.lists(TEXTS, max_size=3 if thinks else 0))]
    texts = TEXTS.map(lambda text: [TextDelta(text)])
    piece: st.SearchStrategy[list[Any]] = st.one_of(
        texts, texts_with_logprobs(), *([tool_calls()] if calls else [])
    )
    reason, stop = draw(st.sampled_from(ENDS)), ""
    if reason == "stop":
        stop = draw(st.just("") | TEXTS)
    stats = Stats(prompt_tokens=size, generated_tokens=draw(st.integers(0, 9)), cached_tokens=1)
    stats.drafted = draw(st.integers(0, 5))
    return [
        *[PrefillProgress(done, size) for done in range(draw(st.integers(0, size)))],
        PromptProcessed(size, 1),
        *thinking,
        *[event for events in draw(st.lists(piece, max_size=5)) for event in events],
        Finished(reason, stats, stop),
    ]


ENDS: tuple[FinishReason, ...] = ("stop", "length", "context")


def body_of(name: str, *, stream: bool = False) -> dict[str, Any]:
    """Return the body of a request that offers the tools of `tool_calls`."""
    body = DIALECTS[name].request_body(DialectRequest(("x",)), stream=stream)
    functions = [{"name": tool, "parameters": {"type": "object"}} for tool in ("look", "find")]
    offered: dict[str, list[dict[str, Any]]] = {
        "chat": [{"type": "function", "function": each} for each in functions],
        "messages": [{"name": each["name"], "input_schema": {}} for each in functions],
        "responses": [{"type": "function", **each} for each in functions],
    }
    offered["ollama chat"] = offered["chat"]
    return body | ({"tools": offered[name]} if name in offered else {})


async def replies(
    model: Served, name: str, answers: list[list[Event]], **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the complete reply, and the one accumulated from a stream full of heartbeats."""
    found = []
    for stream in (False, True):
        rest = iter(answers)

        async def run(job: Job, rest: Any = rest) -> AsyncGenerator[Event]:
            for event in next(rest):
                for _ in range(4):  # heartbeats
                    await asyncio.sleep(0)
                yield event

        app = scripted_app(run, model, heartbeat_s=0)
        body = body_of(name, stream=stream) | more
        found.append(DIALECTS[name].whole(await fetch(app, DIALECTS[name].path, body)))
    return found[0], found[1]


def expected(name: str, events: list[Event]) -> ReplyData:
    end = events[-1]
    assert isinstance(end, Finished)
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStarted):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[-1] = calls[-1][0], calls[-1][1] + event.text
    number = ENDS.index(end.reason)
    if end.reason == "stop" and (calls or end.stop):
        number = 4 if calls else 3
    return ReplyData(
        "".join(event.text for event in events if isinstance(event, TextDelta)),
        end.stats.prompt_tokens,
        end.stats.cached_tokens,
        end.stats.generated_tokens,
        end.stats.drafted,
        REASONS[name][number],
        "".join(event.text for event in events if isinstance(event, ThinkingDelta)),
        tuple((tool, json.loads(arguments)) for tool, arguments in calls),
    )


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=8)
@given(st.data())
async def test_accumulated_stream_equals_complete_reply(
    tiny: Served, name: str, data: st.DataObject
) -> None:
    events = data.draw(answers(thinks=name != "infill", calls=name in WITH_TOOLS))
    thinking = {"thinking": {"type": "enabled"}} if data.draw(st.booleans()) else {}
    more = {} if name == "infill" else thinking
    whole, streamed = await replies(tiny, name, [events], **more)
    end, data_expected = events[-1], expected(name, events)
    assert isinstance(end, Finished)
    for reply in (whole, streamed):
        assert DIALECTS[name].data(reply) == data_expected
        if name == "messages":
            assert reply["stop_sequence"] == (end.stop or None)
        if name == "infill":
            assert reply["stopping_word"] == end.stop
    if not (name == "responses" and end.reason != "stop"):  # the last item is complete or not
        assert stable(streamed) == stable(whole)
    if name in ("chat", "completions", "responses"):
        usage, thought = whole["usage"], data_expected.thinking
        details = usage[f"{'output' if name == 'responses' else 'completion'}_tokens_details"]
        count = tiny.in_thread(lambda engine: len(engine.tokens.encode(thought))) if thought else 0
        assert details == {"reasoning_tokens": min(count, end.stats.generated_tokens)}
    if name.startswith("ollama"):
        tokens = [t for event in events if isinstance(event, Logprobs) for t in event.tokens]
        found = whole.get("logprobs", [])
        assert [each["token"] for each in found] == [t.text for t in tokens]
        assert [each["bytes"] for each in found] == [[*t.raw] for t in tokens]


@pytest.mark.parametrize(("name", "prompts"), [("chat", 1), ("completions", 2)])
@settings(max_examples=8)
@given(data=st.data())
async def test_choices_are_streamed_one_after_the_other(
    tiny: Served, name: str, prompts: int, data: st.DataObject
) -> None:
    """Usage counts each prompt once and each answer."""
    given_answers = [data.draw(answers(calls=name == "chat")) for _ in range(2 * prompts)]
    more = {} if name == "chat" else {"prompt": ["x", "y"]}
    whole, streamed = await replies(tiny, name, given_answers, n=2, **more)
    assert stable(streamed) == stable(whole)
    ends = [events[-1] for events in given_answers]
    stats = [end.stats for end in ends if isinstance(end, Finished)]
    assert whole["usage"]["completion_tokens"] == sum(each.generated_tokens for each in stats)
    assert whole["usage"]["prompt_tokens"] == sum(each.prompt_tokens for each in stats[::2])
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == prompts


@pytest.mark.parametrize("name", WITH_TOOLS)
async def test_a_call_that_is_cut_off_reaches_the_client(tiny: Served, name: str) -> None:
    """As text where the dialect needs valid JSON."""
    for arguments, reason in zip(('{"a": ', '{"path": "/tmp/x', ""), ENDS, strict=True):
        call = ToolCallStarted("a", "look"), ToolCallArguments(arguments)
        text, end = "[malformed tool call] ...", Finished(reason, Stats(generated_tokens=3))
        app, path = app_with_events(tiny, *call, TextDelta(text), end), DIALECTS[name].path
        whole = (await fetch(app, path, body_of(name))).json()
        frames = (await fetch(app, path, body_of(name, stream=True))).values()
        if name == "chat":
            (found,) = whole["choices"][0]["message"]["tool_calls"]
            assert found["function"] == {"name": "look", "arguments": arguments}
            ended = [choice["finish_reason"] for frame in frames for choice in frame["choices"]]
            assert whole["choices"][0]["finish_reason"] == ended[-1] != "tool_calls"
        elif name == "responses":
            call, message = whole["output"]
            assert stable(frames[-1]["response"]) == stable(whole)
            assert (call["status"], call["arguments"]) == ("incomplete", arguments)
            assert message["status"] == ("completed" if reason == "stop" else "incomplete")
        elif name == "messages":
            assert whole["content"] == [{"type": "text", "text": text}]
            assert whole["stop_reason"] == frames[-2]["delta"]["stop_reason"] != "tool_use"
        else:
            assert "tool_calls" not in whole["message"]


async def test_responses_delivers_a_call_after_a_malformed_one(tiny: Served) -> None:
    bad: list[Event] = [ToolCallStarted("a", "patch"), ToolCallArguments("{"), TextDelta("{")]
    good: list[Event] = [ToolCallStarted("b", "close"), ToolCallArguments("{}"), ToolCallFinished()]
    events = [*bad, *good, Finished("stop", Stats())]
    for reply in await replies(tiny, "responses", [events], tools=[PATCH, CLOSE]):
        assert [item.get("arguments") for item in reply["output"]] == [None, "{}"]


PATCH = {"type": "custom", "name": "patch", "description": "d"}
PATCH |= {"format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}  # type: ignore[dict-item]
SHELL = {"type": "custom", "name": "shell"}
CLOSE = {"type": "function", "name": "close"}
AGENTS = {"type": "namespace", "name": "agents", "tools": [CLOSE]}


@settings(max_examples=8)
@given(
    st.sampled_from(["patch", "shell", "agents__close"]), st.sampled_from("aé\n") | TEXTS, st.data()
)
async def test_responses_uses_the_tool_names_of_the_client(
    tiny: Served, name: str, text: str, data: st.DataObject
) -> None:
    """Input that violates the grammar of its tool becomes text."""
    arguments = to_arguments(text) if data.draw(st.booleans()) else json.dumps({"input": text})
    cut = data.draw(st.integers(0, len(arguments)))
    events: list[Event] = [
        ToolCallStarted("call_1", name), ToolCallArguments(arguments[:cut]),
        ToolCallArguments(arguments[cut:]), ToolCallFinished(), Finished("stop", Stats()),
    ]  # fmt: skip
    whole, streamed = await replies(tiny, "responses", [events], tools=[PATCH, SHELL, AGENTS])
    assert stable(streamed) == stable(whole)
    (item,) = streamed["output"]
    if name == "agents__close":
        assert (item["type"], item["name"]) == ("function_call", "close")
        assert (item["namespace"], item["arguments"]) == ("agents", arguments)
    elif name == "patch" and set(text) != {"a"}:
        assert item["type"] == "message"
        assert item["content"][0]["text"].endswith(f"violates its grammar]\n{text}")
    else:
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", name, text)


async def test_responses_sends_encoded_thinking_on_request(tiny: Served) -> None:
    events: list[Event] = [ThinkingDelta("so"), TextDelta("x"), Finished("stop", Stats())]
    for include in ([], ["reasoning.encrypted_content"]):
        for reply in await replies(tiny, "responses", [events], include=include):
            encoded = [item.get("encrypted_content") for item in reply["output"]]
            assert encoded == ([encode_thinking("so"), None] if include else [None, None])


@pytest.mark.parametrize("name", ENCODERS)
async def test_an_error_in_a_stream_has_the_dialects_form(tiny: Served, name: str) -> None:
    end = Failed(PromptTooLong("too long", 9, 8))
    app = app_with_events(tiny, PromptProcessed(1, 0), TextDelta("x"), end)
    reply = await fetch(app, DIALECTS[name].path, body_of(name, stream=True))
    last, message = reply.values()[-1], "prompt is too long: 9 tokens > 8 maximum"
    code, kind = "context_length_exceeded", "invalid_request_error"
    error = {"message": message, "type": kind}
    if name == "responses":
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": code, "message": message}
    elif name == "messages":
        assert last == {"type": "error", "error": error, "request_id": reply.headers["request-id"]}
    elif name == "infill":
        assert last == {"error": error | {"code": 400}}
    elif name.startswith("ollama"):
        assert last == {"error": message}
    else:
        assert last == {"error": error | {"param": None, "code": code}}
