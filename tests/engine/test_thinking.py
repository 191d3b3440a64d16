"""Thinking on, off and by effort in a conversation, and a budget on the command line."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.engine.answer import AnswerDetails, AnswerEvents, ChatJob, thinking_for
from akunu_py.engine.constraint import answer_limits
from akunu_py.engine.constraint.answer_limits import ThinkingBudget, can_limit_thinking
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, Finished, TextDelta, ThinkingDelta, append_event
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.template.effort import EFFORT_BUDGETS
from akunu_py.engine.tools.tool_call_parser import parser_for
from akunu_py.errors import UsageError
from akunu_py.types import (
    THINKING_MODES,
    Constraint,
    DraftMode,
    GenerateOptions,
    Message,
    SamplingOptions,
    TextPiece,
    ThinkingMode,
)
from tests.support.command import run_here
from tests.support.identity import answers_in_all_modes, engine_of, naive
from tests.support.jobs import run_job
from tests.support.slow import cover
from tests.support.tiny import VOCABULARY
from tests.support.tiny_fim import HARMONY_MARKERS, byte_level, load_tiny, write_model

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
    return write_model(directory, byte_level(markers), end=markers[0], template=template)


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
    loop = StepLoop(models["switch"])
    for mode, end in (("default", "<think>"), ("on", "<think>"), ("off", "</think>")):
        options = GenerateOptions(3, "off", thinking=mode)  # type: ignore[arg-type]
        job = ChatJob(PROMPTED, options)
        request = job.prepare(loop.engine)(loop).request
        assert request is not None
        assert models["switch"].tokens.decode(request.prompt).endswith(end)
        thought = any(isinstance(event, ThinkingDelta) for event in run_job(job, loop))
        assert thought == (mode != "off")


def test_a_slow_clients_queue_merges_thinking(models: dict[str, Engine]) -> None:
    """Although the details of each decode step follow it."""
    job = ChatJob(PROMPTED, GenerateOptions(12, "off", thinking="on"))
    events, queued = run_job(job, StepLoop(models["switch"])), list[Event]()
    for event in events:
        append_event(queued, event)
    thinking = [
        [each for each in some if isinstance(each, ThinkingDelta)] for some in (events, queued)
    ]
    assert len(thinking[0]) > 3
    assert thinking[1] == [ThinkingDelta("".join(each.text for each in thinking[0]))]
    assert len(queued) <= 5


def test_a_model_that_always_thinks_says_so(tmp_path: Path) -> None:
    markers = ("<|im_end|>", "<|channel|>")
    engine = Engine.load(model_of(tmp_path / "m", TEMPLATES["degrees"], markers), name="stubborn")
    with pytest.raises(UsageError, match="stubborn cannot answer without thinking"):
        thinking_for(engine, GenerateOptions(thinking="off"))


def test_rejected_drafts_are_shown_without_special_tokens(models: dict[str, Engine]) -> None:
    loop, options = StepLoop(models["neither"]), GenerateOptions(20, "fixed", draft_tokens=12)
    prompt = loop.engine.tokens.encode("A question?")
    plain = loop.answer(prompt, options)
    (special,) = loop.engine.tokens.encode_text("<|im_start|>")
    wrong = loop.engine.tokens.encode("wr")
    context = [*prompt[-3:], plain.tokens[0], *wrong, special, *wrong]
    request = loop.request(prompt, options, [context])
    details, parser = AnswerDetails(loop, request), parser_for(loop.engine.tokens.tokenizer, ())
    answer = AnswerEvents(request, parser, None, details, one_call=False)
    events: list[Event] = []
    rejected: list[int] = []
    while not events or not isinstance(events[-1], Finished):
        (results,) = loop.advance([request]).values()
        assert not isinstance(results, Exception)
        rejected += [
            token
            for each in results
            if isinstance(each, TextPiece)
            for token in each.piece.rejected
        ]
        events += answer.add(results)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(each.text for each in deltas) == plain.text
    texts = [text for each in deltas for _, text in each.rejected]
    assert any("wr" in text for text in texts)
    assert all("<" not in text for text in texts)
    assert special in rejected


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


END, START, STOP = "<|end|>", "<think>", "</think>"
TOKENS = 24
MODES: tuple[DraftMode, ...] = ("off", "fixed", "auto")
YES = Constraint("choice", choices=("yes", "no"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), [END, START, STOP])


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("m"), HARMONY_MARKERS, "harmony")


def prompt_of(engine: Engine, *, opened: bool = True) -> list[int]:
    return engine.tokens.encode_text(f"What is it? {START if opened else ''}")


def options(
    budget: int, seed: int | None = None, constraint: Constraint | None = None
) -> GenerateOptions:
    sampling = SamplingOptions(0.0 if seed is None else 0.9, seed=seed, constraint=constraint)
    return GenerateOptions(TOKENS, "off", sampling=sampling, thinking_budget=budget)


def limited(engine: Engine, prompt: list[int], requested: GenerateOptions) -> list[int]:
    """Decode plainly; the end of thinking replaces the token at the budget."""
    (end,) = engine.tokens.encode_text(STOP)

    def force(tokens: list[int], logits: mx.array) -> mx.array:
        is_due = len(tokens) == requested.thinking_budget and end not in tokens
        only = mx.where(mx.arange(logits.shape[1]) == end, 0.0, -mx.inf)[None]
        return only if is_due else logits

    return naive(engine, prompt, requested, force)


@pytest.mark.parametrize(("budget", "seed"), [(0, None), (1, 4), (7, None), (7, 4)])
def test_the_end_of_thinking_is_forced_exactly(
    engine: Engine, budget: int, seed: int | None
) -> None:
    prompt, requested = prompt_of(engine), options(budget, seed)
    truth = limited(engine, prompt, requested)
    (end,) = engine.tokens.encode_text(STOP)
    assert truth.index(end) == budget
    answers = answers_in_all_modes(engine, prompt, requested, truth, seeds=range(3))
    assert any(each.stats.drafted > each.stats.accepted for each in answers[3:])
    assert answers[-1].thinking == engine.tokens.tokenizer.decode(truth[:budget])


def test_a_distant_budget_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are launched ahead until the budget is near."""
    prompt = prompt_of(engine)
    monkeypatch.setattr(answer_limits, "_FAR", 10)
    for mode in MODES:
        loop = StepLoop(engine)
        request = loop.request(prompt, replace(options(15, 3), draft=mode))
        rules, ahead = request.target.constraint, list[bool]()
        assert rules is not None
        for _ in loop.stream(request):
            ahead.append(rules.free)
        assert request.tokens == limited(engine, prompt, options(15, 3))
        assert (True in ahead, False in ahead) == (True, True)
        assert ahead[-1]  # the answer has no mask


