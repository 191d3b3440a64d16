"""Replays recorded outputs through a drafter, counting passes instead of running a model.

Owns trace files, the passes of a replay and the score: tokens per unit of cost, where plain
decoding is 1. It drives the same drafter objects as the engine, with a cost curve in place of
measured times. Refuses to draft: that is `akunu_py.ngram`, or `bench.lookup` for a peer's way.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from akunu_py.errors import UsageError
from akunu_py.types import Drafter

GZIP_MAGIC = b"\x1f\x8b"
_MAX_BYTES = 512 << 20  # unpacked; a hundred thousand answers take less


@dataclass(frozen=True, slots=True)
class TraceItem:
    """One recorded answer: token ids of the prompt and of what the target said to it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file: the tokenizer whose ids it holds, and its items by workload."""

    tokenizer: str
    workloads: dict[str, tuple[TraceItem, ...]]


@dataclass(slots=True)
class ReplayCounts:
    """What the passes over some items added up to.

    tokens: output tokens that passes yielded; each item's first comes from its prefill and is
    left out. cost: of all passes, where plain decoding costs 1 a token.
    """

    items: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    draft_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counts and the derived rates, ready for JSON."""
        return {
            "items": self.items,
            "tokens": self.tokens,
            "passes": self.passes,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_pass": round(self.tokens / self.passes, 4) if self.passes else 0.0,
            "score": round(self.tokens / self.cost, 4) if self.cost else 0.0,
            "draft_us_per_token": round(1e6 * self.draft_s / self.tokens, 2)
            if self.tokens
            else 0.0,
        }


def load_trace(path: str | Path) -> Trace:
    """Reads a trace file, gzipped or plain JSON.

    Raises UsageError when the file cannot be read or is not a trace.
    """
    try:
        data = Path(path).read_bytes()
        if data.startswith(GZIP_MAGIC):
            with gzip.open(path) as file:
                data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it unpacks to more than {_MAX_BYTES >> 20} MB")
        content = json.loads(data)
    except OSError as err:
        raise UsageError(f"cannot read the trace file {path}: {err.strerror or err}") from err
    except (ValueError, RecursionError, EOFError, zlib.error) as err:
        raise UsageError(
            f"expected a trace file (JSON, or gzipped JSON), found {path}: {err}"
        ) from err
    return parse_trace(content, str(path))


def parse_trace(content: object, name: str = "trace") -> Trace:
    """Checks decoded JSON and makes a Trace of it. Raises UsageError where it is malformed."""
    if not isinstance(content, dict) or not isinstance(content.get("workloads"), dict):
        raise UsageError(f'expected {{"tokenizer": ..., "workloads": {{...}}}} in {name}')
    tokenizer = content.get("tokenizer", "")
    if not isinstance(tokenizer, str):
        raise UsageError(f"expected the tokenizer's name in {name}, found {tokenizer!r}")
    workloads: dict[str, tuple[TraceItem, ...]] = {}
    for workload, items in content["workloads"].items():
        if not isinstance(items, list):
            raise UsageError(f"expected a list of items in workload {workload!r} of {name}")
        workloads[workload] = tuple(
            _parse_item(item, f"item {i} of workload {workload!r} of {name}")
            for i, item in enumerate(items)
        )
    return Trace(tokenizer, workloads)


def _parse_item(item: object, where: str) -> TraceItem:
    if not isinstance(item, dict):
        raise UsageError(f'expected {{"prompt": [...], "output": [...]}} as {where}')
    sides = []
    for side in ("prompt", "output"):
        ids = item.get(side)
        # bool is an int to Python, and no token id.
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            raise UsageError(f"expected a list of token ids as {side} of {where}")
        sides.append(tuple(ids))
    if not sides[1]:
        raise UsageError(f"expected at least one output token in {where}")
    return TraceItem(*sides)


def replay_item(
    item: TraceItem, drafter: Drafter, curve: Callable[[int], float], counts: ReplayCounts
) -> None:
    """Adds the passes over one item to `counts`.

    As in the engine, the prefill yields the first token, and no pass drafts beyond the end.
    Raises ValueError when the drafter exceeds the limit it was given.
    """
    output = item.output
    clock = perf_counter()
    drafter.extend(item.prompt)
    drafter.extend(output[:1])
    counts.draft_s += perf_counter() - clock
    counts.items += 1
    done = 1
    while done < len(output):
        limit = len(output) - done - 1
        clock = perf_counter()
        draft = drafter.propose(limit)
        counts.draft_s += perf_counter() - clock
        if len(draft) > limit:
            raise ValueError(f"expected at most {limit} drafted tokens, got {len(draft)}")
        accepted = count_accepted(draft, output, done)
        cost = curve(1 + len(draft))
        yielded = output[done : done + accepted + 1]
        clock = perf_counter()
        drafter.observe(accepted, 1 + len(draft), cost)
        drafter.extend(yielded)
        counts.draft_s += perf_counter() - clock
        done += len(yielded)
        counts.tokens += len(yielded)
        counts.passes += 1
        counts.drafted += len(draft)
        counts.accepted += accepted
        counts.cost += cost


def count_accepted(draft: Sequence[int], output: Sequence[int], start: int) -> int:
    """How many tokens of `draft` the target confirms, when it says `output[start:]` next."""
    for k, token in enumerate(draft):
        if token != output[start + k]:
            return k
    return len(draft)


def replay(
    items: Iterable[TraceItem],
    make_drafter: Callable[[], Drafter],
    curve: Callable[[int], float],
    item_done: Callable[[TraceItem], None] | None = None,
) -> dict[str, Any]:
    """Replays each item through a fresh drafter and returns the counts and rates.

    `item_done` is called after each item, for a memory that learns from one to the next.
    """
    counts = ReplayCounts()
    for item in items:
        replay_item(item, make_drafter(), curve, counts)
        if item_done is not None:
            item_done(item)
    return counts.as_dict()
