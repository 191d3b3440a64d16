"""What all tests of the chat share."""

from __future__ import annotations

import pytest

from akunu_py.tui.status import StatusLine


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the status line: pictures must not depend on how busy the machine is."""
    monkeypatch.setattr(StatusLine, "clock", lambda: 0.0)
