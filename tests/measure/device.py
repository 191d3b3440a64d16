"""`python -m tests.measure.device TRACES --device OPTIONS`: replay recorded outputs through the
decode loop itself, on a simulated device in virtual time.

A host builds passes and launches them, a device runs them in the order in which they came. A pass
over n rows takes the device `curve(n)`; building one takes the host a share of a plain step (the
gap), and the device idles meanwhile, unless a pass that was launched before is still running. The
drafter learns what passes cost from what it is told, as it does on a real machine: with noise,
outliers, and first uses of a row count, for which a kernel is compiled.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from akunu_py.bench.command import add_format, show
from akunu_py.bench.curve import Curve, FixedCosts, add_curve, parse_curve
from akunu_py.bench.replay import ReplayCounts, add_drafting, load_selected, print_replay
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.decoding.generate.decode import decode
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DRAFT_MODES, Drafter, DraftMode
from tests.measure.neural_drafters import (
    DrafterFigures,
    SimulatedDrafters,
    add_drafter_options,
    new_drafter,
    parse_figures,
)
from tests.measure.tool import run_tool

SUMMARY = "Replay recorded answers through the decode loop, on a simulated device"
_SLOWER = 10.0  # times as long as usual takes an outlier
_LEAST = 0.5  # of its time a pass takes at least, whatever the noise


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What a simulated device is like; times are in plain steps.

    gap: of the host, to build a pass and launch it. reader: of whoever reads the answer, a piece.
    noise: the standard deviation of the times that are told, as a share. outliers: the share of
    passes told to have taken ten times as long. first: how much longer the first pass over each
    number of rows is told to take. seed: of the noise. known: 1 where the drafter knows the costs
    beforehand.

    Noise, outliers and first uses are told but do not count in the score: chance would blur it, and
    kernels are compiled once, however short the traces.
    """

    gap: float = 0.0
    reader: float = 0.0
    noise: float = 0.0
    outliers: float = 0.0
    first: float = 0.0
    seed: float = 1.0
    known: float = 0.0


def parse_device(text: str) -> DeviceOptions:
    """Options from a text such as `gap:0.15,noise:0.05`. Raises UsageError for anything else."""
    names = [field.name for field in fields(DeviceOptions)]
    given: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in names or name in given or not 0.0 <= number < float("inf"):
            raise UsageError(
                f"--device: expected {', '.join(names)} with a number from 0 up each, such as "
                f"gap:0.15,noise:0.05, found {part!r}"
            )
        given[name] = number
    return DeviceOptions(**given)


class _Clock:
    """The time of the host, and when the device will be free."""

    def __init__(self) -> None:
        self.now = self._free = 0.0

    def launch(self, host: float, device: float) -> float:
        """When a pass is done that the host builds now."""
        self.now += host
        self._free = max(self.now, self._free) + device
        return self._free

    def wait(self, done: float) -> None:
        self.now = max(self.now, done)


class Device:
    """true: the time that counts. told: what the drafter sees of it."""

    def __init__(self, curve: Callable[[int], float], options: DeviceOptions) -> None:
        self.true, self.told = _Clock(), _Clock()
        self._curve = curve
        self._options = options
        self._random = random.Random(options.seed)
        self._used: set[int] = set()

    def launch(self, rows: int) -> tuple[float, float]:
        """When a pass over `rows` rows is done, in true and in told time."""
        options = self._options
        cost = self._curve(rows)
        first = 0.0 if rows in self._used else options.first
        self._used.add(rows)
        factor = max(_LEAST, self._random.gauss(1.0, options.noise))
        if self._random.random() < options.outliers:
            factor *= _SLOWER
        return self.true.launch(options.gap, cost), self.told.launch(
            options.gap, cost * factor + first
        )

    def draft(self, cost: float) -> None:
        """A pass of a network that drafts, which the host waits for; building it takes as much less
        as the pass."""
        gap = cost * self._options.gap
        noise = max(_LEAST, self._random.gauss(1.0, self._options.noise))
        self.wait((self.true.launch(gap, cost), self.told.launch(gap, cost * noise)))

    def wait(self, done: tuple[float, float]) -> None:
        self.true.wait(done[0])
        self.told.wait(done[1])

    def read_piece(self) -> None:
        """The reader takes a piece, and the host waits for that."""
        self.true.now += self._options.reader
        self.told.now += self._options.reader


@dataclass(frozen=True, slots=True)
class _Launched:
    tokens: list[int]
    done: tuple[float, float]


