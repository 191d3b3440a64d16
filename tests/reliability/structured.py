"""`python -m tests.reliability.structured FILE [ANSWERS [TOKENS [START]]]`: answers beside
those of naive decoding.

FILE: as for `tests.reliability.schemas`. The starter answers to ANSWERS schemas (default 10),
evenly apart, with TOKENS tokens (default 48), at temperature 0 and 0.8: without drafts, with them,
and as mlx-lm's model alone has it, each token masked by a matcher that only goes forward. All must
have the same tokens, of JSON that fits, or of the beginning of some. Passes are counted by source,
as `akunu bench structured` does. The order is such that any part of them is spread over FILE; START
leaves out as many, which were done before.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.bench.curve import CURVES, parse_curve
from akunu_py.bench.replay import ReplayCounts
from akunu_py.bench.structured import count
from akunu_py.bench.trace import TraceItem
from akunu_py.decoding.constraint.matcher import ConstraintMatcher
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.sampling import Sampler
from akunu_py.decoding.session import Session
from akunu_py.errors import UsageError
from akunu_py.models import store
from akunu_py.types import Constraint, DraftMode, GenerateOptions, Message, SamplingOptions
from tests.support.json_schema import is_valid

TEMPERATURES = (0.0, 0.8)
_SHOWN = 200  # characters of a schema that the prompt has


def main(path: Path, answers: int, length: int, start: int) -> int:
    schemas = json.loads(gzip.decompress(path.read_bytes()))["schemas"]
    engine = Engine.load(store.get("starter").path)
    counts: dict[str, dict[str, ReplayCounts]] = {}
    wrong = done = cut = refused = 0
    for number in _spread(answers)[start:]:
        start += 1
        entry = schemas[number * len(schemas) // answers]
        source = entry["name"].split("---")[0].split("_")[0]
        started = time.perf_counter()
        try:
            found = answered(engine, entry["schema"], length)
        except UsageError as error:
            refused += 1
            print(f"{start} {entry['name']}: {error}", flush=True)
            continue
        for answer in found:
            done += 1
            cut += not answer.whole
            fits = not answer.whole or _fits(entry["schema"], json.loads(answer.text))
            wrong += not (answer.same and fits)
            item = TraceItem(answer.prompt, answer.by_way["auto"])
            constraint = Constraint("json_schema", json.dumps(entry["schema"]))
            curve = parse_curve(CURVES["m5max"])
            count(engine, constraint, item, curve, counts.setdefault(source, {}))
            verdict = ("same" if answer.same else "DIFFERENT") + (" fits" * fits or " DOES NOT FIT")
            print(f"{start} {entry['name']} {answer.temperature}: {verdict}", flush=True)
        print(f"{time.perf_counter() - started:.0f} s; {done} answers, {wrong} wrong", flush=True)
    for source, by_drafter in counts.items():
        rates = (
            f"{name} {each.tokens / max(1, each.passes):.2f}" for name, each in by_drafter.items()
        )
        print(source, *rates)
    print(f"{done} answers, {cut} of them cut off, {wrong} wrong; {refused} schemas refused")
    return int(wrong > 0)


def _spread(count: int) -> list[int]:
    """The numbers up to `count`, those that follow each other far apart."""
    step = next(step for step in range(count * 5 // 8, count * 5) if math.gcd(step, count) == 1)
    return [number * step % count for number in range(count)]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer. by_way: its tokens, by how they were made. whole: whether it was not cut off."""

    temperature: float
    prompt: tuple[int, ...]
    by_way: dict[str, tuple[int, ...]]
    text: str
    whole: bool

    @property
    def same(self) -> bool:
        return len(set(self.by_way.values())) == 1


def answered(engine: Engine, schema: Any, length: int) -> list[Answered]:
    """Answers at each temperature. Raises UsageError where the schema is refused."""
    text = json.dumps(schema)
    ask = f"Answer with an example of JSON that fits this JSON schema:\n\n{text[:_SHOWN]}"
    prompt = engine.encode_chat([Message("user", ask)])
    constraint = Constraint("json_schema", text)
    modes: tuple[DraftMode, ...] = ("off", "auto")
    first = Session(engine)  # reads the prompt; the others learn nothing from what was answered
    found = []
    reference = Naive(engine, prompt, constraint)
    for temperature in TEMPERATURES:
        sampling = SamplingOptions(temperature=temperature, seed=7, constraint=constraint)
        answers = {}
        for mode in modes:
            session = Session(engine, beside=first)
            options = GenerateOptions(length, mode, sampling=sampling)
            answers[mode] = session.generate(prompt, options).answer()
            session.release()
        by_way: dict[str, tuple[int, ...]] = {mode: each.tokens for mode, each in answers.items()}
        last = answers["auto"]
        by_way["naive"] = reference.answer(sampling, length, last.tokens)
        whole = last.finish_reason == "stop"
        found.append(Answered(temperature, tuple(prompt), by_way, last.text, whole))
    return found


class Naive:
    """Masks and samples one token after the other, with nothing kept but mlx-lm's cache."""

    def __init__(self, engine: Engine, prompt: Sequence[int], constraint: Constraint) -> None:
        self._engine, self._prompt, self._constraint = engine, list(prompt), constraint
        self._cache = make_prompt_cache(engine.model)
        engine.model(mx.array([self._prompt[:-1]]), cache=self._cache)
        mx.eval([entry.state for entry in self._cache])

    def answer(
        self, sampling: SamplingOptions, length: int, expected: Sequence[int]
    ) -> tuple[int, ...]:
        """At most `length` tokens. The logits of those expected come of one pass: where each is
        sampled behind the ones before, that is the answer. Where one is not, a pass a token
        decides; sums over more rows are rounded differently."""
        cache = copy.deepcopy(self._cache)
        rows = [self._prompt[-1], *expected[:-1]]
        logits = self._engine.model(mx.array([rows]), cache=cache)[0]
        found = tuple(self._sampled(sampling, length, lambda tokens: logits[len(tokens)], expected))
        if found == tuple(expected):
            return found
        cache = copy.deepcopy(self._cache)

        def step(tokens: Sequence[int]) -> mx.array:
            last = [*self._prompt, *tokens][-1:]
            return self._engine.model(mx.array([last]), cache=cache)[0, -1]

        return tuple(self._sampled(sampling, length, step))

    def _sampled(
        self,
        sampling: SamplingOptions,
        length: int,
        logits: Callable[[Sequence[int]], mx.array],
        expected: Sequence[int] | None = None,
    ) -> Iterator[int]:
        """The tokens by `logits` of what follows some; up to the first that is not expected."""
        sampler = Sampler(sampling)
        matcher = ConstraintMatcher(self._engine, self._constraint, self._prompt)
        tokens: list[int] = []
        while len(tokens) < length:
            row = mx.array(np.array(logits(tokens)))[None]
            history = mx.array([*self._prompt, *tokens])
            masked = matcher.masked(row, [])
            tokens.append(int(sampler.sample(masked, history, history.shape[0]).item()))
            yield tokens[-1]
            matcher.consume(tokens[-1:])
            if matcher.complete or tokens[-1] in self._engine.stop_tokens:
                return
            if expected is not None and tokens != list(expected[: len(tokens)]):
                return
            if expected is not None and length > len(tokens) == len(expected):
                yield -1  # it ended too early
                return


def _fits(schema: Any, value: Any) -> bool:
    """By the reference, where it knows all keywords."""
    try:
        return is_valid(schema, value)
    except (TypeError, ValueError, KeyError):
        return True


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[2:]]
    raise SystemExit(main(Path(sys.argv[1]), *(given + [10, 48, 0][len(given) :])))
