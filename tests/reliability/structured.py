"""`python -m tests.reliability.structured FILE [ANSWERS [TOKENS [START [END]]]]`: answers beside
those of naive decoding.

FILE: as for `tests.reliability.schemas`. The starter answers to ANSWERS schemas (default 10),
evenly apart, with TOKENS tokens (default 48), at temperature 0 and 0.8: with drafts, without them,
and as mlx-lm's model alone has it, each token masked by a matcher that only goes forward. All must
have the same tokens, of JSON that fits, or of the beginning of some. Passes are counted by source,
as `python -m tests.measure.structured` does. The order spreads any part of them over FILE; from
START to END is a part.

Answers with drafts are made first, by all that a session has. What the model says behind each of
their tokens then comes of one pass over prompt and answer, with a cache of mlx-lm's, and is what is
sampled from without drafts and naively: a pass a token would give the same but for rounding, and
takes ten times as long. Where they come to another token, passes of a token each decide.
"""

from __future__ import annotations

import copy
import functools
import gzip
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.bench.curve import CURVES, FixedCosts, parse_curve
from akunu_py.bench.replay import ReplayCounts
from akunu_py.bench.trace import TraceItem
from akunu_py.decoding.constraint.matcher import ConstraintMatcher
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.kv_cache import has_length
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import Sampler
from akunu_py.errors import UsageError
from akunu_py.models.store import model_store
from akunu_py.types import Constraint, GenerateOptions, Message, SamplingOptions
from tests.measure.structured import count_passes
from tests.support.json_schema import is_valid

TEMPERATURES = (0.0, 0.8)
_SHOWN = 200  # characters of a schema that the prompt has
_CURVE = parse_curve(CURVES["m5max"])


def main(path: Path, answers: int, length: int, start: int, end: int | None) -> int:
    schemas = json.loads(gzip.decompress(path.read_bytes()))["schemas"]
    engine = Engine.load(model_store.get("starter").path)
    counts: dict[str, dict[str, ReplayCounts]] = {}
    wrong = done = cut = refused = 0
    for number in _spread(answers)[start:end]:
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
            count_passes(engine, constraint, item, _CURVE, counts.setdefault(source, {}))
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
    prompt = engine.tokens.encode_chat([Message("user", ask)])
    constraint = Constraint("json_schema", text)
    first = Session(engine)  # reads the prompt; the others learn nothing from what was answered
    first.drafting.curve = FixedCosts(_CURVE.points)
    reader = Reader(engine, prompt)
    found = []
    for temperature in TEMPERATURES:
        sampling = SamplingOptions(temperature=temperature, seed=7, constraint=constraint)
        session = Session(engine, sibling=first)
        answer = session.generate(prompt, GenerateOptions(length, sampling=sampling)).answer()
        session.release()
        expected = reader.read(answer.tokens)
        by_way = {"auto": answer.tokens}
        for way, made in ("off", without_drafts), ("naive", naively):
            make = functools.partial(made, first, prompt, sampling, length)
            try:
                by_way[way] = make(expected)
            except OtherToken:
                by_way[way] = make(reader.read(()))
        whole = answer.finish_reason == "stop"
        found.append(Answered(temperature, tuple(prompt), by_way, answer.text, whole))
    return found


class OtherToken(Exception):
    """An answer goes on with another token than was expected."""


class Logits:
    """What the model says behind a prompt and, token for token, an answer to it."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], answer: Sequence[int], cache: list[Any]
    ) -> None:
        """cache: holds all of the prompt but its last token. answer: as expected; where it is
        empty, what comes is read token by token."""
        self._engine, self._last, self._answer, self._cache = engine, prompt[-1], answer, cache
        self._rows = self._run([self._last, *answer[:-1]]) if answer else None

    def behind(self, tokens: Sequence[int]) -> mx.array:
        """Logits [1, vocab] behind the answer `tokens`, of which the last is new. Raises
        OtherToken."""
        if self._rows is None:
            return self._run([tokens[-1] if tokens else self._last])
        if tuple(tokens) != tuple(self._answer[: len(tokens)]) or len(tokens) == len(self._answer):
            raise OtherToken
        return self._rows[len(tokens)][None]

    def _run(self, tokens: Sequence[int]) -> mx.array:
        logits = self._engine.model(mx.array([tokens]), cache=self._cache)[0]
        return mx.array(np.array(logits))


class Reader:
    """Reads a prompt once, by mlx-lm's model and cache alone, and answers to it."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self._engine, self._prompt = engine, prompt
        self._cache = make_prompt_cache(engine.model)
        engine.model(mx.array([prompt[:-1]]), cache=self._cache)
        mx.eval([entry.state for entry in self._cache])

    def read(self, answer: Sequence[int]) -> Logits:
        return Logits(self._engine, self._prompt, answer, copy.deepcopy(self._cache))


def without_drafts(
    beside: Session,
    prompt: Sequence[int],
    sampling: SamplingOptions,
    length: int,
    logits: Logits,
) -> tuple[int, ...]:
    """What a session answers, with `logits` for what the passes over its answer would give."""
    session = Session(beside.engine, sibling=beside)
    options = GenerateOptions(length, "off", sampling=sampling)
    session.drafting.prepare(options)
    target, read = session.target, len(prompt) - 1
    answer: list[int] = []

    def run(rows: mx.array, cache: Any, wanted: int) -> mx.array:
        if not has_length(cache, read):  # the prompt, as far as it is not in there
            return target.run_model(rows, cache, wanted)
        answer.extend(rows.tolist())
        return logits.behind(answer[1:])[-wanted:]

    target.run = run
    try:
        return session.generate(prompt, options).answer().tokens
    finally:
        del target.tokens[read:]
        session.release()


def naively(
    beside: Session,
    prompt: Sequence[int],
    sampling: SamplingOptions,
    length: int,
    logits: Logits,
) -> tuple[int, ...]:
    """Masks and samples one token after the other, with nothing else."""
    assert sampling.constraint is not None
    sampler = Sampler(sampling)
    matcher = ConstraintMatcher(beside.engine.tokens, sampling.constraint, prompt)
    tokens: list[int] = []
    while len(tokens) < length and not matcher.complete:
        history = mx.array([*prompt, *tokens])
        masked = matcher.masked(logits.behind(tokens), [])
        tokens.append(int(sampler.sample(masked, history, history.shape[0]).item()))
        matcher.consume(tokens[-1:])
        if tokens[-1] in beside.engine.tokens.stop_tokens:
            break
    return tuple(tokens)


def _fits(schema: Any, value: Any) -> bool:
    """By the reference, where it knows all keywords."""
    try:
        return is_valid(schema, value)
    except (TypeError, ValueError, KeyError):
        return True


if __name__ == "__main__":
    given: list[Any] = [int(each) for each in sys.argv[2:]]
    raise SystemExit(main(Path(sys.argv[1]), *(given + [10, 48, 0, None][len(given) :])))
