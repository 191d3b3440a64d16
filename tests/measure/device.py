"""Replay traces through the decode loop on a simulated device, in virtual time.

A simulated device runs the forward passes in launch order. A pass over n rows takes `curve(n)`.
Building a pass takes the host a share of a plain step (the gap). The device idles during the gap
unless an earlier pass is still running. The drafter learns the costs from observed times, as on a
real machine: with noise, outliers, and slow first passes, when kernels are compiled.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

from akunu_py.bench.command import add_workloads, show
from akunu_py.bench.curve import Curve, add_curve_option, parse_curve
from akunu_py.bench.replay import ReplayCounts, load_selected, print_replay, sharing
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.engine.histories.history import NO_OWNER, TokenHistory
from akunu_py.engine.histories.memory import PromptCaches
from akunu_py.engine.request import DecodePass, Request
from akunu_py.engine.target import Target
from akunu_py.errors import UsageError
from akunu_py.ngram.acceptance_model import SharedWeights
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.parser import add_format
from akunu_py.types import DRAFT_MODES, NEURAL_MODES, Drafter, DraftMode
from tests.measure.neural_drafters import DrafterFigures, SimulatedDrafters, mixture_drafter
from tests.measure.tool import run_tool
from tests.support.decoding import BareRunner, decode
from tests.support.drafters import FixedCosts

_OUTLIER_FACTOR = 10.0  # times as long as usual takes an outlier
_MIN_SHARE = 0.5  # of its time a pass takes at least, whatever the noise


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Properties of a simulated device; times are in plain steps.

    Noise, outliers and first passes affect observed times only. They do not count in the score.
    """

    gap: float = 0.0  # host time to build and launch a pass
    noise: float = 0.0  # standard deviation of observed times, as a share
    outliers: float = 0.0  # share of passes observed as ten times slower
    first: float = 0.0  # extra observed time of the first pass over each number of rows
    seed: float = 1.0  # of the noise
    known: float = 0.0  # 1 if the drafter knows the costs from the start


def parse_device(text: str) -> DeviceOptions:
    """Parse text such as `gap:0.15,noise:0.05`. Raises UsageError."""
    try:
        parts = [part.split(":") for part in text.split(",") if part]
        options = DeviceOptions(**{name: float(value) for name, value in parts})
        if all(0.0 <= value < math.inf for value in asdict(options).values()):
            return options
    except (TypeError, ValueError):
        pass
    names = ", ".join(each.name for each in fields(DeviceOptions))
    example = "gap:0.15,noise:0.05"
    raise UsageError(
        f"--device: expected {names} with a number from 0 up each, such as {example}, got {text!r}"
    )


def parse_figures(text: str) -> DrafterFigures:
    """Parse text such as `mtp:0.06:0.8,0.65,0.5`. Raises UsageError."""
    try:
        name, cost, shares = text.split(":")
        parallel = name == "block"
        name = "model" if parallel else name
        accepted = tuple(map(float, shares.split(",")))
        figures = DrafterFigures(name, float(cost), accepted, parallel)
        falling = all(after <= before for before, after in pairwise((1.0, *figures.accepted, 0.0)))
        if name in NEURAL_MODES and 0 < figures.cost < math.inf and falling:
            return figures
    except ValueError:
        pass
    raise UsageError(
        "--network: expected mtp, model or exit and the cost of a token, or block and the cost of "
        "a draft, then the shares accepted by position, which do not rise, such as "
        f"mtp:0.06:0.8,0.65,0.5, got {text!r}"
    )


class _Clock:
    """The time of the host, and the time when the device becomes idle."""

    def __init__(self) -> None:
        self.now = self._free = 0.0

    def launch(self, host: float, device: float) -> float:
        """Return the completion time of a pass that the host builds now."""
        self.now += host
        self._free = max(self.now, self._free) + device
        return self._free

    def wait(self, done: float) -> None:
        self.now = max(self.now, done)


Times = tuple[float, float]  # true, observed


class Device:
    """A simulated device with two clocks: `true` for the score, `observed` for the drafter."""

    def __init__(self, curve: Callable[[int], float], options: DeviceOptions) -> None:
        self.true, self.observed = _Clock(), _Clock()
        self._curve, self._options = curve, options
        self._random = random.Random(options.seed)
        self._used: set[int] = set()

    def launch(self, rows: int) -> Times:
        """Return the completion times of a pass over `rows` rows."""
        options, cost, factor = self._options, self._curve(rows), self._noise()
        first = 0.0 if rows in self._used else options.first
        self._used.add(rows)
        if self._random.random() < options.outliers:
            factor *= _OUTLIER_FACTOR
        done = self.true.launch(options.gap, cost)
        return done, self.observed.launch(options.gap, cost * factor + first)

    def draft(self, cost: float) -> None:
        """Run a forward pass of a neural drafter and wait for it. Its gap scales with `cost`."""
        gap = cost * self._options.gap
        done = self.true.launch(gap, cost)
        self.wait((done, self.observed.launch(gap, cost * self._noise())))

    def wait(self, done: Times) -> None:
        self.true.wait(done[0])
        self.observed.wait(done[1])

    def _noise(self) -> float:
        return max(_MIN_SHARE, self._random.gauss(1.0, self._options.noise))


@dataclass(frozen=True, slots=True)
class _Launched:
    tokens: list[int]
    device: Device
    done: Times

    def tolist(self) -> list[int]:
        self.device.wait(self.done)
        return list(self.tokens)


