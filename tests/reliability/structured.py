"""`python -m tests.reliability.structured FILE [ANSWERS [TOKENS]]` tests schemas of a real corpus.

FILE: JSON, or that compressed by gzip: {"schemas": [{"name", "schema", "tests": [{"valid",
"data"}]}]}, the format of JSONSchemaBench.

Every valid instance must be accepted token by token, and every invalid one refused, unless the
schema itself is refused with a reason. Then the starter answers to ANSWERS of the schemas (default
10, 0 for none) with up to TOKENS tokens (default 48), at temperature 0 and 0.8. The tokens must be
the same with drafts, without drafts, and of mlx-lm's model alone, each masked by a matcher that
only goes forward. A complete answer must be JSON that fits.
"""

from __future__ import annotations

import collections
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.decoding.constraint.matcher import ConstraintMatcher, compile_constraint
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import Sampler
from akunu_py.errors import UsageError
from akunu_py.models.store import model_store
from akunu_py.types import Constraint, GenerateOptions, Message, SamplingOptions
from tests.support.json_schema import is_valid

SLOW_S = 1.0  # longer compile times are printed
SHOWN = 200  # characters of a schema that the prompt contains


def main(path: Path, answers: int = 10, length: int = 48) -> int:
    data = path.read_bytes()
    schemas = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["schemas"]
    engine = Engine.load(model_store.get("starter").path)
    counts: collections.Counter[str] = collections.Counter()
    for entry in schemas:
        count_instances(engine, entry, counts)
    for number in range(answers):
        entry = schemas[number * len(schemas) // answers]
        for temperature in (0.0, 0.8):
            try:
                verdict = answer_verdict(engine, entry["schema"], length, temperature)
            except UsageError:
                break
            counts[f"answers {verdict}"] += 1
            print(f"{entry['name']} {temperature}: {verdict}", flush=True)
    print(dict(counts))
    return int(any("WRONG" in kind for kind in counts))


def count_instances(engine: Engine, entry: Any, counts: collections.Counter[str]) -> None:
    """Count the instances of a schema by kind and by verdict; print what went wrong."""
    constraint = Constraint("json_schema", json.dumps(entry["schema"]))
    started = time.perf_counter()
    try:
        compile_constraint(engine.tokens, constraint)
    except UsageError as error:
        counts["refused schemas"] += 1
        print(f"{entry['name']}: {error}")
        return
    if (seconds := time.perf_counter() - started) > SLOW_S:
        print(f"{entry['name']}: {seconds:.1f} s to compile")
    counts["supported schemas"] += 1
    for test in entry["tests"]:
        right = accepts(engine, constraint, test["data"]) == test["valid"]
        kind = f"{'' if test['valid'] else 'in'}valid instances {'right' if right else 'WRONG'}"
        counts[kind] += 1
        if not right:
            print(f"{entry['name']}: {kind}")


def accepts(engine: Engine, constraint: Constraint, instance: Any) -> bool:
    """Return whether all tokens of `instance` are allowed, each in its place, and may end there."""
    matcher = ConstraintMatcher(engine.tokens, constraint, [])
    text = json.dumps(instance, ensure_ascii=False)
    for token in engine.tokens.tokenizer.encode(text, add_special_tokens=False):
        if not matcher.advance(token):
            return False
    return matcher.complete or any(matcher.advance(token) for token in engine.tokens.stop_tokens)


def answer_verdict(engine: Engine, schema: Any, length: int, temperature: float) -> str:
    """Answer with and without drafts and naively; return the verdict on all three answers."""
    text = json.dumps(schema)
    question = f"Answer with an example of JSON that fits this JSON schema:\n\n{text[:SHOWN]}"
    prompt = engine.tokens.encode_chat([Message("user", question)])
    constraint = Constraint("json_schema", text)
    sampling = SamplingOptions(temperature=temperature, seed=7, constraint=constraint)
    drafted, plain = (
        Session(engine).generate(prompt, GenerateOptions(length, mode, sampling=sampling)).answer()
        for mode in ("auto", "off")
    )
    if not drafted.tokens == plain.tokens == naive(engine, prompt, sampling, length):
        return "WRONG: other tokens"
    if drafted.finish_reason != "stop":
        return "cut off"
    try:
        fits = is_valid(schema, json.loads(drafted.text))
    except (TypeError, ValueError, KeyError):  # the reference does not know all keywords
        return "unchecked"
    return "right" if fits else "WRONG: does not fit"


def naive(
    engine: Engine, prompt: list[int], sampling: SamplingOptions, length: int
) -> tuple[int, ...]:
    """Mask and sample one token after the other, with mlx-lm's model and cache alone."""
    assert sampling.constraint is not None
    sampler, cache = Sampler(sampling), make_prompt_cache(engine.model)
    matcher = ConstraintMatcher(engine.tokens, sampling.constraint, prompt)
    tokens: list[int] = []
    logits = engine.model(mx.array([prompt]), cache=cache)[0, -1:]
    while len(tokens) < length and not matcher.complete:
        history = mx.array([*prompt, *tokens])
        masked = matcher.masked(logits, [])
        tokens.append(int(sampler.sample(masked, history, history.shape[0]).item()))
        matcher.consume(tokens[-1:])
        if tokens[-1] in engine.tokens.stop_tokens:
            break
        logits = engine.model(mx.array([tokens[-1:]]), cache=cache)[0]
    return tuple(tokens)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
