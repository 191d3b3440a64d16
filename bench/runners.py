"""Runners that answer a workload once and time it: ours, mlx-lm's plain and speculative loops."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from akunu_py.bench.workloads import Workload
from akunu_py.engine.answer import prompt_rewrites
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model.drafters import DraftModel
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.neural_plan import LearnedDrafter
from akunu_py.types import (
    DEFAULT_DRAFT_TOKENS,
    Drafter,
    DraftMode,
    GenerateOptions,
    Message,
    SamplingOptions,
)

PLAIN = "mlx-lm"  # the baseline, on the same weights as our runners
OFF = "off"
_TURN_BREAK = "\n\n— next turn —\n\n"
_MLX_LM_DRAFT_TOKENS = 3  # the default of mlx-lm's command line


@dataclass(frozen=True, slots=True)
class Conditions:
    """Sampling conditions of one run."""

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy; no other sampling filters
    seed: int = 0


@dataclass(slots=True)
class Run:
    """The measurements of one conversation."""

    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt, output
    decoded: int = 0  # output tokens, without those that the prefill yields
    decode_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)  # time to first token of each answer
    drafted: list[int] = field(default_factory=list)  # tokens of each pass
    accepted: list[int] = field(default_factory=list)
    peak_bytes: int = 0  # of MLX's memory, 0 if not measured
    text: str = ""

    def add(self, prompt: list[int], output: list[int], ttft_s: float, decode_s: float) -> None:
        """Add an answer; the prefill yielded its first token."""
        self.turns.append((prompt, output))
        self.decoded += max(0, len(output) - 1)
        self.ttft_s.append(ttft_s)
        self.decode_s += decode_s


class Runner:
    """A loop that answers workloads."""

    name: str
    baseline = PLAIN  # the runner whose speed is 1.00
    foreign = True  # not our code; its failure does not end the bench

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reference(self, temperature: float) -> str | None:
        """Return the name of the runner whose output must be identical, if any."""
        return None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        raise NotImplementedError


class MlxLm(Runner):
    """mlx-lm's plain loop, `generate_step`, without detokenizing. Turns share the cache."""

    name = PLAIN

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        cache: Any = None
        cached: list[int] = []
        mx.random.seed(conditions.seed)

        def answer(prompt: list[int]) -> list[int]:
            nonlocal cache, cached
            shared = min(common_prefix(cached, prompt), len(prompt) - 1)
            if cached and can_trim_prompt_cache(cache):
                trim_prompt_cache(cache, len(cached) - shared)
            else:
                cache, shared = make_prompt_cache(engine.model), 0
            steps = generate_step(
                mx.array(prompt[shared:]),
                engine.model,
                max_tokens=conditions.max_tokens,
                sampler=make_sampler(temp=conditions.temperature),
                prompt_cache=cache,
            )
            output = _time_answer(run, prompt, steps, engine.tokens.stop_tokens)
            # The cache has the last token, because mlx-lm's step runs ahead.
            cached = [*prompt, *output]
            return output

        return run_conversation(engine, run, workload, answer)


class MlxLmDraftModel(Runner):
    """mlx-lm's speculative loop with a draft model and new caches in each turn."""

    name = f"{PLAIN} + draft model"

    def __init__(self, engine: Engine, draft_model: DraftModel) -> None:
        self._engine, self._draft_model = engine, draft_model

    def reference(self, temperature: float) -> str | None:
        return PLAIN if temperature == 0 else None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        mx.random.seed(conditions.seed)

        def answer(prompt: list[int]) -> list[int]:
            steps = speculative_generate_step(
                mx.array(prompt),
                engine.model,
                self._draft_model.model,
                num_draft_tokens=_MLX_LM_DRAFT_TOKENS,
                max_tokens=conditions.max_tokens,
                sampler=make_sampler(temp=conditions.temperature),
            )
            return _time_answer(run, prompt, steps, engine.tokens.stop_tokens)

        return run_conversation(engine, run, workload, answer)


