"""Tool calls in answers of models: forced, forbidden, streamed, drafted and in thinking."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from akunu_py.engine.answer import AnswerDetails, AnswerEvents, ChatJob, chat_job
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import (
    Event,
    Finished,
    PrefillProgress,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
)
from akunu_py.engine.job import BeginJob
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.request import Request
from akunu_py.engine.text.thinking import ThinkingSplitter
from akunu_py.engine.tools.formats import FORMATS
from akunu_py.engine.tools.rendering import format_of
from akunu_py.engine.tools.tool_call_parser import ToolCallParser
from akunu_py.ngram.cost import CostCurve
from akunu_py.serve.dialect.interface import CollectedAnswer
from akunu_py.types import GenerateOptions, Message, Piece, TextPiece, Tool, ToolCall, ToolChoice
from tests.support.jobs import ScriptedRequest, run_job
from tests.support.tool_call_formats import calls_in
from tests.support.tool_models import SIGNS, load_family, options

LAMP = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "lamp": {"type": "string", "enum": ["a", "b"]}},
    "required": ["on", "lamp"],
    "additionalProperties": False,
}
UNKNOWN = {"type": "object", "properties": {"x": {"type": "string", "not": {"minLength": 1}}}}
SWITCHES = [Tool("switch", "", LAMP, strict=True), Tool("other", "", LAMP)]
MESSAGES = [Message("user", "Light!")]
OTHER = ToolChoice("named", "other")
Calls = list[tuple[str, Any]]  # names and arguments


@pytest.fixture(scope="module", params=SIGNS)
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One engine for each kind of markup, whose markers are special tokens."""
    return load_family(tmp_path_factory.mktemp(request.param), request.param)


def with_bias(requested: GenerateOptions, token: int | None, bias: float) -> GenerateOptions:
    biased = requested.sampling.logit_bias + (() if token is None else ((token, bias),))
    return replace(requested, sampling=replace(requested.sampling, logit_bias=biased))


def text_of(events: Sequence[Event]) -> str:
    return "".join(each.text for each in events if isinstance(each, TextDelta))


def run_request(engine: Engine, job: BeginJob) -> Request:
    """Run a job alone and return its request."""
    loop = StepLoop(engine)
    running = job(loop)
    assert running.request is not None
    run_job(lambda loop: running, loop)
    return running.request


def calls_of(events: Sequence[Event]) -> Calls:
    return calls_in(events)[0]


def test_forced_calls_are_made_and_their_results_reach_the_next_prompt(engine: Engine) -> None:
    requested = options(engine)
    job = chat_job(engine, MESSAGES, requested, SWITCHES, OTHER, parallel=False)
    events = run_job(job, StepLoop(engine))
    assert isinstance(events[0], PrefillProgress | PromptProcessed)
    assert text_of(events) == ""
    [(name, arguments)] = calls_of(events)
    assert name == "other"
    assert set(arguments) == {"on", "lamp"}
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"
    call = ToolCall(name, json.dumps(arguments), "call_1")
    result = Message("tool", "it is dark", tool_call_id=call.id, name=name)
    more = [*MESSAGES, Message("assistant", "", tool_calls=(call,)), result]
    assert "it is dark" in engine.tokens.decode(engine.tokens.encode_chat(more, SWITCHES))


@pytest.mark.parametrize("engine", ["hermes"], indirect=True)
def test_calls_that_the_model_starts_fit_the_schema(engine: Engine) -> None:
    opener = engine.tokens.tokenizer.backend_tokenizer.token_to_id("<tool_call>")
    tools = [*SWITCHES, Tool("strange", "", UNKNOWN)]  # without a grammar
    requested = with_bias(options(engine), opener, 12.0)
    job = ChatJob(MESSAGES, requested, tools=tools)
    calls = calls_of(run_job(job, StepLoop(engine)))
    assert calls
    for name, arguments in calls:
        assert name in ("switch", "other", "strange")
        assert name == "strange" or set(arguments) == {"on", "lamp"}


@pytest.mark.parametrize("engine", ["hermes", "mistral"], indirect=True)
def test_forbidden_calls_are_not_made(engine: Engine) -> None:
    opener = next(iter(format_of(engine.tokens.tokenizer).openers))
    token = engine.tokens.tokenizer.backend_tokenizer.token_to_id(opener)
    requested = with_bias(replace(options(engine), max_tokens=4), token, 50.0)
    none, free = (
        text_of(run_job(job, StepLoop(engine)))
        for job in (
            chat_job(engine, MESSAGES, requested, SWITCHES, ToolChoice("none")),
            chat_job(engine, MESSAGES, requested, SWITCHES[1:]),
        )
    )
    assert opener not in none
    assert token is None or "tool call]" in free


