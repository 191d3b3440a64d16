"""Requests with tools through a model: what must be called is, whatever its tokens are like."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from akunu_py.decoding.events import (
    Event,
    Finished,
    PrefillProgress,
    PromptProcessed,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.generate import answer_jobs
from akunu_py.decoding.generate.answer_jobs import chat_job, text_job
from akunu_py.decoding.generate.session import Session, Status, Step
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.text.stream_decoder import StreamDecoder
from akunu_py.decoding.tools.formats import FORMATS
from akunu_py.decoding.tools.rendering import format_of
from akunu_py.decoding.tools.tool_call_parser import ToolCallParser
from akunu_py.types import (
    Message,
    Piece,
    Stats,
    TextPiece,
    Tool,
    ToolChoice,
)
from tests.support.jobs import run_job
from tests.support.tool_models import SIGNS, load_family, options

SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "lamp": {"type": "string", "enum": ["a", "b"]}},
    "required": ["on", "lamp"],
    "additionalProperties": False,
}
TOOLS = [Tool("switch", "", SWITCH, strict=True), Tool("other", "", SWITCH)]
ASKED = [Message("user", "Light!")]


@pytest.fixture(scope="module", params=SIGNS)
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Of each family one whose markers are special tokens."""
    return load_family(tmp_path_factory.mktemp(request.param), request.param)


def run(engine: Engine, job: Any) -> list[Event]:
    return run_job(job, Session(engine))


def calls(events: list[Event]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCallStarted):
            found.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            name, text = found[-1]
            found[-1] = name, text + event.text
    assert sum(isinstance(event, ToolCallFinished) for event in events) == len(found)
    return [(name, json.loads(text)) for name, text in found]


def test_what_must_be_called_is(engine: Engine) -> None:
    named = ToolChoice("named", "other")
    for choice in (ToolChoice("required"), named) if engine.name == "mistral" else (named,):
        job = chat_job(engine, ASKED, options(engine), TOOLS, choice, parallel=False)
        events = run(engine, job)
        assert not any(isinstance(event, TextDelta) for event in events)
        [(name, arguments)] = calls(events)
        assert choice.name in ("", name)
        assert set(arguments) == {"on", "lamp"}
        assert isinstance(events[0], PrefillProgress | PromptProcessed)
        assert isinstance(events[-1], Finished)
        assert events[-1].reason == "stop"


@pytest.mark.parametrize("engine", ["hermes", "mistral"], indirect=True)
def test_what_must_not_be_called_is_not(engine: Engine) -> None:
    opener = next(iter(format_of(engine.tokens.tokenizer).openers))
    asked = replace(options(engine), max_tokens=4)
    token = engine.tokens.tokenizer.backend_tokenizer.token_to_id(opener)
    pushed = () if token is None else ((token, 50.0),)
    bias = asked.sampling.logit_bias + pushed
    asked = replace(asked, sampling=replace(asked.sampling, logit_bias=bias))
    none = ToolChoice("none")
    texts = [
        "".join(event.text for event in run(engine, job) if isinstance(event, TextDelta))
        for job in (
            chat_job(engine, ASKED, asked, TOOLS, none),
            chat_job(engine, ASKED, asked, TOOLS[1:]),
        )
    ]
    assert opener not in texts[0]
    assert (token is None) or "tool call]" in texts[1]


@pytest.mark.parametrize("engine", ["hermes", "mistral"], indirect=True)
def test_drafts_change_nothing(engine: Engine) -> None:
    found = []
    for draft in ("off", "auto"):
        asked = replace(options(engine, 3, draft=draft), max_tokens=40)
        events = run(engine, chat_job(engine, ASKED, asked, TOOLS, ToolChoice("required")))
        found.append(
            [event for event in events if isinstance(event, ToolCallArguments | TextDelta)]
        )
    assert "".join(each.text for each in found[0]) == "".join(each.text for each in found[1])


class Given:
    """A request that yields the given texts, one a pass, until it is cancelled."""

    finish_reason, stop_sequence, stats, logprobs = None, "", Stats(), ()
    status = Status.DECODING

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def step(self) -> list[Step]:
        if not self.texts:
            self.status = Status.FINISHED
            return []
        return [TextPiece(self.texts.pop(0), Piece(()))]

    def cancel(self) -> None:
        self.texts.clear()


@pytest.mark.parametrize("one_call", [True, False])
def test_the_first_call_ends_an_answer_that_may_have_one(one_call: bool) -> None:
    call = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    session: Any = None
    generation: Any = Given(call + call[:9], call[9:], "So.")
    parser = ToolCallParser(FORMATS["hermes"], TOOLS)
    answer = answer_jobs.AnswerEvents(generation, parser, one_call=one_call)
    events = run_job(lambda session: answer, session)
    assert calls(events) == [("other", {})] * (1 if one_call else 2)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == ("stop" if one_call else "cancelled")
    assert any(isinstance(event, TextDelta) for event in events) is not one_call


def test_a_text_goes_on_without_calls(engine: Engine) -> None:
    asked = replace(options(engine), max_tokens=8)
    events = run(engine, text_job(engine.tokens.encode("abc"), asked))
    generation = Session(engine).generate(engine.tokens.encode("abc"), asked)
    text = generation.answer().text
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"


HARMONY = (
    "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary to=functions.other "
    '<|constrain|>json<|message|>{"on": true}<|call|>'
)


@pytest.mark.parametrize("engine", ["harmony"], indirect=True)
def test_channels_come_apart(engine: Engine) -> None:
    prompt = engine.tokens.encode_chat(ASKED, TOOLS)
    tokens = engine.tokens.tokenizer.encode(HARMONY)
    for size in (1, 2, 7, len(tokens)):
        decoder = StreamDecoder(engine.tokens.tokenizer, engine.tokens.stop_tokens, prompt, ())
        pieces = [
            decoder.add(Piece(tuple(tokens[at : at + size])))[0]
            for at in range(0, len(tokens), size)
        ]
        pieces.append(decoder.finish())
        assert "".join(piece.thinking for piece in pieces) == "Hm <b>."
        call = "<|start|>assistant<|channel|>commentary to=functions.other <|constrain|>json"
        said = "".join(piece.text for piece in pieces)
        assert said == f'Wait.{call}<|message|>{{"on": true}}'
    for plain in ("No channel at all.", '{"a": 1}', "<", ""):
        decoder = StreamDecoder(engine.tokens.tokenizer, engine.tokens.stop_tokens, prompt, ())
        pieces = [
            decoder.add(Piece((token,)))[0] for token in engine.tokens.tokenizer.encode(plain)
        ]
        assert "".join(piece.text for piece in [*pieces, decoder.finish()]) == plain
