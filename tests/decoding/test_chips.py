"""Each chip has the bandwidth of its whole name, and an unknown chip one of its kind."""

from __future__ import annotations

import plistlib

import mlx.core as mx
import pytest

from akunu_py.decoding import chips, device
from akunu_py.decoding.chips import chip_bandwidth, cores_in


@pytest.mark.parametrize(
    ("name", "cores", "expected"),
    [
        ("Apple M1", 8, 68),
        ("Apple M3 Max", 30, 300),
        ("Apple M3 Max", 40, 400),
        ("Apple M4 Max", 32, 410),
        ("Apple M4 Max", 40, 546),
        ("Apple M5", 10, 153),
        ("Apple M5 Max", 32, 460),
        ("Apple M5 Max", 40, 614),
        ("Apple M4 Max", None, 410),  # the smaller variant, if macOS does not say
    ],
)
def test_known_chips_and_their_variants(name: str, cores: int | None, expected: float) -> None:
    found = chip_bandwidth(name, cores)
    assert (found.gb_per_s, found.estimated) == (expected, False)


@pytest.mark.parametrize(
    ("name", "cores", "low", "high"),
    [
        ("Apple M5 Ultra", 80, 1100, 1300),
        ("Apple M5 Ultra", None, 1100, 1300),
        ("Apple M5 Ultra", 64, 900, 1100),
        ("Apple M6", 10, 120, 200),
        ("Apple M6 Pro", None, 250, 400),
        ("Apple M6 Max", 40, 550, 700),
        ("Apple M6 Ultra", None, 1100, 1400),
        ("Apple M12", None, 120, 200),
        ("Apple M6 Extreme", 160, 2000, 3000),
        ("Apple M6 Extreme", None, 100, 200),  # a kind without any fact: as the smallest
        ("Apple A18 Pro", 5, 40, 80),
        ("Apple Paravirtual device", None, 50, 120),
        ("", None, 50, 120),
    ],
)
def test_an_unknown_chip_is_estimated_from_family_and_cores(
    name: str, cores: int | None, low: float, high: float
) -> None:
    found = chip_bandwidth(name, cores)
    assert found.estimated
    assert low <= found.gb_per_s <= high


def test_no_chip_is_slower_than_a_smaller_one_of_its_generation() -> None:
    for generation in range(1, 9):
        names = [f"Apple M{generation}{kind}" for kind in ("", " Pro", " Max", " Ultra")]
        values = [chip_bandwidth(name, None).gb_per_s for name in names]
        assert values == sorted(values), names


def test_cores_come_from_the_registry_of_macos() -> None:
    entries = [{"IOObjectClass": "AGXAcceleratorG16X"}, {"gpu-core-count": 40}]
    assert cores_in(plistlib.dumps(entries)) == 40
    for other in (b"", b"<plist", plistlib.dumps([]), plistlib.dumps({"a": 1})):
        assert cores_in(other) is None


def test_the_machine_has_the_bandwidth_of_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M5 Ultra"})
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_metal", lambda: True)
    monkeypatch.setattr(chips, "gpu_cores", lambda: 80)
    assert 1.1e12 < device.machine().bandwidth < 1.3e12