class SimulatedTarget(Target):
    """A target that says what is in the trace, and takes its time on `device`."""

    def __init__(self, device: Device, item: TraceItem) -> None:
        self.vocabulary = None
        self.constraint = None
        self.caches, self._history, self.alone = PromptCaches(), None, True
        self.history = TokenHistory([], item.prompt, item.output[:1])
        self._device = device
        self._truth = [*item.prompt, *item.output]

    # MLX's array is what the loop hands on without looking into it.
    def launch(self, rows: Sequence[int], wanted: int, after: Any = None) -> Any:
        start = len(self.tokens)
        if after is not None:
            start += len(self.pending)
            rows = [*after.tokens, *rows]
        right = self._truth[start : start + len(rows) + 1]
        same = next((i for i, row in enumerate(rows) if right[i : i + 1] != [row]), len(rows))
        sampled = [token if i <= same else -1 for i, token in enumerate(right)][1:]
        return _Launched(sampled[-wanted:], self._device.launch(len(rows)))

    def read(self, sampled: Any) -> list[int]:
        self._device.wait(sampled.done)
        return list(sampled.tokens)

    def pass_state(self) -> None:
        """There is nothing to undo."""

    def roll_back(self, before: Any, written: int, kept: int) -> int:
        return kept

    def clock(self) -> float:  # type: ignore[override]
        return self._device.told.now


def replay_on_device(
    trace: Trace,
    curve: Curve,
    mode: DraftMode,
    options: DeviceOptions,
    *,
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
    memory: bool = False,
    figures: Sequence[DrafterFigures] = (),
) -> dict[str, dict[str, Any]]:
    """Return counts and rates by workload, each on a device of its own.

    The score is output tokens per unit of time, where pipelined plain decoding on such a device
    has 1. The drafter is new for each item; what it learns of costs is kept from item to item, and
    with `memory` the outputs too.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, items in trace.workloads.items():
        learned = AnswerCache() if memory else None
        costs = known_costs(curve, options) if options.known else CostCurve()
        neural_drafters = SimulatedDrafters(figures)
        drafter = partial(new_drafter, mode, costs, neural_drafters, learned, draft_tokens)
        counts = replay_items(items, curve, options, drafter, learned, neural_drafters)
        plain = replay_items(items, curve, options, NoDrafter)
        found[name] = counts.as_dict()
        del found[name]["draft_us_per_token"]  # no time of this machine
        found[name]["score"] = round(plain.cost / counts.cost, 4) if counts.cost else 0.0
    return found


def replay_items(
    items: Sequence[TraceItem],
    curve: Callable[[int], float],
    options: DeviceOptions,
    make_drafter: Callable[[], Drafter],
    memory: AnswerCache | None = None,
    neural_drafters: SimulatedDrafters | None = None,
) -> ReplayCounts:
    """What decoding the items takes, one after the other on the same device."""
    device = Device(curve, options)
    counts, neural_drafters = ReplayCounts(), neural_drafters or SimulatedDrafters()
    neural_drafters.spend, neural_drafters.clock = device.draft, lambda: device.told.now
    for item in items:
        neural_drafters.item = item
        drafter = make_drafter()
        drafter.extend(item.prompt)
        drafter.extend(item.output[:1])
        limit = len(item.output) - 1
        target = SimulatedTarget(device, item)
        said = [item.output[0]]
        for piece in decode(target, drafter, limit, ()):
            said += piece.tokens
            counts.passes += 1
            counts.drafted += piece.accepted + len(piece.rejected)
            counts.accepted += piece.accepted
            device.read_piece()
        if said != list(item.output):
            raise AssertionError("the loop said something else than the trace")
        counts.items += 1
        counts.tokens += limit
        if memory is not None:
            memory.learn(item.output)
    counts.cost = device.true.now
    return counts


def known_costs(curve: Curve, options: DeviceOptions) -> CostCurve:
    """What passes take on such a device, known beforehand."""
    fresh = {rows: options.gap + curve(rows) for rows in range(1, MAX_ROWS + 1)}
    return FixedCosts({PIPELINED: max(curve(1), options.gap + options.reader)} | fresh)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="TRACES", help="Trace file, gzipped or not")
    add_curve(parser)
    parser.add_argument(
        "--device",
        default="",
        metavar="GAP:...",
        help="Properties of the device, such as gap:0.15,noise:0.05,first:5 (default: ideal)",
    )
    add_drafter_options(parser, required=False)
    add_drafting(parser, DRAFT_MODES)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    found = replay_on_device(
        load_selected(options.file, options.workload),
        parse_curve(options.curve),
        options.draft,
        parse_device(options.device),
        draft_tokens=options.draft_tokens,
        memory=options.memory,
        figures=[parse_figures(text) for text in options.neural_drafter],
    )
    name = f"{options.curve} on a device ({options.device or 'ideal'})"
    as_json = {
        "curve": options.curve,
        "draft": options.draft,
        "device": options.device,
        "workloads": found,
    }
    show(options, as_json, lambda: print_replay(name, options.draft, found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("device", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
