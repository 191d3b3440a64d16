"""Requests at the same time: they share passes, memory and time as promised.

tests/engine/test_identity.py compares their tokens with those of plain decoding alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from math import isfinite
from typing import Any
from unittest.mock import Mock, create_autospec

import mlx.core as mx
import mlx.nn as nn
import pytest

from akunu_py.engine import batched_pass, kv_cache
from akunu_py.engine.batched_pass import Part, why_not_batched
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Failed, Finished
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import output_rows
from akunu_py.engine.request import Status
from akunu_py.engine.target import Target
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.planner import JointPlanner
from akunu_py.types import Constraint, Drafter, DraftMode, GenerateOptions, SamplingOptions
from tests.support.engines import altered
from tests.support.families import (
    UNSHARED,
    Cached,
    build,
    every_family,
    families_of_each_kind,
    make,
)
from tests.support.family_table import FAMILIES
from tests.support.identity import PLENTY, Served, Submitted, engine_of, plain
from tests.support.slow import cover
from tests.support.targets import Counting, read, some
from tests.support.tiny import VOCABULARY

BASE = some(500, 1)  # the beginning of many prompts


def submit(
    prompt: Sequence[int], count: int = 12, draft: DraftMode = "auto", **more: Any
) -> Submitted:
    return Submitted(list(prompt), GenerateOptions(count, draft), **more)


def check(engine: Engine, *requests: Submitted) -> None:
    for each in requests:
        assert isinstance(each.last, Finished), each.last
        assert each.tokens == plain(engine, each.prompt, each.options.max_tokens)


class Clock:
    """A clock that moves only when a `Costly` model moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def ticking() -> Callable[[], float]:
    """Return a clock that moves by a second with each call."""
    ticks = count()
    return lambda: float(next(ticks))


class Costly:
    """A model whose passes take `pass_s` seconds of a clock, and more for each row."""

    def __init__(self, model: Any, clock: Clock, pass_s: float) -> None:
        self._model, self._clock, self._pass_s = model, clock, pass_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, *args: Any, **options: Any) -> Any:
        self._clock.now += self._pass_s + 0.0005 * tokens.shape[1]
        return self._model(tokens, *args, **options)


