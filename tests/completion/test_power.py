"""The power source of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from akunu_py.completion.power import Power


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"type": "Mains", "online": "1"}, False),
        ({"type": "Battery", "status": "Discharging"}, True),
        ({"type": "Battery", "status": "Charging"}, False),
        ({"type": "Battery", "status": "Discharging", "scope": "Device"}, False),  # of a mouse
        ({"type": "Battery"}, False),
    ],
)
def test_a_discharging_battery_on_linux(
    files: dict[str, str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "BAT0").mkdir()
    for name, text in files.items():
        (tmp_path / "BAT0" / name).write_text(text + "\n")
    assert Power(tmp_path).on_battery() == expected


@pytest.mark.parametrize("source", ["AC Power", "Battery Power"])
def test_the_source_on_macos_is_checked_once_a_minute(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(stdout=f"Now drawing from '{source}'\n -InternalBattery-0")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    power = Power()
    assert power.on_battery() == power.on_battery() == (source == "Battery Power")
    assert len(calls) == 1
