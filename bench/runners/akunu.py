"""Our engine as a runner, and a record of the drafts of its passes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from akunu_py.bench.runners import OFF, PLAIN, Conditions, Passes, Run
from akunu_py.bench.runners.mlx_lm import decode_text, run_conversation
from akunu_py.bench.workloads import Workload
from akunu_py.decoding.generate.answer_jobs import prompt_rewrites
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.model.engine import Engine
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


class Akunu:
    """Our engine, with a new session for each conversation. Times include detokenizing.

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
        self.name: str = name or (mode if memory is None else f"{mode} + memory")
        if draft_tokens is not None:
            self.name += f" {draft_tokens}"

    def reference(self, temperature: float) -> str | None:
        """Return the baseline; above temperature 0 akunu without drafts, for the same samples."""
        reference = self.baseline if temperature == 0 else OFF
        return None if reference == self.name else reference

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        memory = self._memory.get(workload.name) if self._memory else None
        session = Session(engine, UnsavedState(self._curve, memory, self._neural_drafters))
        record_passes(session, run.passes)
        options = GenerateOptions(
            max_tokens=conditions.max_tokens,
            draft=self._mode,
            sampling=SamplingOptions(temperature=conditions.temperature, seed=conditions.seed),
            draft_tokens=self._draft_tokens,
        )

        def answer(messages: list[Message]) -> str:
            prompt = engine.tokens.encode_chat(messages)
            context = prompt_rewrites(engine, prompt, options)
            done = session.generate(prompt, options, context).answer()
            run.add(prompt, list(done.tokens), done.stats.prefill_s, done.stats.decode_s)
            return decode_text(engine, list(done.tokens))

        run_conversation(run, workload, answer)
        return run


def record_passes(session: Session, passes: Passes) -> None:
    """Add all later passes of `session` to `passes`."""
    session.drafting.wrap = lambda drafter: RecordingDrafter(drafter, passes)


class RecordingDrafter:
    """Wraps a `Drafter`; records draft lengths, accepted lengths and drafting time."""

    def __init__(self, drafter: Drafter, passes: Passes) -> None:
        self._drafter = drafter
        self._passes = passes
        self.pipelines = drafter.pipelines
        self._passed = False  # the next tokens come from a pass, not from the prompt

    def extend(self, tokens: Sequence[int]) -> None:
        started = time.perf_counter()
        self._drafter.extend(tokens)
        if self._passed:
            self._passes.draft_s += time.perf_counter() - started
        self._passed = False

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        started = time.perf_counter()
        draft = self._drafter.propose(limit, ahead=ahead)
        self.pipelines = self._drafter.pipelines
        self._passes.draft_s += time.perf_counter() - started
        return draft

    def offer(self, limit: int) -> list[float]:
        return self._drafter.offer(limit)

    def take(self, count: int) -> list[int]:
        return self._drafter.take(count)

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        started = time.perf_counter()
        self._drafter.observe(drafted, accepted, rows, seconds, pipelined=pipelined)
        self._passed = True
        passes = self._passes
        passes.draft_s += time.perf_counter() - started
        passes.drafted.append(drafted)
        passes.accepted.append(accepted)