def test_plain_passes_are_launched_before_the_previous_one_is_read(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when requests end: only the first passes wait."""
    observe = create_autospec(JointPlanner.observe, side_effect=JointPlanner.observe)
    monkeypatch.setattr(JointPlanner, "observe", observe)
    requests = [submit(some(9, index), 20 + 4 * index, "off") for index in range(3)]
    Served(engine_of(tiny, "llama")).serve(requests)
    passes = [call.args[1] for call in observe.call_args_list]
    together = [done for done in passes if done.requests == 3]
    assert len(together) >= 18
    assert all(done.pipelined for done in together[2:])


@pytest.mark.long
@pytest.mark.parametrize(("name", "right"), cover(["qwen3_next", "mamba2"], [True, False]))
def test_recurrent_model_drafts_alone_where_that_beats_sharing(
    name: str, right: bool, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shared passes have no drafts. Costs stay those of an average machine."""
    monkeypatch.setattr(CostCurve, "observe", lambda *args, **options: None)
    engine = engine_of(tiny, name)
    requests = [submit(some(12 + index, index), 40) for index in range(3)]
    answer = plain(engine, requests[0].prompt, 40) if right else some(40, 77)
    requests[0].draft_context = [[*requests[0].prompt[-8:], *answer]]
    served = Served(engine, 3)
    served.serve(requests)
    check(engine, *requests)
    assert (requests[0].stats.target_passes < 20) == right
    assert served.shared > 12


def test_facts_say_why_requests_take_turns(tiny: Engine) -> None:
    loop = StepLoop(engine_of(tiny, "llama4"))
    assert not loop.runner.try_batching()
    assert "ChunkedKVCache" in str(loop.facts.not_batched)


@pytest.mark.long
def test_texts_and_logprobs_of_shared_passes_are_those_alone(tiny: Engine) -> None:
    """Grammars, stop texts, penalties, logprobs and filters, each with all others."""
    prompt = tiny.tokens.encode_text("What is it? ")
    number = Constraint("regex", "[0-9]{3,40}")
    choices = [
        GenerateOptions(24, "auto", sampling=SamplingOptions(constraint=Constraint("json"))),
        GenerateOptions(24, "fixed", sampling=SamplingOptions(0.8, seed=3, constraint=number)),
        GenerateOptions(24, "auto", stop=("e",)),
        GenerateOptions(24, "auto", sampling=SamplingOptions(repetition_penalty=1.3, logprobs=2)),
        GenerateOptions(24, "off", sampling=SamplingOptions(0.9, top_p=0.8, seed=8)),
    ]
    requests = [Submitted(prompt, options, after=i) for i, options in enumerate(choices)]
    served = Served(tiny, 8)
    served.serve(requests)
    assert served.shared > 10
    for each in requests:
        loop = StepLoop(tiny)
        alone = loop.request(prompt, each.options)
        list(loop.stream(alone))
        assert each.tokens == alone.tokens
        assert each.started.text == alone.text
        assert [token.text for token in each.started.logprobs] == [
            token.text for token in alone.logprobs
        ]


@pytest.mark.long
@pytest.mark.parametrize(("memory", "name"), cover([PLENTY, 0], ["llama", "qwen3_next"]))
def test_a_prefix_that_another_request_prefills_is_not_prefilled_twice(
    name: str, memory: int, tiny: Engine
) -> None:
    model = Counting(build(name))
    first, second = submit([*BASE, 1]), submit([*BASE, 2, 3])
    engine = engine_of(tiny, name, model=model, prompt_cache_memory=memory)
    served, waiting = Served(engine, 3, clock=ticking(), chunk_s=1e-9), list[bool]()

    def watch() -> None:
        if second.request and second.started.status is Status.WAITING:
            waiting.append(second.started.decodes)

    served.serve([first, second], watch)
    assert len(waiting) > 1
    assert not any(waiting)
    if memory:
        assert second.stats.cached_tokens >= len(BASE) - 16  # the first pass computes the rest
        assert model.rows < len(BASE) + 120
    # The request that the other waits for may be cancelled.
    cancelled = submit(some(400, 7), cancel_after=9)
    third = submit([*some(400, 7), 1])
    served.serve([cancelled, third])
    check(engine, first, second, third)
    assert third.stats.cached_tokens >= 16 * 5


@pytest.mark.long
def test_requests_share_memory_and_wait_for_it(tiny: Engine) -> None:
    engine = engine_of(tiny, "llama")
    limit = 3 * engine.plan.fit.needs.cache.at(256)
    engine = altered(engine, prompt_cache_memory=limit)
    requests = [submit(some(250, seed), 24, after=seed) for seed in range(5)]
    together: set[int] = set()

    def watch() -> None:
        if requests[0].request is None:
            return
        caches = requests[0].request.target.caches
        reserved = [each.reserved for each in caches.in_use if each.reserved]
        together.add(len(reserved))
        assert len(reserved) < 2 or sum(reserved) <= limit

    served = Served(engine, 5, clock=ticking(), chunk_s=1e-9, reserved_tokens=5)
    served.serve(requests, watch)
    assert max(together) == 3  # until the answers cross 256 tokens
    check(engine, *requests)


@pytest.mark.long
def test_prefill_of_a_long_prompt_takes_half_of_the_time(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes of the model alone move the clock."""
    clock, writers, pass_s = Clock(), 3, 0.3
    monkeypatch.setattr(Target, "clock", lambda self: clock.now)
    model = Costly(build("llama"), clock, pass_s)
    engine = engine_of(tiny, "llama", model=model, context_length=40_000)
    long = submit(some(1500, 9), 1, "off", after=12)
    answers = [submit(some(30, seed), 60 // writers, "off") for seed in range(writers)]
    times: list[float] = []
    served = Served(engine, clock=clock)
    served.serve([*answers, long], lambda: times.append(clock.now))
    times.append(clock.now)
    took = [after - before for before, after in pairwise(times)]
    prefill = [number for number, requests in enumerate(served.steps) if long in requests]
    # A chunk is longer than 0.2 s or two passes if its fixed cost would be over a quarter of it.
    chunk_s, first, last = max(0.2, 4 * pass_s), prefill[0], prefill[-1]
    chunks = [number for number in prefill[:-1] if took[number] > 0.0]
    assert len(chunks) >= 5
    assert max(took[number] for number in chunks) <= chunk_s
    assert 1 not in [after - before for before, after in pairwise(chunks[:-1])]  # passes between
    # The prompt does not wait either: it gets half of the time.
    assert sum(took[first : last + 1]) <= 2 * sum(took[i] for i in prefill) + 2 * pass_s


@pytest.mark.parametrize("requests", [1, 2])
def test_costs_are_right_where_launching_a_pass_takes_its_time(
    requests: int, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX on a CPU waits for most of a pass that it launches, even while another one runs."""
    clock, pass_s = Clock(), 0.1
    monkeypatch.setattr(Target, "clock", lambda self: clock.now)
    known = list[tuple[int, float]]()

    def observe(self: CostCurve, rows: int, seconds: float, context: int) -> None:
        if isfinite(seconds):
            known.append((rows, seconds))

    monkeypatch.setattr(CostCurve, "observe", observe)
    engine = engine_of(tiny, "llama", model=Costly(build("llama"), clock, pass_s))
    prompt = some(24, 3)
    sent = [submit(prompt * 3, 60) for _ in range(requests)]
    for each in sent:
        each.draft_context = [plain(engine, each.prompt, 60)[:24]]  # drafts, then plain passes
    Served(engine, clock=clock).serve(sent)
    assert known
    assert [seconds for _, seconds in known] == pytest.approx([pass_s] * len(known), rel=0.1)


def test_plain_decoding_computes_one_row_for_each_token(tiny: Engine) -> None:
    model = Counting(build("llama"))
    request, served = submit(some(20, 1), 50, "off"), Served(engine_of(tiny, "llama", model=model))
    before = model.rows
    served.serve([request])
    assert len(request.tokens) == 50
    assert model.rows - before == 20 + 50 - 1


@pytest.mark.long
def test_recurrent_states_are_joined_once_while_the_requests_are_the_same(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, reused = batched_pass._StateView, list[bool]()
    values, store, load = dict[int, mx.array](), view.__setitem__, view.__getitem__

    def storing(self: Any, index: int, value: mx.array) -> None:
        values[id(value)] = value
        store(self, index, value)

    def loading(self: Any, index: int) -> mx.array:
        found = load(self, index)
        reused.append(found is values.get(id(found)))
        return found

    monkeypatch.setattr(view, "__setitem__", storing)
    monkeypatch.setattr(view, "__getitem__", loading)
    engine = engine_of(tiny, "qwen3_next")
    served = Served(engine)
    requests = [submit(some(20, number), 24 + 14 * number, "off") for number in range(3)]
    served.serve(requests)
    check(engine, *requests)
    joined = reused.count(False)
    assert joined > 0
    assert len(reused) >= 6 * joined  # joined anew only when a request joins or ends
    assert served.loop.runner._joint == {}


@pytest.mark.parametrize("new_tokens", [1, 64, 65])
def test_few_new_prompt_tokens_join_the_first_decode_pass(tiny: Engine, new_tokens: int) -> None:
    clock = Clock()
    engine = engine_of(tiny, "llama", model=Costly(build("llama"), clock, 1000.0))
    loop = StepLoop(engine)
    first = loop.answer(BASE[:100], GenerateOptions(3, "off"))
    passes = clock.now // 1000
    prompt = [*BASE[:100], *first.tokens[:2], *some(new_tokens, 8)]
    later = loop.answer(prompt, GenerateOptions(1, "off"))
    assert later.stats.cached_tokens == 102
    assert clock.now // 1000 - passes == (1 if new_tokens <= 64 else 2)


@pytest.mark.long
@pytest.mark.parametrize("part", ["planning", "pass"])
def test_a_failed_shared_pass_fails_its_requests_and_no_later_ones(
    part: str, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning fails, or the forward pass; the step loop continues with new caches."""
    engine = engine_of(tiny, "llama")
    served = Served(engine)
    assert served.loop.runner.try_batching()
    run, fail = batched_pass.run, Mock(side_effect=RuntimeError("out of memory"))
    with monkeypatch.context() as patch:
        if part == "planning":
            patch.setattr(JointPlanner, "lengths", fail)
        else:
            patch.setattr(
                batched_pass, "run", lambda model, parts: (fail if parts[1:] else run)(model, parts)
            )
        bad = [submit(some(30, seed), 20) for seed in (1, 2)]
        served.serve(bad)
    assert all(isinstance(each.last, Failed) for each in bad)
    good = [submit(some(30, seed), 20) for seed in (1, 2)]
    served.serve(good)
    check(engine, *good)


def test_a_request_gets_the_session_whose_drafter_knows_its_conversation(tiny: Engine) -> None:
    """Conversations in turn, some at the same time: no drafter learns a conversation again."""
    learned: list[int] = []

    def watch(drafter: Drafter) -> Drafter:
        extend = drafter.extend

        def counting(tokens: Sequence[int]) -> None:
            learned.append(len(tokens))
            extend(tokens)

        drafter.extend = counting  # type: ignore[method-assign]
        return drafter

    served = Served(tiny, 3)
    conversations = [some(200 + 50 * number, number) for number in range(3)]
    for numbers in [(0, 1, 2), (2,), (1,), (0,), (2, 0), (1, 2, 0), (0,), (1,)]:
        served.serve([submit(conversations[number], 4, wrap=watch) for number in numbers])
        if numbers == (0, 1, 2):  # all are new
            learned.clear()
        for number in numbers:
            conversations[number] += some(20, len(learned))
    assert max(learned) < 100


@families_of_each_kind()
def test_trial_decides_by_family(name: str) -> None:
    assert (why_not_batched(build(name)) is None) == (name not in UNSHARED)


def ignore_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all requests of a shared pass the same positions."""
    start = batched_pass._AttentionView.__init__

    def without_offset(self: Any, *args: Any) -> None:
        start(self, *args)
        self.offset = mx.zeros_like(self.offset)

    monkeypatch.setattr(batched_pass._AttentionView, "__init__", without_offset)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_trial_finds_a_layer_that_ignores_its_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_requests(monkeypatch)
    assert why_not_batched(build(name)) == "its layers give other results in a batch"


@pytest.mark.parametrize(
    ("layers", "dtype", "seed"),
    [(2, mx.bfloat16, 1), pytest.param(4, mx.float16, 0, marks=pytest.mark.long)],
)
def test_trial_tolerates_the_rounding_of_a_mixture_of_experts(
    layers: int, dtype: mx.Dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels whose results depend on the number of rows, as a GPU's do."""

    def rounded(product: Callable[..., mx.array], inputs: mx.array, *args: Any, **more: Any) -> Any:
        exact = product(inputs, *args, **more)
        rows = inputs.size // inputs.shape[-1]
        units = mx.random.randint(-1, 2, exact.shape, key=mx.random.key(rows)) if rows > 1 else 0
        return (exact.astype(mx.float32) * (1 + mx.finfo(dtype).eps * units)).astype(dtype)

    for name in ("quantized_matmul", "gather_qmm"):
        monkeypatch.setattr(mx, name, partial(rounded, getattr(mx, name)))
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    sizes = {"hidden_size": 64, "num_local_experts": 8, "num_hidden_layers": layers}
    model, _ = make(replace(FAMILIES["gpt_oss"], seed=seed), layer_types=kinds, **sizes)
    nn.quantize(model, 32, 4)
    model.set_dtype(dtype)
    assert why_not_batched(model) is None
    ignore_requests(monkeypatch)
    assert why_not_batched(model) == "its layers give other results in a batch"


@contextmanager
def counted_rows(model: Any) -> Iterator[list[int]]:
    """The numbers of rows that are multiplied with a row of weights for each token."""
    counts: list[int] = []
    inner = {id(module) for path, module in model.named_modules() if "layers." in path}
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((nn.Linear, "__call__"), (nn.Embedding, "as_linear")):
            plain = getattr(owner, name)

            def counting(module: Any, inputs: mx.array, plain: Any = plain) -> mx.array:
                if module.weight.shape[0] == VOCABULARY and id(module) not in inner:
                    counts.append(inputs.size // inputs.shape[-1])
                return plain(module, inputs)

            patch.setattr(owner, name, counting)
        yield counts


def model_of(name: str) -> Any:
    """The model itself where the family has another cache than its own."""
    model = build(name)
    return model.model if isinstance(model, Cached) else model


def run_trial(model: Any) -> None:
    """Have the output head of `model` tried, as its first pass does."""
    output_rows.run(model, mx.zeros((1, 1), mx.int32), None, lambda rows: rows)


@every_family
def test_the_head_computes_only_the_wanted_rows(name: str) -> None:
    target, prompt = Target(model_of(name)), some(70, 1)
    target.reuse_prefix(prompt)
    read(target)
    run_trial(target.model)
    for drafted in ([], [1, 2, 3]):
        pending = list(target.pending) if target.history.needs_checkpoints else prompt[-17:]
        part = target.part(mx.array([*pending, *drafted]), drafted)
        before = kv_cache.pass_state(target.cache)
        with counted_rows(target.model) as counts:
            mx.eval(batched_pass.run(target.model, [part]))
        assert counts == [1 + len(drafted)]
        kv_cache.roll_back(target.cache, before, part.tokens.size, 0)


@families_of_each_kind()
def test_a_shared_pass_computes_the_wanted_rows_of_each_request(name: str) -> None:
    model = model_of(name)
    caches = [kv_cache.new_cache(model) for _ in range(2)]
    if name in UNSHARED or kv_cache.is_recurrent(caches[0]):
        return
    run_trial(model)
    for cache in caches:
        mx.eval(model(mx.array([some(20, 1)]), cache=cache))
    parts = [
        Part(mx.array(some(rows, rows)), cache, wanted)
        for rows, wanted, cache in zip((9, 4), (1, 3), caches, strict=True)
    ]
    with counted_rows(model) as counts:
        batched_pass.run(model, parts)
    assert counts == [4]
