"""Requests in the real step loop, and the tokens that mlx-lm's own loop generates instead."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from akunu_py.engine import batched_pass, kv_cache
from akunu_py.engine.batched_pass import why_not_batched
from akunu_py.engine.drafters.learned_state import LearnedState, UnsavedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, Failed, Finished, PrefillProgress
from akunu_py.engine.histories.prompt_cache_store import DiskLimits
from akunu_py.engine.job import JobHandle
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.request import Request, Status, Step, cut
from akunu_py.engine.sampling import Sampler
from akunu_py.engine.target import Target
from akunu_py.types import (
    NEURAL_MODES,
    Answer,
    Constraint,
    Drafter,
    DraftMode,
    GenerateOptions,
    SamplingOptions,
    Stats,
)
from tests.support.engines import altered
from tests.support.families import build
from tests.support.family_table import FAMILIES
from tests.support.targets import Counting, some
from tests.support.tiny import VOCABULARY, Adversary
from tests.support.tiny_fim import byte_level, write_model

PLENTY = 1 << 30
GREEDY = SamplingOptions()
SEEDED = SamplingOptions(
    0.9, 0.95, 0.02, 16, 1.2, 0.3, 0.2, 16, logit_bias=((1, 1.0), (7, -2.0)), seed=5
)
CONSTRAINED = SamplingOptions(0.8, seed=3, constraint=Constraint("regex", "([a-e][0-9]){60}"))
SAMPLED = SamplingOptions(0.9, 0.95, 0.02, 16, seed=5)  # without penalties
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "constrained": CONSTRAINED, "sampled": SAMPLED}


END = VOCABULARY - 1  # the token that ends answers, if `engine_of` gets it as a stop token


def load_tiny_letters(directory: Path) -> Engine:
    """Load a tiny model with a tokenizer of VOCABULARY tokens: one per byte, and END."""
    tokenizer = byte_level(["<|end|>"], letters=END)
    return Engine.load(write_model(directory, tokenizer, end="<|end|>"), name="tiny")


def engine_of(
    tiny: Engine, name: str, kv_bits: int | None = None, model: Any = None, **more: Any
) -> Engine:
    """Return `tiny` with the model of family `name`, or `model`, and with other fields."""
    model = model or build(name)
    entries = kv_cache.new_cache(model, kv_bits)
    return altered(
        tiny,
        **{
            "model": model,
            "weights": name,
            "vocabulary": VOCABULARY,
            "stop_tokens": frozenset(),
            "kv_bits": kv_bits,
            "no_draft_reason": kv_cache.no_rollback_reason(entries),
            "recurrent": kv_cache.is_recurrent(entries),
            "needs_checkpoints": kv_cache.needs_checkpoints(entries),
            "prompt_cache_memory": PLENTY,
        }
        | more,
    )


def plain_tokens(
    model: Any, prompt: Sequence[int], count: int, sampling: SamplingOptions = GREEDY
) -> list[int]:
    """Return the tokens of mlx-lm's own loop, without drafts and with a new cache."""
    return list(_plain(_Model(model), None, tuple(prompt), count, sampling, ()))


def plain(
    engine: Engine, prompt: Sequence[int], count: int, sampling: SamplingOptions = GREEDY
) -> list[int]:
    """Return the same for an engine: the answer ends with a stop token and fits a grammar."""
    texts: tuple[str, ...] = ()
    if sampling.constraint is not None:
        texts = tuple(engine.tokens.decode([i]) for i in range(engine.tokens.vocabulary))
    key = _Model(engine.model)
    found = list(_plain(key, engine.plan.kv_bits, tuple(prompt), count, sampling, texts))
    return cut(found, engine.tokens.stop_tokens)


class _Model:
    """A model, as a key for `cache`."""

    def __init__(self, model: Any) -> None:
        self.model = model.model if isinstance(model, Counting) else model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and self.model is other.model

    def __hash__(self) -> int:
        return id(self.model)


@cache
def _trial(key: _Model, kv_bits: int | None) -> str | None:
    return why_not_batched(key.model, kv_bits)


def _trial_of(model: Any, kv_bits: int | None) -> str | None:
    return _trial(_Model(model), kv_bits)


