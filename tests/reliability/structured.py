"""`python -m tests.reliability.structured FILE` tests schemas of a real corpus.

FILE: JSON, or that compressed by gzip: {"schemas": [{"name", "schema", "tests": [{"valid",
"data"}]}]}, the format of JSONSchemaBench.

Every valid instance must be accepted token by token, and every invalid one refused, unless the
schema itself is refused with a reason.
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

SLOW_S = 1.0  # longer compile times are printed


def main(path: Path) -> int:
    data = path.read_bytes()
    schemas = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["schemas"]
    engine = Engine.load(model_store.get("starter").path)
    counts: collections.Counter[str] = collections.Counter()
    for entry in schemas:
        count_instances(engine, entry, counts)
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


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
