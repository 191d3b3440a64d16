"""Replays recorded outputs through a drafter, counting passes instead of running a model.

It drives the same drafter objects as the engine, with a cost curve in place of measured times. The
score is tokens per unit of cost, where plain decoding has 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from akunu_py.bench.curve import Curve
from akunu_py.bench.networks import LUCKS, NetworkFigures, SimulatedNetworks
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.fixed import FixedDrafter, NoDrafter
from akunu_py.ngram.memory import Memory
from akunu_py.types import DEFAULT_DRAFT_TOKENS, Drafter

COMPARED = ("fixed 4", "prompt lookup", "auto")


def replay_trace(
    trace: Trace,
    curve: Curve,
    drafter: str,
    *,
    workloads: Sequence[str] = (),
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
    memory: bool = False,
    networks: Sequence[NetworkFigures] = (),
    even: bool = False,
) -> dict[str, dict[str, Any]]:
    """Counts and rates by workload, as `replay` gives them; of all workloads where none is named.

    drafter: a draft mode, fixed of `draft_tokens`, or one of COMPARED. memory: auto learns from
    each item for those behind it in the workload. networks: that draft, too. even: in `LUCKS`
    replays, in which they are right at each place as often as is stated.
    """
    found = {}
    for name in workloads or trace.workloads:
        counts = ReplayCounts()
        for turn in range(LUCKS if even and networks else 1):
            simulated = SimulatedNetworks(networks, turn)
            items = trace.workloads[name]
            _replay_items(items, curve, drafter, draft_tokens, memory, simulated, counts)
        found[name] = counts.as_dict()
    return found


def _replay_items(
    items: Sequence[TraceItem],
    curve: Curve,
    drafter: str,
    draft_tokens: int,
    memory: bool,
    networks: SimulatedNetworks,
    counts: ReplayCounts,
) -> None:
    learned = Memory() if memory else None

    def make() -> Drafter:
        return drafter_named(drafter, CostCurve(curve.points), learned, draft_tokens, networks)

    learn = None if learned is None else (lambda item: learned.learn(item.output))
    replay(items, make, curve, learn, networks, counts)


def drafter_named(
    name: str,
    costs: CostCurve,
    memory: Memory | None,
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
    networks: SimulatedNetworks | None = None,
) -> Drafter:
    """The drafter of that name: a draft mode, or one of COMPARED."""
    match name:
        case "auto" | "ngram" | "mtp" | "model" | "exit":
            made = networks.made(name) if networks else []
            known, ngrams = networks.learned if networks else None, name in ("auto", "ngram")
            return AutoDrafter(costs, memory=memory, networks=made, learned=known, ngrams=ngrams)
        case "fixed":
            return FixedDrafter(draft_tokens)
        case "fixed 4":
            return FixedDrafter(4)
        case "prompt lookup":
            return PromptLookupDrafter()
    return NoDrafter()


def replay(
    items: Iterable[TraceItem],
    make_drafter: Callable[[], Drafter],
    curve: Callable[[int], float],
    item_done: Callable[[TraceItem], None] | None = None,
    networks: SimulatedNetworks | None = None,
    counts: ReplayCounts | None = None,
) -> dict[str, Any]:
    """Replays each item through a fresh drafter and returns the counts and rates.

    `item_done` is called after each item, for a memory that learns from one to the next. networks:
    which `make_drafter` makes drafters with; what they take counts. counts: what came before.
    """
    counts, networks = counts or ReplayCounts(), networks or SimulatedNetworks()
    for item in items:
        networks.item = item
        replay_item(item, make_drafter(), curve, counts, networks)
        if item_done is not None:
            item_done(item)
    return counts.as_dict()


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


def replay_item(
    item: TraceItem,
    drafter: Drafter,
    curve: Callable[[int], float],
    counts: ReplayCounts,
    networks: SimulatedNetworks | None = None,
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
        before = networks.spent if networks else 0.0
        clock = perf_counter()
        draft = drafter.propose(limit)
        counts.draft_s += perf_counter() - clock
        if len(draft) > limit:
            raise ValueError(f"expected at most {limit} drafted tokens, got {len(draft)}")
        accepted = count_accepted(draft, output, done)
        cost = curve(1 + len(draft)) + (networks.spent - before if networks else 0.0)
        yielded = output[done : done + accepted + 1]
        clock = perf_counter()
        drafter.observe(len(draft), accepted, 1 + len(draft), cost)
        drafter.extend(yielded)
        counts.draft_s += perf_counter() - clock
        done += len(yielded)
        counts.tokens += len(yielded)
        counts.passes += 1
        counts.drafted += len(draft)
        counts.accepted += accepted
        counts.cost += cost


def count_accepted(draft: Sequence[int], output: Sequence[int], start: int) -> int:
    """How many tokens of `draft` are accepted, where the output continues with `output[start:]`."""
    for k, token in enumerate(draft):
        if token != output[start + k]:
            return k
    return len(draft)


class PromptLookupDrafter:
    """Prompt lookup as transformers' `PromptLookupCandidateGenerator` does it, with its defaults: a
    `Drafter` to compare with, which the engine does not use.

    The last n tokens, n from `MAX_NGRAM` down to 1, are searched in the token history, and what
    followed their first occurrence is the draft. Source: Saxena, Prompt Lookup Decoding (2023), as
    adopted by transformers. The earliest match wins there, also over a later one.
    """

    pipelines = False
    DRAFT_TOKENS = 10
    MAX_NGRAM = 3

    def __init__(self) -> None:
        self.history: list[int] = []
        # First position after each n-gram that something follows, by the n-gram.
        self._first: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        history = self.history
        for token in tokens:
            end = len(history)
            for n in range(1, min(self.MAX_NGRAM, end) + 1):
                self._first.setdefault(tuple(history[end - n : end]), end)
            history.append(token)

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        end = len(self.history)
        for n in range(min(self.MAX_NGRAM, end), 0, -1):
            start = self._first.get(tuple(self.history[end - n : end]))
            if start is not None:
                return self.history[start : start + min(limit, self.DRAFT_TOKENS)]
        return []

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, behind: bool = False
    ) -> None:
        """Ignored."""
