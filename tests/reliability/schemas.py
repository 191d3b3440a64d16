"""`python -m tests.reliability.schemas FILE` holds structured output against a list of schemas.

FILE: JSON, or that compressed by gzip: {"schemas": [{"name", "schema", "tests": [{"valid",
"data"}]}]}, as JSONSchemaBench has it. Every valid instance must be accepted token by token, every
invalid one refused, or the schema refused with a reason before anything is read. Instances are in
the tokens of the starter. No model runs.
"""

from __future__ import annotations

import collections
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

from akunu_py.decoding.constraint.matcher import ConstraintMatcher, compile_constraint
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.models.store import model_store
from akunu_py.types import Constraint

SLOW = 1.0  # seconds to compile that are worth a line


def main(path: Path) -> int:
    data = path.read_bytes()
    schemas = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["schemas"]
    engine = Engine.load(model_store.get("starter").path)
    counts: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    for entry in schemas:
        started = time.perf_counter()
        wanted = Constraint("json_schema", json.dumps(entry["schema"]))
        try:
            compile_constraint(engine.tokens, wanted)
        except UsageError as error:
            counts["refused schemas"] += 1
            print(f"{entry['name']}: {error}")
            continue
        finally:
            seconds = time.perf_counter() - started
            slowest = max(slowest, seconds) if counts.total() else slowest  # tables come first
        counts["supported schemas"] += 1
        if seconds > SLOW and counts.total() > 1:
            print(f"{entry['name']}: {seconds:.1f} s to compile")
        for test in entry["tests"]:
            right = accepts(engine, wanted, test["data"]) == test["valid"]
            kind = "valid" if test["valid"] else "invalid"
            counts[f"{kind} instances {'right' if right else 'WRONG'}"] += 1
            if not right:
                print(f"{entry['name']}: wrong about a {kind} instance")
    print(dict(counts), f"slowest: {slowest:.2f} s")
    return int(any("WRONG" in kind for kind in counts))


def accepts(engine: Engine, wanted: Constraint, instance: Any) -> bool:
    """Whether all tokens of `instance` are allowed, each in its place, and it may end there."""
    matcher = ConstraintMatcher(engine.tokens, wanted, [])
    text = json.dumps(instance, ensure_ascii=False)
    for token in engine.tokens.tokenizer.encode(text, add_special_tokens=False):
        if not matcher.advance(token):
            return False
    return matcher.complete or any(matcher.advance(token) for token in engine.tokens.stop_tokens)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
