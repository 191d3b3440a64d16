"""Requests: ends, cancellation, failing passes, memory, and token ids outside the vocabulary."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompleteOptions, CompletionRequest
from akunu_py.engine import prefill
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import PrefillProgress
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device
from akunu_py.engine.request import repeats
from akunu_py.engine.sampling import Sampler
from akunu_py.errors import DamagedModel, DoesNotFit, PromptTooLong, UnknownModel, UsageError
from akunu_py.models.load.fit import Activations, CacheGrowth, FittedContext, MemoryNeeds
from akunu_py.types import (
    Answer,
    Constraint,
    DraftMode,
    GenerateOptions,
    Message,
    SamplingOptions,
    TextPiece,
)
from tests.support.complete import complete
from tests.support.engines import altered
from tests.support.targets import Counting, last_tokens, some
from tests.support.tiny_fim import byte_level, load_tiny, write_model

MODES: tuple[DraftMode, ...] = ("off", "fixed", "auto")
PROMPT = [1, 2, 3, 4, 1, 2, 3]
OFF = GenerateOptions(max_tokens=4, draft="off")

every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def tiny(tiny: Engine) -> Engine:
    return altered(tiny, stop_tokens=frozenset())


def fresh(engine: Engine, prompt: list[int], options: GenerateOptions) -> Answer:
    return StepLoop(engine).answer(prompt, options)


@every_mode
def test_answers_end_at_max_tokens_at_a_full_context_and_at_a_stop_token(
    tiny: Engine, mode: DraftMode
) -> None:
    whole = fresh(tiny, PROMPT, GenerateOptions(12, mode))
    for count in (1, 2, 7):
        answer = fresh(tiny, PROMPT, GenerateOptions(count, mode))
        assert (answer.tokens, answer.finish_reason) == (whole.tokens[:count], "length")
    answer = fresh(altered(tiny, context_length=16), PROMPT, GenerateOptions(draft=mode))
    assert (answer.tokens, answer.finish_reason) == (whole.tokens[:9], "context")
    stop = whole.tokens[6]
    answer = fresh(tiny, PROMPT, GenerateOptions(12, mode, stop_tokens=(stop,)))
    end = whole.tokens.index(stop) + 1
    assert (answer.tokens, answer.finish_reason) == (whole.tokens[:end], "stop")
    assert answer.text == tiny.tokens.decode(whole.tokens[: end - 1])  # without the stop token


@every_mode
def test_abandoned_answers_leave_a_usable_cache(tiny: Engine, mode: DraftMode) -> None:
    options, loop, prompt = GenerateOptions(24, mode), StepLoop(tiny), some(40, 1)
    first = loop.answer(prompt, options)
    pieces = loop.stream(loop.request(prompt, options))
    next(pieces)
    pieces.close()
    assert loop.answer(prompt, options).tokens == first.tokens


def test_half_a_character_is_no_stop_sequence_of_a_cancelled_answer(tiny: Engine) -> None:
    half = tiny.tokens.encode_text("é")[0]
    sampling = SamplingOptions(allowed_tokens=(half,))
    loop = StepLoop(tiny)
    request = loop.request(PROMPT, GenerateOptions(24, sampling=sampling, stop=("\ufffd",)))
    for step in loop.stream(request):
        if isinstance(step, TextPiece):
            request.cancel()
    assert (request.finish_reason, request.stop_sequence) == ("cancelled", "")


def test_prefill_reports_its_progress_and_is_cancelled_between_chunks(tiny: Engine) -> None:
    loop, seen = StepLoop(tiny), []
    request = loop.request(some(1400, 1), OFF)
    for step in loop.stream(request):
        seen.append(step)
        if step == PrefillProgress(512, 1399):
            request.cancel()
    assert (request.finish_reason, request.tokens) == ("cancelled", [])
    assert seen == [PrefillProgress(0, 1399), PrefillProgress(512, 1399)]
    assert loop.answer(some(1400, 1), OFF).stats.cached_tokens == 512


def test_invalid_requests_are_refused(tiny: Engine, tmp_path: Path) -> None:
    loop = StepLoop(tiny)
    with pytest.raises(UsageError, match="prompt is empty"):
        loop.request([], OFF)
    with pytest.raises(PromptTooLong, match="4096"):
        loop.request([5] * 4096, OFF)
    loop.request([5] * 4095, OFF)
    with pytest.raises(UsageError, match="max_tokens"):
        loop.request([5], GenerateOptions(max_tokens=0))
    with pytest.raises(UsageError, match="draft_tokens"):
        loop.request([5], GenerateOptions(draft_tokens=0))
    with pytest.raises(UnknownModel, match="no config"):
        Engine.load(tmp_path)


class Failing(Counting):
    """A model of which one pass fails after it changed the cache."""

    passes_left = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        logits = super().__call__(*args, **options)
        self.passes_left -= 1
        if self.passes_left == 0:
            raise RuntimeError("out of memory")
        return logits


@every_mode
@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_failed_pass_leaves_no_history(tiny: Engine, mode: DraftMode, failing: int) -> None:
    options, model = GenerateOptions(12, mode), Failing(tiny.model)
    loop = StepLoop(altered(tiny, model=model))
    model.passes_left = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.answer(PROMPT, options)
    assert last_tokens(loop) == []
    answer = loop.answer(PROMPT, options)
    assert answer.tokens == fresh(tiny, PROMPT, options).tokens


TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
HEADER = "<|assistant|><think>at length, and a little more of that</think>"


@pytest.mark.parametrize(("template", "dropped"), [
    (TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}", 0),
    (TURNS + "{% if add_generation_prompt %}" + HEADER + "{% endif %}", len(HEADER) - 13),
    (TURNS + "{% if messages | length < 2 %}(short){% endif %}", len("(short)")),
    ("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}Hello", 5),
])  # fmt: skip
def test_the_stable_prefix_is_found_by_rendering_another_turn(
    tmp_path: Path, template: str, dropped: int
) -> None:
    codec = load_tiny(tmp_path, ["<|end|>"], template=template).tokens
    messages = [Message("user", "Hello there")]
    prompt = codec.encode_chat(messages)
    assert codec.stable_prefix(messages, prompt) == len(prompt) - dropped


# --- Memory ---


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(("pressure", "kept"), [("warning", 2), ("critical", 1)])
def test_critical_memory_pressure_evicts_unused_prompt_caches(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, pressure: str, kept: int, idle: bool
) -> None:
    loop = StepLoop(tiny)
    first, second = [5] * 100, [6] * 100
    for prompt in (first, second):
        loop.answer(prompt, OFF)
    monkeypatch.setattr(device, "memory_pressure", lambda: pressure)
    if idle:
        loop.idle_step()
        assert len(loop.runner.caches.histories()) == kept
    stats = loop.answer([*second, 7], OFF).stats
    assert stats.cached_tokens >= len(second)
    again = loop.answer(first, OFF).stats
    assert (again.cached_tokens > 0, again.not_cached) == (kept > 1, "evicted" if kept < 2 else "")


def test_an_idle_session_keeps_no_unused_buffers(tiny: Engine) -> None:
    """MLX keeps those of every prompt length, and an editor sends many files."""
    loop = StepLoop(tiny)
    for length in range(20, 220, 20):
        loop.answer(some(length, length), OFF)
    assert mx.get_cache_memory() > 0
    loop.idle_step()
    assert mx.get_cache_memory() == 0


TOKEN = 256  # bytes of the tiny model's KV cache per token


@pytest.fixture
def small(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose memory is counted in tokens; the n-gram index needs none."""
    monkeypatch.setattr(prefill, "INDEX_BYTES", 0)
    needs = MemoryNeeds(0, CacheGrowth(TOKEN), Activations(0, 0, 0, 0), 4096)
    fit = FittedContext(needs, 4096, 1 << 40)
    return altered(tiny, prompt_cache_memory=1 << 30, fit=fit)


