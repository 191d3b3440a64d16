"""Says at the end of a run how many altered inputs were tried."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reliability.fuzz import TRIED


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist, in one of its workers
        session.config.workeroutput["tried"] = dict(TRIED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TRIED.update(getattr(node, "workeroutput", {}).get("tried", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for module, count in sorted(TRIED.items()):
        terminalreporter.write_line(f"{count:8,} altered inputs, {module.rpartition('.')[2]}")
    if TRIED:
        terminalreporter.write_line(f"{TRIED.total():8,} altered inputs in all")
