"""Runners: loops that answer a workload once and measure the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from akunu_py.bench.workloads import Workload

PLAIN = "mlx-lm"  # the baseline, on the same weights as our runners
OFF = "off"
TURN_BREAK = "\n\n— next turn —\n\n"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Sampling conditions of one run."""

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy; no other sampling filters
    seed: int = 0


@dataclass(slots=True)
class Passes:
    """The passes of one or several answers."""

    drafted: list[int] = field(default_factory=list)  # tokens of each pass
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0  # time in the drafter, without the prompt


@dataclass(slots=True)
class Run:
    """The measurements of one conversation."""

    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt, output
    decoded: int = 0  # output tokens, without those that the prefill yields
    decode_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)  # time to first token of each answer
    passes: Passes = field(default_factory=Passes)
    peak_bytes: int = 0  # of MLX's memory, 0 if not measured
    text: str = ""

    def add(
        self, prompt: list[int], output: list[int], ttft_s: float, decode_s: float, first: int = 1
    ) -> None:
        """Add an answer. first: number of output tokens that the prefill yielded."""
        self.turns.append((prompt, output))
        self.decoded += max(0, len(output) - first)
        self.ttft_s.append(ttft_s)
        self.decode_s += decode_s


class Runner(Protocol):
    """A loop that answers workloads."""

    name: str
    baseline: str  # the runner whose speed is 1.00
    foreign: bool  # not our code; its failure does not end the bench

    def reference(self, temperature: float) -> str | None:
        """Return the name of the runner whose output must be identical, if any."""

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        """Answer the turns of `workload`."""
