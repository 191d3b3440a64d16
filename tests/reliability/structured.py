"""`python -m tests.reliability.structured FILE [ANSWERS [TOKENS]]`: answers beside
those of naive decoding.

FILE: as for `tests.reliability.schemas`. The starter answers to ANSWERS schemas (default 10),
evenly apart, with TOKENS tokens (default 48), at temperature 0 and 0.8: one token at a time, each
masked by a new matcher; without drafts; and with them. All must have the same tokens, of JSON that
fits, or of the beginning of some. Passes are counted by source, as `akunu bench structured` does.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Iterator
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


def main(path: Path, answers: int, length: int) -> int:
    schemas = json.loads(gzip.decompress(path.read_bytes()))["schemas"]
    engine = Engine.load(store.get("starter").path)
    counts: dict[str, dict[str, ReplayCounts]] = {}
    wrong = done = cut = 0
    for number in range(answers):
        entry = schemas[number * len(schemas) // answers]
        started = time.perf_counter()
        for temperature in TEMPERATURES:
            found = answered(engine, entry["schema"], temperature, length)
            if isinstance(found, str):
                print(f"{entry['name']}: {found}", flush=True)
                break
            prompt, by_way, text, whole = found
            done += 1
            cut += not whole
            same = len(set(by_way.values())) == 1
            fits = not whole or _fits(entry["schema"], json.loads(text))
            wrong += not (same and fits)
            source = entry["name"].split("---")[0].split("_")[0]
            item = TraceItem(tuple(prompt), by_way["auto"])
            constraint = Constraint("json_schema", json.dumps(entry["schema"]))
            curve = parse_curve(CURVES["m5max"])
            count(engine, constraint, item, curve, counts.setdefault(source, {}))
            verdict = ("same" if same else "DIFFERENT") + (" fits" if fits else " DOES NOT FIT")
            seconds = time.perf_counter() - started
            print(f"{entry['name']} {temperature}: {verdict}, {seconds:.0f} s", flush=True)
    for source, by_drafter in counts.items():
        rates = (
            f"{name} {each.tokens / max(1, each.passes):.2f}" for name, each in by_drafter.items()
        )
        print(source, *rates)
    print(f"{done} answers, {cut} of them cut off, {wrong} wrong")
    return int(wrong > 0)


def answered(
    engine: Engine, schema: Any, temperature: float, length: int
) -> tuple[list[int], dict[str, tuple[int, ...]], str, bool] | str:
    """The prompt, the tokens by the way they were made, the text, whether it is whole; or why the
    schema is refused."""
    text = json.dumps(schema)
    constraint = Constraint("json_schema", text)
    ask = f"Answer with an example of JSON that fits this JSON schema:\n\n{text[:800]}"
    prompt = engine.encode_chat([Message("user", ask)])
    sampling = SamplingOptions(temperature=temperature, seed=7, constraint=constraint)
    modes: tuple[DraftMode, ...] = ("off", "auto")
    try:
        answers = {
            mode: Session(engine)
            .generate(prompt, GenerateOptions(length, mode, sampling=sampling))
            .answer()
            for mode in modes
        }
    except UsageError as error:
        return str(error)
    by_way: dict[str, tuple[int, ...]] = {mode: each.tokens for mode, each in answers.items()}
    by_way["naive"] = tuple(naive(engine, prompt, sampling, length))
    last = answers["auto"]
    return prompt, by_way, last.text, last.finish_reason == "stop"


def naive(
    engine: Engine, prompt: list[int], sampling: SamplingOptions, length: int
) -> Iterator[int]:
    """Masks and samples one token after the other, with nothing kept but mlx-lm's cache."""
    assert sampling.constraint is not None
    sampler = Sampler(sampling)
    cache = make_prompt_cache(engine.model)
    tokens: list[int] = []
    for _ in range(length):
        rows = mx.array([tokens[-1:] or prompt])
        logits = engine.model(rows, cache=cache)[0, -1:]
        matcher = ConstraintMatcher(engine, sampling.constraint, prompt)
        matcher.consume(tokens)
        history = mx.array([*prompt, *tokens])
        masked = matcher.masked(mx.array(np.array(logits)), [])
        tokens.append(int(sampler.sample(masked, history, history.shape[0]).item()))
        yield tokens[-1]
        matcher.consume(tokens[-1:])
        if matcher.complete or tokens[-1] in engine.stop_tokens:
            return


def _fits(schema: Any, value: Any) -> bool:
    """By the reference, where it knows all keywords."""
    try:
        return is_valid(schema, value)
    except (TypeError, ValueError, KeyError):
        return True


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[2:]]
    raise SystemExit(main(Path(sys.argv[1]), *(given + [10, 48][len(given) :])))
