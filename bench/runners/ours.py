"""Who is measured: mlx-lm's loops and ours, on the same weights. Peers of other makers are
`bench.peers`.

Owns one answer of each, timed. Refuses to repeat, to compare and to print.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from akunu_py.bench.runners.passes import Passes
from akunu_py.bench.workloads import Workload
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.learned import LearnedState
from akunu_py.decoding.session import Session
from akunu_py.decoding.target import common_prefix
from akunu_py.errors import UsageError
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.memory import Memory
from akunu_py.types import (
    DEFAULT_DRAFT_TOKENS,
    DraftMode,
    GenerateOptions,
    Message,
    SamplingOptions,
)

PLAIN = "mlx-lm"
OFF = "off"
TURN_BREAK = "\n\n— next turn —\n\n"
_DRAFT_MODEL_TOKENS = 3  # what mlx-lm's own command line drafts


@dataclass(frozen=True, slots=True)
class Conditions:
    """How to answer. temperature 0 is greedy; above it nothing else filters."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Run:
    """One conversation held. turns: (prompt, tokens said) of each answer.

    decoded: tokens said after the first of each answer, which comes from reading the prompt.
    decode_s: how long those took. ttft_s: time to the first token of each answer.
    """

    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    decoded: int = 0
    decode_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    passes: Passes = field(default_factory=Passes)
    peak_bytes: int = 0
    text: str = ""

    def add(
        self, prompt: list[int], said: list[int], ttft_s: float, decode_s: float, at_first: int = 1
    ) -> None:
        """Adds an answer, `at_first` of whose tokens came from reading the prompt."""
        self.turns.append((prompt, said))
        self.decoded += max(0, len(said) - at_first)
        self.ttft_s.append(ttft_s)
        self.decode_s += decode_s


class Contestant(Protocol):
    """baseline: the name of whose speed counts as 1.00. foreign: what it runs is not ours, so
    that it may fail without ending the bench."""

    name: str
    baseline: str
    foreign: bool

    def reference(self, temperature: float) -> str | None:
        """Who must say the same tokens; None for nobody."""

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        """Holds the conversation of `workload`."""


class MlxLm:
    """mlx-lm's plain loop, `generate_step`. Like its own chat, it keeps the cache from turn to
    turn. Detokenising is not part of it."""

    name = baseline = PLAIN
    foreign = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reference(self, temperature: float) -> str | None:
        return None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        cache = make_prompt_cache(engine.model)
        held: list[int] = []
        mx.random.seed(conditions.seed)
        mx.reset_peak_memory()

        def answer(messages: list[Message]) -> str:
            nonlocal cache, held
            prompt = engine.encode_chat(messages)
            shared = min(common_prefix(held, prompt), len(prompt) - 1)
            if held and can_trim_prompt_cache(cache):
                trim_prompt_cache(cache, len(held) - shared)
            else:
                cache, shared = make_prompt_cache(engine.model), 0
            steps = generate_step(
                mx.array(prompt[shared:]),
                engine.model,
                max_tokens=conditions.max_tokens,
                sampler=make_sampler(temp=conditions.temperature),
                prompt_cache=cache,
            )
            said = timed(run, prompt, steps, engine.stop_tokens)
            # The token said last is in the cache already: its step runs ahead.
            held = [*prompt, *said]
            return decoded_text(engine, said)

        run.text = TURN_BREAK.join(workload.talk(answer))
        run.peak_bytes = mx.get_peak_memory()
        return run