@cache
def _plain(
    key: _Model, kv_bits: int | None, prompt: tuple[int, ...], count: int,
    sampling: SamplingOptions, texts: Sequence[str],
) -> tuple[int, ...]:  # fmt: skip
    known, answer = list(prompt), ""
    sampler = Sampler(replace(sampling, constraint=None))

    def choose(_: mx.array, logits: mx.array) -> mx.array:
        """Keep only the token that the sampler draws."""
        nonlocal answer
        if texts:
            fitting = mx.array([_fits(answer, text) for text in texts])
            logits = mx.where(fitting, logits, -mx.inf)
        before = mx.array(known[-max(1, sampler.window) :])
        known.append(int(sampler.sample(logits, before, len(known)).item()))
        answer += texts[known[-1]] if texts else ""
        return mx.where(mx.arange(logits.shape[-1]) == known[-1], 0.0, -mx.inf)[None]

    steps = generate_step(
        mx.array(prompt),
        key.model,
        max_tokens=count,
        prompt_cache=kv_cache.new_cache(key.model, kv_bits),
        logits_processors=[] if sampling == GREEDY else [choose],
    )
    return tuple(int(token) for token, _ in steps)


def _fits(answer: str, text: str) -> bool:
    """Return whether `text` continues letters from a to e and digits in turn."""
    kinds = ("abcde", "0123456789")
    return bool(text) and all(
        letter in kinds[(len(answer) + place) % 2] for place, letter in enumerate(text)
    )


def naive(
    engine: Engine, prompt: list[int], options: GenerateOptions,
    rule: Callable[[list[int], mx.array], mx.array | None],
) -> list[int]:  # fmt: skip
    """Decode without a cache: each step prefills everything again.

    rule: changes the logits [1, vocabulary] after the tokens of the answer; None ends it.
    """
    sampler = Sampler(replace(options.sampling, constraint=None))
    tokens: list[int] = []
    while len(tokens) < options.max_tokens:
        history = mx.array([*prompt, *tokens])
        logits = rule(tokens, engine.model(history[None])[0, -1:])
        if logits is None or (tokens and tokens[-1] in engine.tokens.stop_tokens):
            break
        tokens.append(int(sampler.sample(logits, history, history.shape[0]).item()))
    return tokens


def answers_in_all_modes(
    engine: Engine, prompt: list[int], options: GenerateOptions, truth: Sequence[int],
    seeds: Sequence[int],
) -> list[Answer]:  # fmt: skip
    """Return answers in each draft mode, and with an `Adversary` of each seed; all are `truth`."""
    modes: tuple[DraftMode, ...] = ("off", "fixed", "auto")

    def with_adversary(seed: int) -> Answer:
        loop, adversary = StepLoop(engine), Adversary(prompt, truth, seed)
        loop.runner.drafters.wrap = lambda drafter, target: adversary
        return loop.answer(prompt, replace(options, draft="auto"))

    answers = [StepLoop(engine).answer(prompt, replace(options, draft=m)) for m in modes]
    answers += map(with_adversary, seeds)
    assert all(list(each.tokens) == truth for each in answers)
    return answers


@dataclass(eq=False)
class Submitted:
    """A request, when it is submitted and cancelled, and its results."""

    prompt: list[int]
    options: GenerateOptions
    draft_context: Sequence[Sequence[int]] = ()
    stable: int | None = None  # length of the prefix that the next prompt shares
    after: int = 0  # steps of the loop before it is submitted
    cancel_after: int | None = None  # its own steps before it is cancelled
    short: bool = False
    wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter
    events: list[Event | None] = field(default_factory=list)  # None: a step without events
    evicted: bool = False  # whether it lost its history while it decoded
    request: Request | None = None

    def __call__(self, loop: StepLoop) -> Submitted:
        self.request = loop.request(self.prompt, self.options, self.draft_context, self.stable)
        return self

    def add(self, steps: Sequence[Step]) -> list[Event]:
        events: list[Event] = [step for step in steps if isinstance(step, PrefillProgress)]
        self.evicted |= self.started.status is Status.WAITING and bool(self.tokens)
        if self.started.status is Status.FINISHED:
            events.append(Finished(self.started.finish_reason or "cancelled", self.stats))
        return events

    @property
    def started(self) -> Request:
        assert self.request is not None, self.events
        return self.request

    @property
    def tokens(self) -> list[int]:
        return self.started.tokens

    @property
    def drafted(self) -> int:
        return 0 if self.request is None else self.stats.drafted

    @property
    def stats(self) -> Stats:
        return self.started.stats

    @property
    def last(self) -> Event | None:
        return self.events[-1]


