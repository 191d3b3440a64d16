"""Compare eviction policies for prompt caches on recorded sessions, without a model.

The target and its caches are the engine's own; only the size of a token is made up. Several agents
work at once, each on one recorded session after the other. One-off requests come in between, as
agents send them for titles and summaries. The figure is the tokens that are prefilled again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from akunu_py.bench.command import lengths, show
from akunu_py.bench.trace import Trace, TraceItem, load_trace
from akunu_py.decoding.prompt_cache.history import NO_OWNER, Owner, TokenHistory
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.parser import add_format, positive
from tests.measure.tool import run_tool

SUMMARY = "Compare policies for prompt caches on recorded sessions"
POLICIES = ("akunu", "lru", "best")
_ONE_OFF_INTERVAL = 3  # requests of a session per one-off request, on average
_ANSWER_TOKENS = 1024  # tokens to reserve for an answer


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Token counts of one policy at one budget."""

    prompts: int  # in all prompts
    read: int  # prefilled
    again: int  # prefilled although an earlier request had prefilled them


def sessions_of(trace: Trace) -> list[list[TraceItem]]:
    """Return the sessions of a trace.

    An item continues a session if it shares at least half of the previous prompt.
    """
    sessions: list[list[TraceItem]] = []
    for items in trace.workloads.values():
        before: Sequence[int] = ()
        for item in items:
            shared = common_prefix(before, item.prompt)
            if not before or shared < len(before) // 2:
                sessions.append([])
            sessions[-1].append(item)
            before = item.prompt
    return sessions


def schedule(
    sessions: Sequence[Sequence[TraceItem]], agents: int, seed: int, *, aside: bool
) -> list[TraceItem]:
    """Interleave the sessions of `agents` agents at random.

    aside: add one-off requests.
    """
    draw = random.Random(seed)
    remaining = [list(session) for session in sessions]
    draw.shuffle(remaining)
    working: list[list[TraceItem]] = []
    requests = []
    session = None
    while remaining or working:
        while remaining and len(working) < agents:
            working.append(remaining.pop())
        if session is None or session not in working or draw.random() < 0.4:
            session = draw.choice(working)
        requests.append(session.pop(0))
        if aside and draw.randrange(_ONE_OFF_INTERVAL) == 0:
            requests.append(_one_off(requests[-1], draw))
        working = [each for each in working if each]
    return requests


def _one_off(item: TraceItem, draw: random.Random) -> TraceItem:
    """Return a one-off request about the end of a conversation, with its own instruction."""
    about = item.prompt[-draw.randrange(200, 1500) :]
    instruction = tuple(draw.randrange(1 << 30, 1 << 31) for _ in range(60))
    return TraceItem((*instruction, *about), item.output[:20])


def replay_caches(requests: Sequence[TraceItem], budget: int, policy: str) -> CacheCounts:
    """Replay the requests with one policy of POLICIES; "best" knows all later requests.

    budget: tokens that all histories may hold together, including the current one and its answer.
    """
    caches = {"akunu": PromptCaches, "lru": _LeastRecentlyUsed, "best": _Belady}[policy](budget)
    target = _ReplayTarget(caches)
    seen: list[Sequence[int]] = []
    prefilled = repeated = 0
    for number, item in enumerate(requests):
        prompt = list(item.prompt)
        if isinstance(caches, _Belady):
            caches.coming = requests[number:]
        needed = len(prompt) + min(_ANSWER_TOKENS, len(item.output))
        reuse = target.reuse_prefix(prompt, min(needed, budget))
        prefilled += len(prompt) - reuse.cached
        shared = max((common_prefix(each, prompt) for each in seen), default=0)
        repeated += max(0, min(shared, len(prompt) - 1) - reuse.cached)
        target.commit(list(item.output), len(target.pending) + len(item.output) - 1)
        seen = [each for each in seen if common_prefix(each, target.tokens) < len(each)]
        seen.append(tuple(target.tokens))
    return CacheCounts(sum(len(item.prompt) for item in requests), prefilled, repeated)


def compare_policies(
    trace: Trace, budgets: Sequence[int], agents: int, repeats: int
) -> list[dict[str, Any]]:
    """Return the tokens that each policy prefills again, one row per budget.

    Each row sums `repeats` random orders. The rows come without and with one-off requests.
    """
    sessions = sessions_of(trace)
    rows = []
    for aside in (False, True):
        orders = [schedule(sessions, agents, seed, aside=aside) for seed in range(repeats)]
        for budget in budgets:
            found = {
                policy: [replay_caches(order, budget, policy) for order in orders]
                for policy in POLICIES
            }
            again = {policy: sum(each.again for each in found[policy]) for policy in POLICIES}
            prompts = sum(each.prompts for each in found["lru"])
            rows.append({"aside": aside, "budget": budget, "prompts": prompts, "again": again})
    return rows


def print_policies(rows: Sequence[dict[str, Any]]) -> None:
    print("tokens that are prefilled again; best: knows all later requests\n")
    print(f"{'aside':<7}{'budget':>8}{'prompts':>11}", *(f"{name:>10}" for name in POLICIES))
    for row in rows:
        cells = (f"{row['again'][name]:>10,}" for name in POLICIES)
        print(f"{row['aside']!s:<7}{row['budget']:>8,}{row['prompts']:>11,}", *cells)


class _SizedHistory(TokenHistory):
    """A history that stores only its size: a byte per token."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        super().__init__([], NO_OWNER, tokens)

    @property
    def nbytes(self) -> int:
        return len(self.tokens)

    def branch(self, length: int, owner: Owner) -> _SizedHistory:
        return _SizedHistory(self.tokens[:length])


class _NoModel:
    """A model without layers."""

    def make_cache(self) -> list[Any]:
        return []


class _ReplayTarget(Target):
    """A target without a model."""

    def __init__(self, caches: PromptCaches) -> None:
        super().__init__(_NoModel(), caches=caches)

    def reset(self) -> None:
        self.history = _SizedHistory()


class _LeastRecentlyUsed(PromptCaches):
    """Evicts the least recently used history as a whole."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._uses: Iterator[int] = count()

    def add(self, history: TokenHistory) -> None:
        super().add(history)
        for entry in self._cached:
            if entry.history is history:
                entry.last_request = next(self._uses)

    def _evict(self, entry: Any, nbytes: int) -> None:
        self._cached.remove(entry)

    def _value_per_byte(self, entry: Any) -> float:
        return float(entry.last_request)


class _Belady(_LeastRecentlyUsed):
    """Evicts the history whose next use is the latest: Belady's rule."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.coming: Sequence[TraceItem] = ()

    def _value_per_byte(self, entry: Any) -> float:
        tokens = entry.history.tokens
        others = [each.history.tokens for each in self._cached if each is not entry]
        for distance, item in enumerate(self.coming):
            shared = common_prefix(tokens, item.prompt)
            if shared > max((common_prefix(each, item.prompt) for each in others), default=0) + 64:
                return -float(distance)
        return -float("inf")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="TRACES", help="Trace file with sessions of agents, gzipped or not"
    )
    parser.add_argument(
        "--budget",
        type=lengths,
        default=[12_000, 16_000, 24_000, 32_000, 48_000],
        metavar="N,...",
        help="Tokens in memory (default: 12000,16000,24000,32000,48000)",
    )
    parser.add_argument(
        "--agents", type=positive, default=4, metavar="N", help="Number of agents (default: 4)"
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=4,
        metavar="N",
        help="Number of random orders (default: 4)",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    found = compare_policies(
        load_trace(options.file), options.budget, options.agents, options.repeats
    )
    show(options, found, lambda: print_policies(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("caches", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
