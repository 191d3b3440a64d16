"""Divided models answer as whole ones do: `python -m tests.reliability.hosts [FAMILY ...]`.

Every family that mlx-lm shards or pipelines, tiny, among 2 and 4 processes over loopback: 200
tokens in each mode of drafting, greedy and seeded, with a drafter that is often wrong; prompts that
share beginnings with earlier ones. A line each; ends with 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

SIZES = (2, 4)
COUNT = 200
MODES = ("off", "fixed", "auto", "adversary")
SHARED = 60  # tokens that prompts begin with


def main() -> int:
    from tests.support.host_models import PIPELINED, SHARDED

    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--count", type=int, default=COUNT)
    args = parser.parse_args()
    ways = [("shard", SHARDED), ("pipeline", PIPELINED)]
    failed = 0
    for way, names in ways:
        for name in names if not args.families else [n for n in names if n in args.families]:
            for size in args.sizes:
                found = in_process(name, way, size, args.count)
                failed += not found["same"]
                print(json.dumps({"family": name, "way": way, "hosts": size} | found), flush=True)
    return int(failed > 0)


def in_process(name: str, way: str, size: int, count: int = COUNT) -> dict[str, Any]:
    """What `compare` finds, in a process of its own: mx.distributed connects once in each."""
    with tempfile.TemporaryDirectory() as directory:
        what = (name, way, size, count, directory)
        command = f"from tests.reliability.hosts import compare; compare(*{what!r})"
        done = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, timeout=600
        )
    if done.returncode:
        return {"same": False, "error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, way: str, size: int, count: int, directory: str) -> None:
    """Prints whether a model among `size` processes answers as in this one, and what it counted."""
    from akunu_py.decoding.hosts import division
    from akunu_py.decoding.load import load_found
    from akunu_py.models import store
    from akunu_py.types import LoadOptions
    from tests.support.host_models import write_named

    write_named(Path(directory), name)
    found = store.resolve(directory)
    plain = _answers(load_found(found, LoadOptions()), count, None)
    with mock.patch.object(division, "choose", return_value=way):
        engine = load_found(found, LoadOptions(hosts=str(size)))
    assert engine.ring is not None
    divided = _answers(engine, count, [tokens for tokens, _, _ in plain])
    engine.ring.close()
    wrong = [at for at, (a, b) in enumerate(zip(plain, divided, strict=True)) if a[:2] != b[:2]]
    alike = all(each[2] for each in divided)
    cached = sum(each[1] for each in divided)
    print(
        json.dumps(
            {
                "same": not wrong and alike,
                "wrong": wrong,
                "alike": alike,
                "cached": cached,
                "messages": engine.ring.messages,
            }
        )
    )


def _answers(
    engine: Any, count: int, truth: Sequence[Sequence[int]] | None
) -> list[tuple[list[int], int, bool]]:
    """For each mode, greedy and seeded, and each of three prompts: the answer, how many tokens of
    the prompt were cached, and whether all ranks hold the same."""
    from akunu_py.decoding.session import Session
    from akunu_py.types import DraftMode, GenerateOptions, SamplingOptions
    from tests.support.targets import some
    from tests.support.tiny import Adversary

    found: list[tuple[list[int], int, bool]] = []
    for mode in MODES:
        adverse = mode == "adversary"
        draft: DraftMode = "off" if adverse and truth is None else "auto"
        if mode in ("off", "fixed"):
            draft = "off" if mode == "off" else "fixed"
        for temperature in (0.0, 0.8):
            session = Session(engine)
            first = some(SHARED, 1)
            prompts = [first + some(80, 2), first + some(30, 3)]
            for at in range(3):
                prompt = prompts[at] if at < 2 else [*prompts[1], *found[-1][0], *some(5, 4)]
                if adverse and truth is not None:
                    adversary = Adversary(prompt, truth[len(found)])
                    session.drafting.wrap = mock.Mock(return_value=adversary)
                    session.drafting._made_for = None
                options = GenerateOptions(
                    max_tokens=count if at == 0 else count // 5,
                    draft=draft,
                    sampling=SamplingOptions(temperature=temperature, seed=7),
                )
                answer = session.generate(prompt, options).answer()
                found.append((list(answer.tokens), answer.stats.cached_tokens, _alike(engine)))
    return found


def _alike(engine: Any) -> bool:
    """Whether the other ranks hold as many tokens as this one, in as many caches."""
    if engine.ring is None:
        return True
    from akunu_py.decoding import kvcache

    here = {str(key): kvcache.held(cache) for key, cache in engine.model.caches.items()}
    return all(here.items() <= each["held"].items() for each in engine.ring.counts())


if __name__ == "__main__":
    sys.exit(main())
