"""Says at the end of a run how many altered inputs were tried."""

from __future__ import annotations

import pytest

from tests.reliability.fuzz import TRIED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for module, count in sorted(TRIED.items()):
        terminalreporter.write_line(f"{count:8,} altered inputs, {module.rpartition('.')[2]}")
    if TRIED:
        terminalreporter.write_line(f"{TRIED.total():8,} altered inputs in all")
