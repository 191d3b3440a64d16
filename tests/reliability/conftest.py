"""Says at the end of a run how many altered inputs were tried, and what they took."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reliability.fuzz import LONGEST_S, TRIED, peak_mb

_peaks: list[float] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist, in one of its workers
        tried = {name: [count, LONGEST_S.get(name, 0.0)] for name, count in TRIED.items()}
        session.config.workeroutput |= {"tried": tried, "peak": peak_mb()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    given = getattr(node, "workeroutput", {})
    for name, (count, seconds) in given.get("tried", {}).items():
        TRIED[name] += count
        LONGEST_S[name] = max(seconds, LONGEST_S.get(name, 0.0))
    _peaks.append(given.get("peak", 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in sorted(TRIED.items()):
        module, seconds = name.rpartition(".")[2], LONGEST_S.get(name, 0.0)
        terminalreporter.write_line(f"{count:8,} altered inputs, {module}: {seconds:.1f} s at most")
    if TRIED:
        peak = max([*_peaks, peak_mb()])
        terminalreporter.write_line(f"{TRIED.total():8,} in all; {peak:,.0f} MB at the peak")