def run_conversation(
    engine: Engine, run: Run, workload: Workload, answer: Callable[[list[int]], list[int]]
) -> Run:
    """Answer the turns of `workload`; return `run` with their text and the peak memory.

    answer: adds the answer to a prompt to `run`, and returns its tokens.
    """

    def answer_text(messages: list[Message]) -> str:
        output = answer(engine.tokens.encode_chat(messages))
        return str(engine.tokens.tokenizer.decode(output, skip_special_tokens=True)).strip()

    mx.reset_peak_memory()
    run.text = _TURN_BREAK.join(workload.run_turns(answer_text))
    run.peak_bytes = mx.get_peak_memory()
    return run


def _time_answer(
    run: Run, prompt: list[int], steps: Iterator[tuple[Any, ...]], stop: frozenset[int]
) -> list[int]:
    """Run an mlx-lm loop to its end or to a stop token; return its tokens, that one included.

    Adds the answer to `run`, with the seconds to the first token and from there to the end.
    """
    output: list[int] = []
    started = first = time.perf_counter()
    with contextlib.closing(steps):  # type: ignore[type-var]
        for token, *_ in steps:
            output.append(int(token))
            if len(output) == 1:
                first = time.perf_counter()
            if output[-1] in stop:
                break
        ended = time.perf_counter()
    run.add(prompt, output, first - started, ended - first)
    return output


class Akunu(Runner):
    """Our engine, with a new loop for each conversation. Times include detokenizing.

    curve: learned costs of passes, shared by runs. memory: read-only answers by workload.
    """

    foreign = False

    def __init__(
        self,
        engine: Engine,
        mode: DraftMode,
        curve: CostCurve,
        *,
        draft_tokens: int | None = None,
        memory: Mapping[str, AnswerCache] | None = None,
        name: str | None = None,
    ) -> None:
        self._engine, self._mode, self._curve, self._memory = engine, mode, curve, memory
        self._neural_drafters: dict[str, LearnedDrafter] = {}  # learned state, shared by runs
        self.baseline = PLAIN if engine.host_group is None else OFF
        self._draft_tokens = draft_tokens or DEFAULT_DRAFT_TOKENS
        self.name = name or (mode if memory is None else f"{mode} + memory")
        if draft_tokens is not None:
            self.name += f" {draft_tokens}"

    def reference(self, temperature: float) -> str | None:
        """Return the baseline; above temperature 0 akunu without drafts, for the same samples."""
        reference = self.baseline if temperature == 0 else OFF
        return None if reference == self.name else reference

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        memory = self._memory.get(workload.name) if self._memory else None
        loop = StepLoop(engine, UnsavedState(self._curve, memory, self._neural_drafters))
        record_passes(loop, run)
        options = GenerateOptions(
            max_tokens=conditions.max_tokens,
            draft=self._mode,
            sampling=SamplingOptions(temperature=conditions.temperature, seed=conditions.seed),
            draft_tokens=self._draft_tokens,
        )

        def answer(prompt: list[int]) -> list[int]:
            context = prompt_rewrites(engine, prompt, options)
            done = loop.answer(prompt, options, draft_context=context)
            run.add(prompt, list(done.tokens), done.stats.prefill_s, done.stats.decode_s)
            return list(done.tokens)

        return run_conversation(engine, run, workload, answer)


def record_passes(loop: StepLoop, run: Run) -> None:
    """Add all later passes of `loop` to `run`."""
    loop.runner.drafters.wrap = lambda drafter, _: cast(Drafter, RecordingDrafter(drafter, run))


class RecordingDrafter:
    """A `Drafter` that records the draft and accepted lengths of another one."""

    def __init__(self, drafter: Drafter, run: Run) -> None:
        self._drafter, self._run = drafter, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def observe(self, drafted: int, accepted: int, *measured: Any, **options: Any) -> None:
        self._drafter.observe(drafted, accepted, *measured, **options)
        self._run.drafted.append(drafted)
        self._run.accepted.append(accepted)
