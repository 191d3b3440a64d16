"""Tool calls in the answers of akunu's chat: text, calls and drafts come apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding.events import (
    AnnotatedEnd,
    AnnotatedPiece,
    Event,
    Finished,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.generate.annotated_answer import AnnotatedAnswerJob, ToolCallSplitter
from akunu_py.decoding.generate.answer_jobs import AnswerEvents
from akunu_py.decoding.generate.session import Session, Status, Step
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.tools.formats import FORMATS
from akunu_py.decoding.tools.rendering import format_of
from akunu_py.decoding.tools.tool_call_parser import ToolCallParser
from akunu_py.types import Message, Piece, Stats, TextPiece, Tool, ToolCall, ToolChoice
from tests.support.jobs import run_job
from tests.support.tool_models import SIGNS, force_calls, load_family, options

LAMP = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "lamp": {"enum": ["a", "b"]}},
    "required": ["on", "lamp"],
    "additionalProperties": False,
}
UNKNOWN = {"type": "object", "properties": {"x": {"type": "string", "not": {"minLength": 1}}}}
TOOLS = [Tool("switch", "", LAMP), Tool("other", "", LAMP)]
ASKED = [Message("user", "Light!")]


@pytest.fixture(scope="module", params=SIGNS)
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_family(tmp_path_factory.mktemp(request.param), request.param)


def run(engine: Engine, job: AnnotatedAnswerJob) -> tuple[str, list[ToolCall], Finished]:
    """The text of an answer, its complete calls, and its end."""
    events: list[Event] = run_job(job, Session(engine))
    text = "".join(event.piece.text for event in events if isinstance(event, AnnotatedPiece))
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, ToolCallStarted):
            calls.append(ToolCall(event.name, "", event.id))
        elif isinstance(event, ToolCallArguments):
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + event.text)
    finished = sum(isinstance(event, ToolCallFinished) for event in events)
    assert isinstance(events[-1], Finished)
    return text, calls[:finished], events[-1]


def test_forced_calls_of_every_family(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the results go into the next prompt."""
    force_calls(monkeypatch, ToolChoice("named", "other"))
    text, calls, end = run(engine, AnnotatedAnswerJob(ASKED, options(engine), tools=TOOLS))
    assert text == ""
    (call,) = calls
    assert call.name == "other"
    assert set(json.loads(call.arguments)) == {"on", "lamp"}
    assert isinstance(end.details, AnnotatedEnd)
    assert end.details.reason == "stop"
    monkeypatch.undo()
    result = Message("tool", "it is dark", tool_call_id=call.id, name=call.name)
    more = [*ASKED, Message("assistant", "", tool_calls=(call,)), result]
    prompt = engine.tokens.decode(engine.tokens.encode_chat(more, TOOLS))
    assert "it is dark" in prompt
    short = replace(options(engine), max_tokens=4)
    assert run(engine, AnnotatedAnswerJob(more, short, tools=TOOLS))[2].stats.generated_tokens


@pytest.mark.parametrize("engine", ["hermes"], indirect=True)
def test_a_call_that_the_model_begins_fits_the_schema(engine: Engine) -> None:
    """A random model would write anything. A schema without a grammar does no harm."""
    opener = engine.tokens.tokenizer.backend_tokenizer.token_to_id("<tool_call>")
    asked = options(engine)
    bias = (*asked.sampling.logit_bias, (opener, 12.0))
    asked = replace(asked, sampling=replace(asked.sampling, logit_bias=bias))
    tools = [*TOOLS, Tool("strange", "", UNKNOWN)]
    _, calls, _ = run(engine, AnnotatedAnswerJob(ASKED, asked, tools=tools))
    assert calls
    for call in calls:
        assert call.name in ("switch", "other", "strange")
        if call.name != "strange":
            assert set(json.loads(call.arguments)) == {"on", "lamp"}


class Given:
    """A request that yields the given pieces, one a pass."""

    stop_sequence, stats, logprobs, tokens = "", Stats(), (), ()
    status = Status.DECODING
    finish_reason: str | None = None

    def __init__(self, pieces: list[TextPiece]) -> None:
        self.pieces = pieces

    def step(self) -> list[Step]:
        found: list[Step] = [self.pieces.pop(0)]
        if not self.pieces:
            self.status, self.finish_reason = Status.FINISHED, "stop"
        return found


CALL = '<tool_call>\n{"name": "other", "arguments": {"on": true}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_drafts_are_marked_where_they_are_shown(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vowels were drafted; a parser holds text back and takes calls out."""
    raw = f"So < be it, now \n{CALL}\n and then <tool_call>no"

    def pieces() -> Iterator[TextPiece]:
        for at in range(0, len(raw), size):
            part = raw[at : at + size]
            drafted = tuple((i, i + 1) for i, letter in enumerate(part) if letter in "aeiou")
            yield TextPiece(part, Piece(()), drafted)

    request: Any = Given(list(pieces()))
    parser = ToolCallParser(FORMATS["hermes"], TOOLS)
    answer = AnswerEvents(request, parser, one_call=False)
    shown = ToolCallSplitter(answer)
    text, marked, calls = "", "", 0
    while request.pieces:
        steps, events = shown.add(request.step())
        for step in steps:
            assert isinstance(step, TextPiece)
            for start, end in step.drafted:
                assert 0 <= start < end <= len(step.text)
                marked += step.text[start:end]
            text += step.text
        calls += sum(isinstance(event, ToolCallFinished) for event in events)
    assert calls == 1
    assert text == "So < be it, now\n\nand then\n[malformed tool call] <tool_call>no"
    assert marked.startswith("oeioae"), "none of the call"


def test_a_template_without_tools_still_has_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_family(tmp_path, "hermes")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    engine = Engine.load(tmp_path, name="plain")
    assert format_of(engine.tokens.tokenizer).name == "hermes"
    force_calls(monkeypatch, ToolChoice("required"), parallel=False)
    _, calls, _ = run(engine, AnnotatedAnswerJob(ASKED, options(engine), tools=TOOLS))
    assert len(calls) == 1