class MlxLmDraftModel:
    """mlx-lm's speculative loop with a small model that drafts, on fresh caches each turn."""

    name = f"{PLAIN} + draft model"
    baseline = PLAIN
    foreign = True

    def __init__(self, engine: Engine, small: Engine) -> None:
        """Raises UsageError where the two models do not share their tokens."""
        if engine.tokenizer.get_vocab() != small.tokenizer.get_vocab():
            raise UsageError(
                f"{small.name} cannot draft for {engine.name}: their vocabularies differ; "
                "take a smaller model of the same family"
            )
        self._engine, self._small = engine, small

    def reference(self, temperature: float) -> str | None:
        return PLAIN if temperature == 0 else None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        mx.random.seed(conditions.seed)
        mx.reset_peak_memory()

        def answer(messages: list[Message]) -> str:
            prompt = engine.encode_chat(messages)
            steps = speculative_generate_step(
                mx.array(prompt),
                engine.model,
                self._small.model,
                num_draft_tokens=_DRAFT_MODEL_TOKENS,
                max_tokens=conditions.max_tokens,
                sampler=make_sampler(temp=conditions.temperature),
            )
            return decoded_text(engine, timed(run, prompt, steps, engine.stop_tokens))

        run.text = TURN_BREAK.join(workload.talk(answer))
        run.peak_bytes = mx.get_peak_memory()
        return run


class Ours:
    """Our engine, each conversation in a fresh session. Detokenising is part of it.

    curve: what is known of the costs of passes; what the runs teach it stays.
    memory: answers that may be known beforehand, by workload; it is read, and learns nothing.
    """

    baseline = PLAIN
    foreign = False

    def __init__(
        self,
        engine: Engine,
        mode: DraftMode,
        curve: CostCurve,
        *,
        draft_tokens: int | None = None,
        memory: Mapping[str, Memory] | None = None,
    ) -> None:
        self._engine, self._mode, self._curve, self._memory = engine, mode, curve, memory
        self._draft_tokens = draft_tokens or DEFAULT_DRAFT_TOKENS
        self.name: str = mode if memory is None else f"{mode} + memory"
        if draft_tokens is not None:
            self.name += f" {draft_tokens}"

    def reference(self, temperature: float) -> str | None:
        """At temperature 0 mlx-lm's loop; above it our own plain loop, which draws likewise."""
        return PLAIN if temperature == 0 else None if self._mode == OFF else OFF

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        memory = self._memory.get(workload.name) if self._memory else None
        session = Session(engine, Lent(self._curve, memory))
        session.drafting.wrap = run.passes.watch
        options = GenerateOptions(
            max_tokens=conditions.max_tokens,
            draft=self._mode,
            sampling=SamplingOptions(temperature=conditions.temperature, seed=conditions.seed),
            draft_tokens=self._draft_tokens,
        )
        mx.reset_peak_memory()

        def answer(messages: list[Message]) -> str:
            prompt = engine.encode_chat(messages)
            done = session.generate(prompt, options).answer()
            run.add(prompt, list(done.tokens), done.stats.prefill_s, done.stats.decode_s)
            return decoded_text(engine, list(done.tokens))

        run.text = TURN_BREAK.join(workload.talk(answer))
        run.peak_bytes = mx.get_peak_memory()
        return run


class Lent(LearnedState):
    """What a session may know and not keep: a curve, and a memory. Nothing touches the disk."""

    def __init__(self, curve: CostCurve, memory: Memory | None = None) -> None:
        self.curve = curve
        self.memory = memory
        self.warnings = []

    def remember(self, tokens: Any) -> None:
        """Forgets `tokens`: an answer that was heard once would be known the next time."""

    def save_curve(self) -> None:
        """Keeps nothing: the bench is not how the machine is used."""


def timed(
    run: Run, prompt: list[int], steps: Iterator[tuple[Any, ...]], stop: frozenset[int]
) -> list[int]:
    """Runs an mlx-lm loop to its end, or a stop token, and adds it to `run`."""
    said: list[int] = []
    started = first = time.perf_counter()
    with contextlib.closing(steps):  # type: ignore[type-var]
        for token, *_ in steps:
            said.append(int(token))
            if len(said) == 1:
                first = time.perf_counter()
            if said[-1] in stop:
                break
        ended = time.perf_counter()
    run.add(prompt, said, first - started, ended - first)
    return said


def decoded_text(engine: Engine, tokens: list[int]) -> str:
    """An answer's text, as it goes into the prompt of the next turn."""
    return str(engine.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
