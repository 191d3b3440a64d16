"""Compare eviction policies for prompt caches on recorded sessions, without a model.

The target and its caches are the engine's own; only the size of a token is made up. Several agents
work at once, each on one recorded session after the other. One-off requests come in between, as
agents send them for titles and summaries. The figure is the tokens that are prefilled again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from itertools import count, product
from typing import Any

from akunu_py.bench.command import add_count, add_lengths, show
from akunu_py.bench.replay import Trace, TraceItem, load_trace
from akunu_py.bench.tables import to_text
from akunu_py.engine.histories.history import NO_OWNER, Owner, TokenHistory
from akunu_py.engine.histories.memory import PromptCaches
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.target import Target
from akunu_py.parser import add_format
from tests.measure.tool import run_tool

_ONE_OFF_INTERVAL = 3  # requests of a session per one-off request, on average
_ANSWER_TOKENS = 1024  # tokens to reserve for an answer


def sessions_of(trace: Trace) -> list[list[TraceItem]]:
    """Return the sessions of a trace.

    An item continues a session if it shares at least half of the previous prompt.
    """
    sessions: list[list[TraceItem]] = []
    for items in trace.workloads.values():
        before: Sequence[int] = ()
        for item in items:
            if not before or common_prefix(before, item.prompt) < len(before) // 2:
                sessions.append([])
            sessions[-1].append(item)
            before = item.prompt
    return sessions


def schedule(
    sessions: Sequence[Sequence[TraceItem]], agents: int, seed: int, *, aside: bool
) -> list[TraceItem]:
    """Interleave the sessions of `agents` agents at random. aside: add one-off requests."""
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
            about = requests[-1].prompt[-draw.randrange(200, 1500) :]
            instruction = (draw.randrange(1 << 30, 1 << 31) for _ in range(60))
            requests.append(TraceItem((*instruction, *about), requests[-1].output[:20]))
        working = [each for each in working if each]
    return requests


def replay_caches(requests: Sequence[TraceItem], budget: int, policy: str) -> int:
    """Return the prefilled tokens that an earlier request had prefilled.

    policy: one of POLICIES. budget: tokens that all histories may hold together, including the
    current one and its answer.
    """
    caches = POLICIES[policy](budget)
    target = _ReplayTarget(caches)
    seen: list[Sequence[int]] = []
    again = 0
    for item in requests:
        prompt = list(item.prompt)
        needed = len(prompt) + min(_ANSWER_TOKENS, len(item.output))
        reuse = target.reuse_prefix(prompt, min(needed, budget))
        shared = max((common_prefix(each, prompt) for each in seen), default=0)
        again += max(0, min(shared, len(prompt) - 1) - reuse.cached)
        target.commit(list(item.output), len(target.pending) + len(item.output) - 1)
        seen = [each for each in seen if common_prefix(each, target.tokens) < len(each)]
        seen.append(tuple(target.tokens))
    return again


class SizedHistory(TokenHistory):
    """A history that stores only its size: a byte per token."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        super().__init__([], NO_OWNER, tokens)

    @property
    def nbytes(self) -> int:
        return len(self.tokens)

    def branch(self, length: int, owner: Owner) -> SizedHistory:
        return SizedHistory(self.tokens[:length])


class _NoModel:
    def make_cache(self) -> list[Any]:
        return []


class _ReplayTarget(Target):
    def __init__(self, caches: PromptCaches) -> None:
        super().__init__(_NoModel(), caches=caches)

    def reset(self) -> None:
        self.history = SizedHistory()


class _LeastRecentlyUsed(PromptCaches):
    """Evicts the least recently used history as a whole."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._uses = count()

    def add(self, history: TokenHistory) -> None:
        super().add(history)
        for entry in self._cached:
            if entry.history is history:
                entry.last_request = next(self._uses)

    def _evict(self, entry: Any, nbytes: int) -> None:
        self._cached.remove(entry)

    def _value_per_byte(self, entry: Any) -> float:
        return float(entry.last_request)


POLICIES = {"akunu": PromptCaches, "lru": _LeastRecentlyUsed}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="TRACES", help="Trace file with sessions of agents")
    what = "Tokens in memory (default: 12000,16000,24000,32000,48000)"
    add_lengths(parser, "--budget", default=[12_000, 16_000, 24_000, 32_000, 48_000], what=what)
    add_count(parser, "--agents", 4, "Number of agents")
    add_count(parser, "--repeats", 4, "Number of random orders, which are summed")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    sessions, rows = sessions_of(load_trace(options.file)), []
    for aside, budget in product((False, True), options.budget):
        seeds = range(options.repeats)
        orders = [schedule(sessions, options.agents, seed, aside=aside) for seed in seeds]
        prompts = sum(len(item.prompt) for order in orders for item in order)
        again = {each: sum(replay_caches(o, budget, each) for o in orders) for each in POLICIES}
        rows.append({"aside": aside, "budget": budget, "prompts": prompts, "again": again})
    show(options, rows, lambda: print_policies(rows))
    return 0


def print_policies(rows: Sequence[dict[str, Any]]) -> None:
    print("tokens that are prefilled again\n")
    cells = [[str(row["aside"]), f"{row['budget']:,}", f"{row['prompts']:,}",
              *(f"{row['again'][name]:,}" for name in POLICIES)] for row in rows]  # fmt: skip
    print(to_text((["one-off requests", "budget", "prompts", *POLICIES], cells)))


main = partial(run_tool, "caches", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(main())
