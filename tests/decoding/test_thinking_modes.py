"""Thinking on, off and by effort in a conversation, and a budget on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from akunu_py.decoding.chat_format.effort import EFFORT_BUDGETS
from akunu_py.decoding.events import AnnotatedPiece, Event, Finished
from akunu_py.decoding.generate.annotated_answer import AnnotatedAnswer, AnnotatedAnswerJob
from akunu_py.decoding.generate.answer_jobs import thinking_for
from akunu_py.decoding.generate.job import RunningJob
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.types import THINKING_MODES, GenerateOptions, Message, ThinkingMode
from tests.support.command import run_here
from tests.support.jobs import run_job
from tests.support.tiny_fim import byte_level, write_model

MARKERS = ("<|im_end|>", "<think>", "<|im_start|>", "</think>")
TURNS = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SWITCH = "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
TEMPLATES = {
    "switch": TURNS + SWITCH,
    "degrees": TURNS + "{{ reasoning_effort or 'none' }}",
    "neither": TURNS,
}
PROMPTED = [Message("user", "Why?")]


def model_of(directory: Path, template: str, markers: tuple[str, ...] = MARKERS) -> Path:
    write_model(directory, byte_level(markers), end=markers[0])
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: Engine.load(model_of(folder / name, template), name=name)
        for name, template in TEMPLATES.items()
    }


@pytest.mark.parametrize("mode", THINKING_MODES)
def test_a_mode_is_a_variable_of_the_template_or_a_budget(
    models: dict[str, Engine], mode: ThinkingMode
) -> None:
    effort = mode if mode in ("low", "medium", "high") else ""
    budget = EFFORT_BUDGETS[effort] if effort else None
    off = mode == "off"
    expected = {
        "switch": ({} if mode == "default" else {"enable_thinking": not off}, budget),
        "degrees": ({"reasoning_effort": effort} if effort else {}, 0 if off else None),
        "neither": ({}, 0 if off else budget),
    }
    for name, engine in models.items():
        choice = thinking_for(engine, GenerateOptions(thinking=mode))
        assert (choice.variables, choice.budget) == expected[name]


def test_the_mode_reaches_the_prompt_and_the_answer(models: dict[str, Engine]) -> None:
    session = Session(models["switch"])
    for mode, end in (("default", "<think>"), ("on", "<think>"), ("off", "</think>")):
        options = GenerateOptions(3, "off", thinking=mode)  # type: ignore[arg-type]
        job = AnnotatedAnswerJob(PROMPTED, options)
        assert models["switch"].tokens.decode(job.prepare(session.engine).prompt).endswith(end)
        pieces = [event for event in run_job(job, session) if isinstance(event, AnnotatedPiece)]
        thought = "".join(event.piece.thinking for event in pieces)
        assert bool(thought) == (mode != "off")


def test_a_model_that_always_thinks_says_so(tmp_path: Path) -> None:
    markers = ("<|im_end|>", "<|channel|>")
    engine = Engine.load(model_of(tmp_path / "m", TEMPLATES["degrees"], markers), name="stubborn")
    with pytest.raises(UsageError, match="stubborn cannot answer without thinking"):
        thinking_for(engine, GenerateOptions(thinking="off"))


def test_rejected_drafts_are_shown_without_special_tokens(models: dict[str, Engine]) -> None:
    session, options = Session(models["neither"]), GenerateOptions(20, "fixed", draft_tokens=12)
    prompt = session.engine.tokens.encode("A question?")
    plain = session.generate(prompt, options).answer()
    (special,) = session.engine.tokens.encode_text("<|im_start|>")
    wrong = session.engine.tokens.encode("wr")
    context = [*prompt[-3:], plain.tokens[0], *wrong, special, *wrong]
    request = session.generate(prompt, options, [context])
    job = AnnotatedAnswerJob(PROMPTED, options)
    answer = AnnotatedAnswer(session, job, cast(RunningJob, SimpleNamespace(request=request)))
    events: list[Event] = []
    while not events or not isinstance(events[-1], Finished):
        events += answer.add(request.step())
    pieces = [event for event in events if isinstance(event, AnnotatedPiece)]
    assert "".join(each.piece.text for each in pieces) == plain.text
    assert any("wr" in each.rejected for each in pieces)
    assert all("<" not in each.rejected for each in pieces)
    assert any(special in each.piece.piece.rejected for each in pieces)


@pytest.mark.usefixtures("own_directories")
def test_run_ends_thinking_at_the_budget(tmp_path: Path) -> None:
    model = str(model_of(tmp_path / "thinker", TEMPLATES["switch"]))
    arguments = ("run", "--model", model, "--format", "json", "--max-tokens", "12", "Why?")
    plain = json.loads(run_here(*arguments).stdout)
    (end,) = Engine.load(Path(model), name="m").tokens.encode_text("</think>")
    assert end not in plain["tokens"]
    for budget in (0, 5):
        done = run_here(*arguments, "--thinking-budget", str(budget))
        answer = json.loads(done.stdout)
        assert answer["tokens"].index(end) == budget
        assert answer["tokens"][:budget] == plain["tokens"][:budget]
        assert "no effect" not in done.stderr
    other = str(model_of(tmp_path / "speaker", TURNS, ("<|im_end|>", "<|im_start|>")))
    done = run_here("run", "--model", other, "--max-tokens", "3", "--thinking-budget", "5", "Why?")
    assert "--thinking-budget has no effect: speaker does not think" in done.stderr