def test_a_template_without_tools_still_has_calls(tmp_path: Path) -> None:
    load_family(tmp_path, "hermes")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    engine = Engine.load(tmp_path, name="plain")
    assert format_of(engine.tokens.tokenizer).name == "hermes"
    required = ToolChoice("required")
    job = chat_job(engine, MESSAGES, options(engine), SWITCHES, required, parallel=False)
    assert len(calls_of(run_job(job, StepLoop(engine)))) == 1


CALL = '<tool_call>\n{"name": "other", "arguments": {"on": true}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 100])
def test_drafts_are_marked_where_they_are_shown(size: int) -> None:
    """The vowels are drafted; the parser delays text and removes calls."""
    parts = in_pieces(f"So < be it, now \n{CALL}\n and then <tool_call>no", size)
    steps = [
        TextPiece(part, Piece(()), tuple((i, i + 1) for i, c in enumerate(part) if c in "aeiou"))
        for part in parts
    ]
    request: Any = ScriptedRequest(steps)
    parser = ToolCallParser(FORMATS["hermes"], SWITCHES)
    loop: Any = SimpleNamespace(runner=SimpleNamespace(curve=CostCurve()))
    details = AnswerDetails(loop, request)
    events = all_events(AnswerEvents(request, parser, None, details, one_call=False), request)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    shown = sum(deltas, TextDelta(""))
    assert shown.text == "So < be it, nowand then\n[malformed tool call] <tool_call>no"
    assert "".join(shown.text[start:end] for start, end in shown.drafted) == "oeioaeo"
    assert deltas[-1].stats == request.stats


@pytest.mark.parametrize("one_call", [True, False])
def test_the_first_call_ends_an_answer_that_may_have_one(one_call: bool) -> None:
    call = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    texts = (call + call[:9], call[9:], "So.")
    request: Any = ScriptedRequest([TextPiece(text, Piece(())) for text in texts], "cancelled")
    parser = ToolCallParser(FORMATS["hermes"], SWITCHES)
    events = all_events(AnswerEvents(request, parser, one_call=one_call), request)
    assert calls_of(events) == [("other", {})] * (1 if one_call else 2)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == ("stop" if one_call else "cancelled")
    assert any(isinstance(event, TextDelta) for event in events) is not one_call


@pytest.mark.parametrize("engine", ["hermes"], indirect=True)
def test_tokens_behind_the_only_call_are_not_counted(engine: Engine) -> None:
    """Drafts may be accepted behind its end, in the same pass."""
    opener = engine.tokens.tokenizer.backend_tokenizer.token_to_id("<tool_call>")
    requested = replace(with_bias(options(engine), opener, 12.0), max_tokens=200)
    whole = run_request(engine, chat_job(engine, MESSAGES, requested, SWITCHES))
    truth = engine.tokens.decode(whole.tokens)
    found = {}
    for mode in ("off", "fixed"):
        job = chat_job(
            engine, MESSAGES, replace(requested, draft=mode, draft_tokens=8), SWITCHES,
            parallel=False, predicted=truth,
        )  # fmt: skip
        request = run_request(engine, job)
        found[mode] = request.stats.generated_tokens, request.tokens
        assert request.stats.generated_tokens == len(request.tokens)
    assert request.stats.accepted > 0
    assert found["fixed"] == found["off"]