def test_a_grammar_follows_the_thinking(engine: Engine) -> None:
    prompt = prompt_of(engine)
    answers = [
        StepLoop(engine).answer(prompt, replace(options(5, 1, YES), draft=mode)) for mode in MODES
    ]
    assert len({each.tokens for each in answers}) == 1
    assert answers[0].text in YES.choices
    assert answers[0].thinking


# By family: the bias for the stop token, greedy and with a seed.
BIAS = {"llama": (2.0, 3.0), "gemma3_text": (5.0, 4.0), "mamba2": (2.0, 2.0)}


@pytest.mark.parametrize(("family", "seed"), cover(BIAS, [None, 4]))
def test_a_stop_token_in_thinking_ends_the_thinking(
    family: str, seed: int | None, tmp_path: Path
) -> None:
    """The answer follows, with any drafts and behind a pass that is launched ahead."""
    loaded = load_tiny(tmp_path, [END, START, STOP], letters=VOCABULARY - 3)
    (stop,), (end,) = (loaded.tokens.encode_text(text) for text in (END, STOP))
    engine, prompt = engine_of(loaded, family, stop_tokens=frozenset({stop})), prompt_of(loaded)
    bias = ((stop, BIAS[family][seed is not None]),)
    sampling = replace(options(0, seed).sampling, logit_bias=bias)
    requested = GenerateOptions(TOKENS, "off", sampling=sampling)
    thought = naive(engine, prompt, requested, lambda _, logits: logits)
    assert 3 < len(thought) < TOKENS - 4
    start = [*thought[:-1], end]
    left = replace(requested, max_tokens=TOKENS - len(start))
    answer = naive(engine, [*prompt, *start], left, lambda _, logits: logits)
    answers = answers_in_all_modes(engine, prompt, requested, start + answer, seeds=range(3))
    assert all(each.text for each in answers)
    # Not if nothing could follow, and not after what may be a tool call.
    called = engine.tokens.decode(thought[:2])
    for more in ({"max_tokens": len(thought)}, {"markers": (called,)}):
        ended = StepLoop(engine).answer(prompt, replace(requested, **more))
        assert (list(ended.tokens), ended.text) == (thought, "")


def walk(budget: ThinkingBudget, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that are sampled, if the model would sample `tokens`."""
    walked = []
    for token in tokens:
        sampled = (budget.forced() or (token,))[0]
        budget.step(sampled)
        walked.append(sampled)
    return walked


def test_only_thinking_before_the_answer_counts(engine: Engine) -> None:
    encode = engine.tokens.encode_text
    budget = ThinkingBudget(engine.tokens, 2, prompt_of(engine, opened=False))
    generated = encode(f"\n{START}abcde")
    assert walk(budget, generated) == encode(f"\n{START}ab{STOP}de")
    budget = ThinkingBudget(engine.tokens, 2, prompt_of(engine, opened=False))
    generated = encode(f"The marker is {START} and {STOP}")
    assert walk(budget, generated) == generated
    assert budget.free


def test_channels(harmony: Engine) -> None:
    """gpt-oss thinks in messages, before the answer and between calls."""
    assert can_limit_thinking(harmony.tokens.tokenizer)
    encode = harmony.tokens.encode_text
    think, answer = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    budget = ThinkingBudget(harmony.tokens, 5, encode("Hi<|start|>assistant"))
    generated = f"{think}abc<|end|><|start|>assistant<|channel|>commentary<|message|>x<|end|>"
    assert walk(budget, encode(generated)) == encode(generated)  # 4 tokens, the end is one
    forced = f"<|end|><|start|>assistant{answer}"
    again = encode(f"<|start|>assistant{think}y" + "z" * len(encode(forced)) + "!")
    end = encode(f"<|start|>assistant{think}y{forced}!")
    assert walk(budget, again) == end


def test_models_without_thinking_ignore_a_budget(tiny: Engine) -> None:
    assert not can_limit_thinking(tiny.tokens.tokenizer)
    loop = StepLoop(tiny)
    request = loop.request([5, 6], options(0))
    assert request.target.constraint is None


@pytest.mark.parametrize("mode", MODES)
def test_minimum_length(engine: Engine, mode: DraftMode) -> None:
    bias = tuple((token, 100.0) for token in engine.tokens.stop_tokens)
    requested = GenerateOptions(
        TOKENS, mode, sampling=SamplingOptions(logit_bias=bias), min_tokens=6
    )
    answer = StepLoop(engine).answer(prompt_of(engine, opened=False), requested)
    assert len(answer.tokens) == 7
    assert answer.finish_reason == "stop"