class Served:
    """The engine as front ends drive it: requests come, take turns or share passes, and end.

    All tests of the table reach the product through this class.
    """

    def __init__(
        self, engine: Engine, slots: int = 4, *, clock: Callable[[], float] = time.perf_counter,
        learned: UnsavedState | None = None, chunk_s: float | None = None,
        reserved_tokens: int = 1024,
    ) -> None:  # fmt: skip
        """chunk_s: time of a prefill chunk while other requests run."""
        self.engine = engine
        self.loop = StepLoop(engine, learned, slots)
        self.loop.scheduler.clock = clock
        self.loop.runner.reserved_tokens = reserved_tokens
        if chunk_s is not None:
            self.loop.scheduler.chunk_s = self.loop.scheduler.patience_s = chunk_s
        self.loop.runner.drafters.wrap = self._wrap
        with pytest.MonkeyPatch.context() as patch:  # the trial runs once for each model
            patch.setattr(batched_pass, "why_not_batched", _trial_of)
            self.loop.runner.try_batching()  # else no token trees
        self.steps: list[list[Submitted]] = []  # the requests of each step
        self.drafted = Counter[bool]()  # draft tokens of neural modes; True: in shared passes

    def _wrap(self, drafter: Drafter, target: Target) -> Drafter:
        """Wrap a new drafter as the request with this target says."""
        started = (each for each in self.submitted if each.request is not None)
        return next((e.wrap(drafter) for e in started if e.started.target is target), drafter)

    @property
    def shared(self) -> int:
        """Steps of several requests."""
        return sum(len(each) > 1 for each in self.steps)

    def serve(
        self, requests: Sequence[Submitted], at_step: Callable[[], None] = lambda: None
    ) -> None:
        """Run `requests` to their ends. at_step: called before each step."""
        self.submitted = list(requests)
        waiting = sorted(requests, key=lambda each: each.after)
        running: dict[JobHandle, Submitted] = {}
        start = len(self.steps)
        while waiting or running:
            while waiting and (waiting[0].after <= len(self.steps) - start or not running):
                if len(running) >= self.loop.slots + waiting[0].short:
                    break
                each = waiting.pop(0)
                handle = JobHandle(each, lambda _: None, "", lambda: None, short=each.short)
                running[handle] = each
            at_step()
            self.steps.append([])
            before = {each: each.drafted for each in running.values()}
            for handle, events in (stepped := self.loop.step(list(running))):
                each = running[handle]
                if each.options.draft in NEURAL_MODES:
                    self.drafted[len(stepped) > 1] += each.drafted - before[each]
                each.events += events or [None]
                self.steps[-1].append(each)
                if len(each.events) == each.cancel_after:
                    handle.cancel()
                if events and isinstance(events[-1], Finished | Failed):
                    del running[handle]

    def save(self) -> None:
        """Write all prompt caches that are worth it to disk, as an idle server does."""
        while self.loop.idle_step(lambda: False, None):
            pass


def learned_on_disk(engine: Engine, directory: Path) -> LearnedState:
    """Return the state of a new process, for which every prompt cache is worth its file."""
    limits = DiskLimits(reserve=0)
    learned = LearnedState(directory, "t", "l", answer_cache=False, disk_limits=limits)
    learned.curve.prefill_rate = 1.0
    return learned


LENGTHS = [1, 2, 17, 33, 35, 37, 39]  # of prompts; the families take turns


def prompt_of(name: str) -> list[int]:
    length = LENGTHS[list(FAMILIES).index(name) % len(LENGTHS)]
    return some(length, length)