# Answers that broke tool calls in other servers.
TYPES = {
    "path": {"type": "string"}, "line": {"type": "integer"}, "all": {"type": "boolean"},
    "edits": {"type": "array"}, "range": {"type": "object"},
    "limit": {"type": ["integer", "null"]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "part": {"type": "number"},
}  # fmt: skip
EDITING = [Tool("edit", "", {"type": "object", "properties": TYPES}), Tool("now")]
# By parameter: the text that models write, and the value that the schema requires.
WRITTEN: dict[str, tuple[str, Any]] = {
    "path": ("123", "123"), "line": ("42", 42), "all": ("True", True),
    "edits": ('[{"a": 1}]', [{"a": 1}]), "range": ("{'a': 1}", {"a": 1}),
    "limit": ("None", None), "note": ("null", None), "part": ("1", 1),
}  # fmt: skip


def edit_call(*names: str) -> str:
    values = [f"<parameter={name}>\n{WRITTEN[name][0]}\n</parameter>\n" for name in names]
    return f"<tool_call>\n<function=edit>\n{''.join(values)}</function>\n</tool_call>"


EDIT, SHORT_EDIT = edit_call(*WRITTEN), edit_call("line")
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
NOWS = NOW.replace("</tool_call>", "") + NOW.replace("<tool_call>", "")  # two calls in one block
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
EDITED = ("edit", {name: value for name, (_, value) in WRITTEN.items()})
SHORT_EDITED, NOW_CALLED = ("edit", {"line": 42}), ("now", dict[str, Any]())
# By name: the format, the answer after a prompt that opens thinking, its text and its calls.
ANSWERS: dict[str, tuple[str, str, str, Calls]] = {
    "argument types": ("qwen3_coder", f"</think>\n\n{EDIT}", "", [EDITED]),
    "parallel calls": (
        "qwen3_coder", f"</think>\n\nSo.\n{SHORT_EDIT}\n{NOW}\n{SHORT_EDIT}", "So.",
        [SHORT_EDITED, NOW_CALLED, SHORT_EDITED],
    ),
    "a call in thinking without an end": ("hermes", f"Hm.\n{HERMES_NOW}", "", [NOW_CALLED]),
    "calls before the end of thinking": (
        "qwen3_coder", f"Hm.\n{SHORT_EDIT}\n{NOW}\n</think>\n\n", "", [SHORT_EDITED, NOW_CALLED],
    ),
    "a planned call that follows": (
        "qwen3_coder", f"Hm.\n{NOW}\n</think>\n{SHORT_EDIT}{NOWS}", "",
        [SHORT_EDITED, NOW_CALLED, NOW_CALLED],
    ),
    "half a call in thinking": ("hermes", f"Hm.\n{HERMES_NOW[:-20]}", "", []),
}  # fmt: skip


def events_of(format: str, pieces: Sequence[str], *, one_call: bool = False) -> list[Event]:
    splitter = ThinkingSplitter("<think>", "</think>", inside=True)
    steps = [
        TextPiece(
            "".join(run.text for run in runs if run.kind == "answer"),
            Piece(()),
            thinking="".join(run.text for run in runs if run.kind == "thinking"),
        )
        for runs in (*map(splitter.add, pieces), splitter.finish())
    ]
    request: Any = ScriptedRequest(steps)
    parser, thought = (ToolCallParser(FORMATS[format], EDITING) for _ in range(2))
    return all_events(AnswerEvents(request, parser, thought, one_call=one_call), request)


def all_events(answer: AnswerEvents, request: Any) -> list[Event]:
    events = list[Event]()
    while not events or not isinstance(events[-1], Finished):
        events += answer.add(request.step())
    return events


def in_pieces(text: Any, size: int) -> list[Any]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def arguments_of(text: str) -> Any:
    """Return the arguments of a call; their text if they are unfinished."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def reply(events: Sequence[Event]) -> tuple[str, Calls]:
    answer = CollectedAnswer()
    for event in events:
        answer.add(event)
    return answer.text, [(call.name, arguments_of(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("name", ANSWERS)
def test_replies_are_the_same_in_any_pieces_and_cut_off(name: str) -> None:
    """An answer that ends early has the same calls, the last one perhaps unfinished."""
    format, text, shown, calls = ANSWERS[name]
    for cut in range(1, len(text)):
        early = events_of(format, [text[: cut // 2], text[cut // 2 : cut]])
        for called, values in reply(early)[1]:
            assert called in ("edit", "now")
            assert isinstance(values, str) or values in ({}, EDITED[1], SHORT_EDITED[1])
    for size in (1, 2, 7, len(text)):
        events = events_of(format, in_pieces(text, size))
        assert isinstance(events[0], PromptProcessed)
        assert reply(events) == (shown, calls)


def test_only_one_call_of_thinking_if_calls_are_not_parallel() -> None:
    events = events_of("qwen3_coder", in_pieces(f"Hm.{NOW}{NOW}", 3), one_call=True)
    assert reply(events) == ("", [NOW_CALLED])
    assert any(isinstance(event, ThinkingDelta) for event in events)
