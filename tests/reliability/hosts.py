"""Divided models answer as whole ones do: `python -m tests.reliability.hosts [FAMILY ...]`.

Every family that mlx-lm shards or pipelines, tiny, among 2 and 4 processes over loopback: 200
tokens in each mode of drafting, greedy and seeded, with a drafter that is often wrong; then two
answers of 20 to prompts that begin like earlier ones. What each rank counted must be what rank 0
did. A line each; ends with 1 where one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

SIZES = (2, 4)
COUNT = 200
MODES = ("off", "fixed", "auto", "adversary")
SHARED = 60  # tokens that prompts begin with
SHORTER = 10  # so many times are the answers that are there for what is cached
_LONGEST = 1800.0  # seconds that a family may take


def main() -> int:
    from tests.support.hosts import PIPELINED, SHARDED

    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--ways", nargs="*", default=("shard", "pipeline"))
    parser.add_argument("--spin", action="store_true", help="ranks wait as MLX has them wait")
    args = parser.parse_args()
    ways = {"shard": SHARDED, "pipeline": PIPELINED}
    failed = 0
    for way in args.ways:
        for name in ways[way] if not args.families else args.families:
            if name not in ways[way]:
                continue
            with tempfile.TemporaryDirectory() as directory:
                for size in args.sizes:
                    found = in_process(name, way, size, args.count, directory, spin=args.spin)
                    failed += not found["same"]
                    print(json.dumps({"family": name, "way": way, "hosts": size} | found))
                    sys.stdout.flush()
    return int(failed > 0)


def in_process(
    name: str, way: str, size: int, count: int, directory: str, *, spin: bool
) -> dict[str, Any]:
    """What `compare` finds, in a process of its own: mx.distributed connects once in each."""
    what = (name, way, size, count, directory, spin)
    command = f"from tests.reliability.hosts import compare; compare(*{what!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, timeout=_LONGEST
        )
    except subprocess.TimeoutExpired:
        return {"same": False, "error": f"took longer than {_LONGEST:.0f} seconds"}
    if done.returncode:
        return {"same": False, "error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, way: str, size: int, count: int, directory: str, spin: bool) -> None:
    """Prints whether a model among `size` processes answers as one process that does not draft,
    and what rank 0 counted.

    directory: where the model is, once it was made, and those answers.
    """
    from akunu_py.decoding.hosts import partition
    from akunu_py.decoding.load import load_stored
    from akunu_py.models.store import model_store
    from akunu_py.types import LoadOptions
    from tests.support.hosts import write_named
    from tests.support.patient_ranks import patient_ranks

    model, answers = Path(directory, "model"), Path(directory, "plain.json")
    if not model.exists():
        model.mkdir()
        write_named(model, name, layers=2 if way == "shard" else 4)
    found = model_store.resolve(str(model))
    if not answers.exists():
        plain = _answers(load_stored(found, LoadOptions()), MODES[:1], count)
        answers.write_text(json.dumps([answer[:2] for answer in plain]))
    whole = json.loads(answers.read_text()) * len(MODES)
    with (
        mock.patch.object(partition, "choose_split", return_value=way),
        contextlib.nullcontext() if spin else patient_ranks(),
    ):
        engine = load_stored(found, LoadOptions(hosts=str(size)))
    assert engine.host_group is not None
    with _counted() as counts:
        divided = _answers(engine, MODES, count, [tokens for tokens, _ in whole], counts)
    engine.host_group.close()
    pairs = enumerate(zip(whole, divided, strict=True))
    wrong = [at for at, ((tokens, cached), b) in pairs if (tokens, cached) != b[:2]]
    unlike = [at for at, each in enumerate(divided) if not each[2]]
    shown = {
        "same": not wrong and not unlike,
        "answers": len(whole),
        "tokens": sum(len(tokens) for tokens, _ in whole),
        "distinct": len({token for tokens, _ in whole for token in tokens}),
        "wrong": wrong,
        "unlike": unlike,
        "cached": sum(each[1] for each in divided),
        "messages": engine.host_group.messages,
    }
    print(json.dumps(shown | counts))


def _answers(
    engine: Any,
    modes: Sequence[str],
    count: int,
    truth: Sequence[Sequence[int]] = (),
    counts: dict[str, int] | None = None,
) -> list[tuple[list[int], int, bool]]:
    """For each mode, greedy and seeded, and each of three prompts: the answer, how many tokens of
    the prompt were cached, and whether all ranks have done and hold the same.

    truth: the answers, for the drafter that knows them. counts: what rank 0 has done.
    """
    from akunu_py.decoding.generate.session import Session
    from akunu_py.types import DraftMode, GenerateOptions, SamplingOptions
    from tests.support.targets import some
    from tests.support.tiny import Adversary

    found: list[tuple[list[int], int, bool]] = []
    drafts: dict[str, DraftMode] = {"off": "off", "fixed": "fixed"}
    for mode in modes:
        for temperature in (0.0, 0.8):
            session = Session(engine)
            first = some(SHARED, 1)
            prompts = [first + some(80, 2), first + some(30, 3)]
            for at in range(3):
                prompt = prompts[at] if at < 2 else [*prompts[1], *found[-1][0], *some(5, 4)]
                if mode == "adversary":
                    adversary = Adversary(prompt, truth[len(found)])
                    session.drafting.wrap = mock.Mock(return_value=adversary)
                    session.drafting._made_for = None
                options = GenerateOptions(
                    max_tokens=count if at == 0 else count // SHORTER,
                    draft=drafts.get(mode, "auto"),
                    sampling=SamplingOptions(temperature=temperature, seed=7),
                )
                answer = session.generate(prompt, options).answer()
                same = counts is None or _alike(engine, counts)
                found.append((list(answer.tokens), answer.stats.cached_tokens, same))
    return found


@contextlib.contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """What rank 0 does from here on: passes, their rows, and rows that were taken away again."""
    from akunu_py.decoding import kv_cache
    from akunu_py.decoding.hosts.passes import Coordinator, ReplicatedCache

    counts = {"passes": 0, "rows": 0, "cut": 0}
    run, roll_back, trim = Coordinator._run, kv_cache.roll_back, kv_cache.trim

    def counted_run(self: Coordinator, tokens: Any, *args: Any, **options: Any) -> Any:
        counts["passes"] += 1
        counts["rows"] += tokens.shape[1]
        return run(self, tokens, *args, **options)

    def counted_roll_back(cache: Any, before: Any, written: int, kept: int) -> int:
        left = roll_back(cache, before, written, kept)
        counts["cut"] += (written - left) * isinstance(cache, ReplicatedCache)
        return left

    def counted_trim(cache: Any, rows: int) -> None:
        trim(cache, rows)
        counts["cut"] += rows * isinstance(cache, ReplicatedCache)

    with (
        mock.patch.object(Coordinator, "_run", counted_run),
        mock.patch.object(kv_cache, "roll_back", counted_roll_back),
        mock.patch.object(kv_cache, "trim", counted_trim),
    ):
        yield counts


def _alike(engine: Any, counts: dict[str, int]) -> bool:
    """Whether the other ranks did what this one did, and hold as many tokens, in as many caches."""
    from akunu_py.decoding import kv_cache

    here = {str(key): kv_cache.row_count(cache) for key, cache in engine.model.caches.items()}
    return all(
        here.items() <= each["held"].items() and counts.items() <= each["counts"].items()
        for each in engine.host_group.counts()
    )


if __name__ == "__main__":
    sys.exit(main())
