"""Which prompt caches stay when memory is short: recorded sessions, replayed without a model.

The target and its caches are the engine's own; only what a token takes is made up. Several agents
work at once, each through one recorded session after the other, with requests between that never
come again, as agents make for titles and summaries. What is counted is tokens that were read once
and have to be read again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from akunu_py.arguments import positive
from akunu_py.bench.command import add_format, lengths, show
from akunu_py.bench.trace import Trace, TraceItem, load_trace
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from tests.measure.tool import run_tool

SUMMARY = "Compare policies for prompt caches on recorded sessions"
POLICIES = ("akunu", "lru", "best")
_ASIDE = 3  # requests of a session to one that stands aside, about
_ANSWER = 1024  # tokens that room is made for


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Of one policy at one budget: tokens in all prompts, those that were read, and those of them
    that had been read before."""

    prompts: int
    read: int
    again: int


def sessions_of(trace: Trace) -> list[list[TraceItem]]:
    """The sessions of a trace: items of which each begins as the one before it did, for the most
    part."""
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
    """The requests in the order in which so many agents make them: now one goes on for some turns,
    then another. aside: with requests that never come again."""
    draw = random.Random(seed)
    left = [list(session) for session in sessions]
    draw.shuffle(left)
    working: list[list[TraceItem]] = []
    found = []
    last = None
    while left or working:
        while left and len(working) < agents:
            working.append(left.pop())
        if last is None or last not in working or draw.random() < 0.4:
            last = draw.choice(working)
        found.append(last.pop(0))
        if aside and draw.randrange(_ASIDE) == 0:
            found.append(_one_off(found[-1], draw))
        working = [each for each in working if each]
    return found


def _one_off(item: TraceItem, draw: random.Random) -> TraceItem:
    """A request about the end of a conversation, behind words of its own."""
    about = item.prompt[-draw.randrange(200, 1500) :]
    instruction = tuple(draw.randrange(1 << 30, 1 << 31) for _ in range(60))
    return TraceItem((*instruction, *about), item.output[:20])


def replay_caches(requests: Sequence[TraceItem], budget: int, policy: str) -> CacheCounts:
    """budget: tokens that all histories may hold together, the one in use with its answer too.
    policy: one of POLICIES; "best" knows the requests that come."""
    caches = {"akunu": PromptCaches, "lru": _Oldest, "best": _Latest}[policy](budget)
    target = _Replayed(caches)
    seen: list[Sequence[int]] = []
    read = again = 0
    for number, item in enumerate(requests):
        prompt = list(item.prompt)
        if isinstance(caches, _Latest):
            caches.coming = requests[number:]
        needed = len(prompt) + min(_ANSWER, len(item.output))
        reuse = target.reuse_prefix(prompt, min(needed, budget))
        read += len(prompt) - reuse.cached
        known = max((common_prefix(each, prompt) for each in seen), default=0)
        again += max(0, min(known, len(prompt) - 1) - reuse.cached)
        target.commit(list(item.output), len(target.pending) + len(item.output) - 1)
        seen = [each for each in seen if common_prefix(each, target.tokens) < len(each)]
        seen.append(tuple(target.tokens))
    return CacheCounts(sum(len(item.prompt) for item in requests), read, again)


def compare_policies(
    trace: Trace, budgets: Sequence[int], agents: int, repeats: int
) -> list[dict[str, Any]]:
    """Rows of tokens that each policy read again, by budget, with and without requests that stand
    aside; each the sum of as many orders as there are repeats."""
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
    print("tokens that are read again; best: whole texts, by what is known to come\n")
    print(f"{'aside':<7}{'budget':>8}{'prompts':>11}", *(f"{name:>10}" for name in POLICIES))
    for row in rows:
        cells = (f"{row['again'][name]:>10,}" for name in POLICIES)
        print(f"{row['aside']!s:<7}{row['budget']:>8,}{row['prompts']:>11,}", *cells)


class _Sized(TokenHistory):
    """A history of which only the size counts: a byte a token."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        super().__init__([], tokens)

    @property
    def nbytes(self) -> int:
        return len(self.tokens)

    def branch(self, length: int) -> _Sized:
        return _Sized(self.tokens[:length])


class _NoModel:
    """A model without layers."""

    def make_cache(self) -> list[Any]:
        return []


class _Replayed(Target):
    """A target without a model."""

    def __init__(self, caches: PromptCaches) -> None:
        super().__init__(_NoModel(), caches=caches)

    def reset(self) -> None:
        self.history = _Sized()


class _Oldest(PromptCaches):
    """What was used longest ago goes first, as a whole."""

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


class _Latest(_Oldest):
    """What is asked for latest goes first, as a whole: Belady's rule, which knows what comes."""

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
        "file", metavar="TRACES", help="recorded sessions of agents, gzipped or not"
    )
    parser.add_argument(
        "--budget",
        type=lengths,
        default=[12_000, 16_000, 24_000, 32_000, 48_000],
        metavar="N,...",
        help="tokens that memory holds (default: 12000,16000,24000,32000,48000)",
    )
    parser.add_argument("--agents", type=positive, default=4, metavar="N", help="at once")
    parser.add_argument("--repeats", type=positive, default=4, metavar="N", help="in other orders")
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
