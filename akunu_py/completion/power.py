"""Whether this machine runs on battery."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

_SUPPLIES = Path("/sys/class/power_supply")
_VALID_S = 60.0  # between two checks
_PMSET_S = 2.0  # time limit


class Power:
    """The power source, checked at most once a minute."""

    def __init__(self, supplies: Path = _SUPPLIES) -> None:
        self._supplies = supplies
        self._checked = float("-inf")
        self._on_battery = False

    def on_battery(self) -> bool:
        """Return True if this machine runs on battery, False if that is unknown."""
        now = time.monotonic()
        if now - self._checked >= _VALID_S:
            self._checked = now
            self._on_battery = self._check()
        return self._on_battery

    def _check(self) -> bool:
        if sys.platform == "darwin":
            command = ["/usr/bin/pmset", "-g", "batt"]
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                shown = subprocess.run(command, capture_output=True, text=True, timeout=_PMSET_S)
                return "'Battery Power'" in shown.stdout
            return False
        return any(_is_discharging(supply) for supply in self._supplies.glob("*"))


def _is_discharging(supply: Path) -> bool:
    """Return True for a battery of this machine, not of a mouse, that is discharging."""
    try:
        kind = (supply / "type").read_text().strip()
        status = (supply / "status").read_text().strip()
    except (OSError, ValueError):
        return False
    with contextlib.suppress(OSError, ValueError):
        if (supply / "scope").read_text().strip() == "Device":
            return False
    return kind == "Battery" and status == "Discharging"