def session_with(
    engine: Engine, tokens: int, monkeypatch: pytest.MonkeyPatch, *, forced: bool = False
) -> StepLoop:
    """Return a loop on a machine with memory for some tokens."""
    loop = StepLoop(altered(engine, forced=forced))
    caches = loop.runner.caches

    def left(limit: int | None = None) -> int:
        return tokens * TOKEN - sum(each.nbytes for each in [*caches.in_use, *caches.histories()])

    monkeypatch.setattr(device, "memory_left", left)
    return loop


def texts(loop: StepLoop) -> int:
    return len(loop.runner.caches.histories())


@pytest.mark.long
def test_other_histories_are_evicted_before_a_prompt_is_refused(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = session_with(small, 1700, monkeypatch)
    for seed in (1, 2, 3):
        loop.answer(some(200, seed), OFF)
    assert loop.runner.caches.nbytes == 3 * TOKEN * 256
    assert texts(loop) == 3
    loop.answer(some(1000, 4), OFF)
    assert texts(loop) == 3  # evicting one was enough
    again = loop.answer([*some(1000, 4), 5], OFF)
    assert again.stats.cached_tokens >= 1000
    for length, seed in ((300, 5), (1300, 6)):
        loop.answer(some(length, seed), OFF)
    assert texts(loop) == 1


def test_a_refused_prompt_names_a_length_that_fits_and_loses_nothing(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, kept = session_with(small, 1600, monkeypatch), some(300, 1)
    loop.answer(kept, OFF)
    with pytest.raises(DoesNotFit, match="2,000 tokens") as refused:
        loop.answer([*kept, *some(1700, 2)], OFF)
    assert loop.answer([*kept, 5], OFF).stats.cached_tokens >= len(kept)
    fits = int(str(refused.value).split("shorten it to ")[1].split()[0].replace(",", ""))
    assert fits > 1000
    session_with(small, 1600, monkeypatch).answer(some(fits, 1), OFF)


def test_only_the_prompt_and_a_short_answer_must_fit_and_force_tries_anything(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = session_with(small, 800, monkeypatch)
    request = loop.request(some(200, 1), replace(OFF, max_tokens=3000))
    steps = loop.stream(request)
    while not request.tokens:
        next(steps)
    request.cancel()
    list(steps)
    loop = session_with(small, 100, monkeypatch, forced=True)
    assert loop.answer(some(1000, 1), OFF).tokens


def test_a_memory_limit_counts_all_that_mlx_holds() -> None:
    limit = mx.get_active_memory() + 1000
    assert device.memory_left(limit) <= 1000 < device.memory_left()


# --- Token ids. MLX checks no index, so an id outside the weights may not become one. ---

WEIGHTS = 258  # tokens that the weights have: the bytes and two markers
IDS = st.integers(-3, WEIGHTS + 60) | st.sampled_from([-(2**31), 2**31 - 1, 2**31, 2**40])


@pytest.fixture(scope="module")
def surplus(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A model whose tokenizer has 40 tokens more than its weights."""
    directory, markers = tmp_path_factory.mktemp("model"), ["<|end|>", "<|two|>"]
    write_model(directory, byte_level(markers), end="<|end|>")
    words = [f"word{number}" for number in range(40)]
    byte_level([*markers, *words]).save(str(directory / "tokenizer.json"))
    engine = Engine.load(directory)
    assert engine.tokens.vocabulary == WEIGHTS < len(engine.tokens.tokenizer)
    return engine


@given(
    st.lists(st.tuples(IDS, st.floats(-9, 9)), max_size=6),
    st.lists(IDS, max_size=6).map(tuple),
    st.sampled_from([0.0, 0.8]),
)
def test_invalid_ids_in_sampling_options_have_no_effect(
    bias: list[tuple[int, float]], allowed: tuple[int, ...], temperature: float
) -> None:
    valid = tuple((token, by) for token, by in bias if 0 <= token < WEIGHTS)
    tokens = tuple(token for token in allowed if 0 <= token < WEIGHTS)
    logits = mx.random.normal((3, WEIGHTS), key=mx.random.key(2))
    sampled = []
    for some_bias, some_tokens in ((tuple(bias), allowed), (valid, tokens)):
        options = SamplingOptions(
            temperature, logit_bias=some_bias, allowed_tokens=some_tokens, seed=1
        )
        sampled.append(Sampler(options).sample(logits, mx.array([1, 2, 3]), 5).tolist())
    assert all(0 <= token < WEIGHTS for token in sampled[0])
    if tokens or not allowed:
        assert sampled[0] == sampled[1]
    if tokens:
        assert set(sampled[0]) <= set(tokens)


@given(IDS)
def test_prompts_and_biases_with_invalid_ids_are_refused(surplus: Engine, token: int) -> None:
    loop = StepLoop(surplus)
    biased = replace(OFF, sampling=SamplingOptions(logit_bias=((token, 1.0),)))
    if 0 <= token < WEIGHTS:
        loop.request([token], biased)
        return
    with pytest.raises(DamagedModel, match="its weights have only 258 tokens"):
        loop.request([5, token, 6], OFF)
    with pytest.raises(UsageError, match=f"has 258 tokens, no id {token}"):
        loop.request([5], biased)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_heal_only_with_tokens_of_the_weights(
    surplus: Engine, temperature: float
) -> None:
    completer = Completer(surplus, CompleteOptions(fim="none"))
    assert all(token < WEIGHTS for token in completer.code.compatible_tokens("wor"))
    assert len(completer.code.compatible_tokens("w")) > 0
    for prefix in ("wor", "word1", "w", "x = wo"):
        complete(completer, CompletionRequest(prefix, max_tokens=3, temperature=temperature))


def test_invalid_ids_are_never_drafted(surplus: Engine) -> None:
    options = GenerateOptions(max_tokens=12, draft="fixed")
    plain = fresh(surplus, [5, 6, 7], replace(options, draft="off"))
    stops = altered(surplus, stop_tokens=frozenset({WEIGHTS + 20}))
    context = [[5, 6, 7, plain.tokens[0]], [5, 6, 7, *plain.tokens[:2]]]
    assert StepLoop(stops).answer([5, 6, 7], options, context).tokens == plain.tokens
    for token in (len(surplus.tokens.tokenizer), 2**31, 2**32 - 2):
        context = [[6, 7, *plain.tokens[:2], token, 7]]
        answer = StepLoop(surplus).answer([5, 6, 7], options, context)
        assert answer.tokens == plain.tokens
        assert answer.stats.drafted > 0


# --- Answers that repeat themselves ---


@pytest.mark.parametrize("period", [1, 3, 128, 256, 257])
def test_only_a_long_exact_repetition_is_a_loop(period: int) -> None:
    least = max(768, 6 * period)
    for length in (least - 1, least):
        tokens = [-1, *itertools.islice(itertools.cycle(range(period)), length)]
        assert repeats(tokens) == (length == least and period <= 256)
        assert not repeats([*tokens, -1])


@pytest.mark.long
def test_the_loop_guard_ends_a_looping_answer_and_no_other(tiny: Engine) -> None:
    model = tiny.tokens.encode_text("ab")
    bias = SamplingOptions(logit_bias=((model[0], 1000.0),))
    looping = GenerateOptions(1000, sampling=bias, loop_guard=True)
    answer = fresh(tiny, PROMPT, looping)
    assert answer.finish_reason == "repetition"
    assert 768 <= len(answer.tokens) < 768 + 64
    assert fresh(tiny, PROMPT, replace(looping, loop_guard=False)).finish_reason == "length"
    fixed = Constraint("regex", "a{900}")
    rules = SamplingOptions(constraint=fixed)
    constrained = replace(looping, sampling=rules, stop_tokens=(3,))
    assert len(fresh(tiny, PROMPT, constrained).tokens) >= 900
