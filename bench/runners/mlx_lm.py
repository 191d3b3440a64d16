"""mlx-lm's loops as runners: the plain one, and speculative decoding with a draft model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from akunu_py.bench.runners import PLAIN, TURN_BREAK, Conditions, Run
from akunu_py.bench.workloads import Workload
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import UsageError
from akunu_py.types import Message

_DRAFT_TOKENS = 3  # the default of mlx-lm's command line


class MlxLm:
    """mlx-lm's plain loop, `generate_step`, without detokenizing. Turns share the cache."""

    name = baseline = PLAIN
    foreign = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reference(self, temperature: float) -> str | None:
        return None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        cache = make_prompt_cache(engine.model)
        cached: list[int] = []
        mx.random.seed(conditions.seed)

        def answer(messages: list[Message]) -> str:
            nonlocal cache, cached
            prompt = engine.tokens.encode_chat(messages)
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
            return decode_text(engine, output)

        run_conversation(run, workload, answer)
        return run


class MlxLmDraftModel:
    """mlx-lm's speculative loop with a draft model and new caches in each turn."""

    name = f"{PLAIN} + draft model"
    baseline = PLAIN
    foreign = True

    def __init__(self, engine: Engine, draft_model: Engine) -> None:
        """Raises UsageError if the vocabularies of the models differ."""
        if engine.tokens.tokenizer.get_vocab() != draft_model.tokens.tokenizer.get_vocab():
            raise UsageError(
                f"{draft_model.name} cannot draft for {engine.name}: their vocabularies differ; "
                "choose a smaller model of the same family"
            )
        self._engine, self._draft_model = engine, draft_model

    def reference(self, temperature: float) -> str | None:
        return PLAIN if temperature == 0 else None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        engine, run = self._engine, Run()
        mx.random.seed(conditions.seed)

        def answer(messages: list[Message]) -> str:
            prompt = engine.tokens.encode_chat(messages)
            steps = speculative_generate_step(
                mx.array(prompt),
                engine.model,
                self._draft_model.model,
                num_draft_tokens=_DRAFT_TOKENS,
                max_tokens=conditions.max_tokens,
                sampler=make_sampler(temp=conditions.temperature),
            )
            return decode_text(engine, _time_answer(run, prompt, steps, engine.tokens.stop_tokens))

        run_conversation(run, workload, answer)
        return run


def run_conversation(run: Run, workload: Workload, answer: Callable[[list[Message]], str]) -> None:
    """Answer the turns of `workload`; store text and peak memory in `run`."""
    mx.reset_peak_memory()
    run.text = TURN_BREAK.join(workload.run_turns(answer))
    run.peak_bytes = mx.get_peak_memory()


def decode_text(engine: Engine, tokens: list[int]) -> str:
    """Return the text of an answer for the prompt of the next turn."""
    return str(engine.tokens.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


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
