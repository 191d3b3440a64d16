"""Runners: what the bench measures, side by side. Each answers a workload once, timed.

`mlx_lm` has mlx-lm's loops, `akunu` our engine, `peers` the loops of other makers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from akunu_py.bench.workloads import Workload

PLAIN = "mlx-lm"
"""The runner whose speed is 1.00, on the same weights as ours."""
OFF = "off"
TURN_BREAK = "\n\n— next turn —\n\n"


@dataclass(frozen=True, slots=True)
class Conditions:
    """How to answer. temperature 0 is greedy; above it nothing else filters."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Passes:
    """The passes of one answer, or of several in turn.

    drafted, accepted: tokens, by pass. sources: what drafted tokens came from -> [how many were
    tested, how many accepted]; a token behind a rejected one is not tested.
    draft_s: seconds spent in the drafter, from pass to pass: without learning a prompt.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    sources: dict[str, list[int]] = field(default_factory=dict)
    draft_s: float = 0.0


@dataclass(slots=True)
class Run:
    """One conversation. turns: (prompt, output) of each answer, as token ids.

    decoded: output tokens after the first of each answer, which comes from the prefill.
    decode_s: how long those took. ttft_s: time to the first token of each answer.
    peak_bytes: the most that MLX held, 0 where that was not measured.
    """

    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    decoded: int = 0
    decode_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    passes: Passes = field(default_factory=Passes)
    peak_bytes: int = 0
    text: str = ""

    def add(
        self,
        prompt: list[int],
        output: list[int],
        ttft_s: float,
        decode_s: float,
        prefilled: int = 1,
    ) -> None:
        """Adds an answer, `prefilled` of whose tokens came with the prefill."""
        self.turns.append((prompt, output))
        self.decoded += max(0, len(output) - prefilled)
        self.ttft_s.append(ttft_s)
        self.decode_s += decode_s


class Runner(Protocol):
    """baseline: the name of the runner whose speed counts as 1.00. foreign: what it runs is not
    ours, so that it may fail without ending the bench."""

    name: str
    baseline: str
    foreign: bool

    def reference(self, temperature: float) -> str | None:
        """The runner whose output must be the same, token for token; None for none."""

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        """Answers the turns of `workload`."""