class SimulatedRunner(BareRunner):
    """Launches passes on the device of the target, instead of a model."""

    def _launch(
        self, requests: Sequence[Request], drafts: Sequence[list[int]], *, ahead: bool = False
    ) -> None:
        (request,), (drafted,) = requests, drafts
        target: Any = request.target
        known = request.launched[0].sampled.tokens if ahead else target.pending
        rows: Any = [*known, *drafted]
        sampled = target.launch(rows, 1 + len(drafted), ahead=ahead)
        request.launched.append(DecodePass(drafted, None, ahead, rows, sampled))

    def _wait_for(self, running: Sequence[Request]) -> None:
        running[0].launched[0].sampled.tolist()


class SimulatedTarget(Target):
    """A target that replays the trace and takes its time on `device`."""

    def __init__(self, device: Device, item: TraceItem) -> None:
        self.vocabulary = None
        self.constraint = None
        self.caches, self._history = PromptCaches(), None
        self.history = TokenHistory([], NO_OWNER, item.prompt, item.output[:1])
        self._device = device
        self._truth = [*item.prompt, *item.output]

    def launch(self, rows: Sequence[int], wanted: int, *, ahead: bool) -> _Launched:
        start = len(self.tokens) + len(self.pending) * ahead
        expected = self._truth[start : start + len(rows) + 1]
        matching = next(
            (i for i, row in enumerate(rows) if expected[i : i + 1] != [row]), len(rows)
        )
        sampled = [token if i <= matching else -1 for i, token in enumerate(expected)][1:]
        return _Launched(sampled[-wanted:], self._device, self._device.launch(len(rows)))

    def roll_back(self, before: Any, written: int, kept: int) -> int:
        return kept

    def clock(self) -> float:  # type: ignore[override]
        return self._device.observed.now


def replay_on_device(
    trace: Trace, curve: Curve, mode: DraftMode, options: DeviceOptions,
    figures: Sequence[DrafterFigures] = (),
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return counts and rates by workload, each on its own device.

    The score is the speed relative to pipelined plain decoding on the same device. Each item gets a
    new drafter with the costs and weights learned from earlier items.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, items in trace.workloads.items():
        costs = known_costs(curve, options) if options.known else CostCurve()
        neural_drafters = SimulatedDrafters(figures)
        drafter = partial(mixture_drafter, mode, costs, neural_drafters)
        counts = replay_items(items, curve, options, drafter, neural_drafters)
        plain = replay_items(items, curve, options, NoDrafter)
        found[name] = counts.as_dict()
        for time in ("draft_us_per_token", "learn_us_per_prompt_token"):
            del found[name][time]  # wall-clock times mean nothing here
        found[name]["score"] = round(plain.cost / counts.cost, 4) if counts.cost else 0.0
    return found


def replay_items(
    items: Sequence[TraceItem], curve: Callable[[int], float], options: DeviceOptions,
    make_drafter: Callable[[], Drafter], neural_drafters: SimulatedDrafters | None = None,
) -> ReplayCounts:  # fmt: skip
    """Decode the items one after the other on one device and return the counts."""
    device, weights = Device(curve, options), SharedWeights()
    counts, neural_drafters = ReplayCounts(), neural_drafters or SimulatedDrafters()
    neural_drafters.spend, neural_drafters.clock = device.draft, lambda: device.observed.now
    for item in items:
        neural_drafters.item = item
        drafter = make_drafter()
        drafter.extend(item.prompt)
        drafter.extend(item.output[:1])
        limit = len(item.output) - 1
        target = SimulatedTarget(device, item)
        output = [item.output[0]]
        with sharing(weights, drafter):
            for piece in decode(target, drafter, limit, (), SimulatedRunner()):
                output += piece.tokens
                counts.passes += 1
                counts.drafted += piece.accepted + len(piece.rejected)
                counts.accepted += piece.accepted
        if output != list(item.output):
            raise AssertionError("the output differs from the trace")
        counts.items += 1
        counts.tokens += limit
    counts.cost = device.true.now
    return counts


def known_costs(curve: Curve, options: DeviceOptions) -> CostCurve:
    """Return the true costs of passes on such a device."""
    fresh = {rows: options.gap + curve(rows) for rows in range(1, MAX_ROWS + 1)}
    return FixedCosts({PIPELINED: max(curve(1), options.gap)} | fresh)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="TRACES", help="Trace file, gzipped or not")
    add_curve_option(parser)
    what = "Properties of the device, such as gap:0.15,noise:0.05,first:5 (default: ideal)"
    parser.add_argument("--device", default="", metavar="GAP:...", help=what)
    parser.add_argument(
        "--network",
        dest="figures",
        action="append",
        default=[],
        metavar="NAME:COST:SHARE,...",
        help="Simulated drafter: draft mode and cost of a token in plain steps, or block and the "
        "cost of a draft, and the shares accepted by position, such as mtp:0.06:0.8,0.65,0.5; "
        "repeatable",
    )
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto", help="Draft mode")
    add_workloads(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    found = replay_on_device(
        load_selected(options.file, options.workload),
        parse_curve(options.curve),
        options.draft,
        parse_device(options.device),
        [parse_figures(text) for text in options.figures],
    )
    name = f"{options.curve} on a device ({options.device or 'ideal'})"
    as_json = {name: getattr(options, name) for name in ("curve", "draft", "device")}
    show(options, as_json | {"workloads": found}, lambda: print_replay(name, options.draft, found))
    return 0


main = partial(run_tool, "device", "Replay recorded answers through the decode loop, on a "
               "simulated device", add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
