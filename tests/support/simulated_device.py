"""The decode loop on a simulated device, in virtual time.

The device runs the forward passes in launch order. A pass over n rows takes `curve(n)`. Building a
pass takes the host a share of a plain step (the gap). The device idles during the gap unless an
earlier pass is still running. The drafter learns the costs from observed times, as on a real
machine: with noise, outliers, and slow first passes, when kernels are compiled.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from akunu_py.bench.trace import TraceItem
from akunu_py.engine.histories.history import NO_OWNER, TokenHistory
from akunu_py.engine.histories.memory import PromptCaches
from akunu_py.engine.request import DecodePass, Request
from akunu_py.engine.target import Target
from akunu_py.types import Drafter, Piece
from tests.support.decoding import BareRunner, decode

_OUTLIER_FACTOR = 10.0  # times as long as usual takes an outlier
_MIN_SHARE = 0.5  # of its time a pass takes at least, whatever the noise


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Properties of a simulated device; times are in plain steps.

    Noise, outliers and first passes affect observed times only. They do not count in the true time.
    """

    gap: float = 0.0  # host time to build and launch a pass
    noise: float = 0.0  # standard deviation of observed times, as a share
    outliers: float = 0.0  # share of passes observed as ten times slower
    first: float = 0.0  # extra observed time of the first pass over each number of rows
    seed: float = 1.0  # of the noise


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
    """Two clocks: `true` for the result, `observed` for the drafter."""

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


def decode_on(device: Device, item: TraceItem, drafter: Drafter) -> Iterator[Piece]:
    """Decode the output of an item with a new drafter, and compare it."""
    drafter.extend(item.prompt)
    drafter.extend(item.output[:1])
    target, output = SimulatedTarget(device, item), [item.output[0]]
    for piece in decode(target, drafter, len(item.output) - 1, (), SimulatedRunner()):
        output += piece.tokens
        yield piece
    assert output == list(item.output)


def decoding_time(
    item: TraceItem, curve: Callable[[int], float], options: DeviceOptions, drafter: Drafter
) -> float:
    """Return the true time of the output's decode passes."""
    device = Device(curve, options)
    for _ in decode_on(device, item, drafter):
        pass
    return device.true.now
