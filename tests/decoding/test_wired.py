"""Memory is wired from the first model that is loaded to the last that is dropped, and no answer
changes that. What MLX is told is counted; only Metal heeds it."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.decoding import device
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import DoesNotFit
from akunu_py.types import GenerateOptions
from tests.support.tiny_model import tiny_directory

RECOMMENDED, BEFORE = 1 << 40, 77


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that MLX was told, as on a Mac with a terabyte."""
    limits: list[int] = []
    current = [BEFORE]

    def set_wired_limit(limit: int) -> int:
        limits.append(limit)
        before, current[0] = current[0], limit
        return before

    info = {"max_recommended_working_set_size": RECOMMENDED}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(device, "on_metal", lambda: True)
    return limits


@pytest.mark.long
def test_from_the_first_load_to_the_last_unload(
    told: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_directory(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(device, "available_memory", lambda: 1000)
        with pytest.raises(DoesNotFit):
            Engine.load(path)
    assert told == []  # what is refused is never wired
    first = Engine.load(path)
    for _ in range(2):
        Session(first).generate([1, 2], GenerateOptions(max_tokens=2)).answer()
    second = Engine.load(path)
    assert told == [RECOMMENDED]
    del first
    gc.collect()
    Session(second).generate([1, 2], GenerateOptions(max_tokens=2)).answer()
    assert told == [RECOMMENDED]
    del second
    gc.collect()
    assert told == [RECOMMENDED, BEFORE]
    again = Engine.load(path)
    assert told == [RECOMMENDED, BEFORE, RECOMMENDED]
    del again
    gc.collect()
    assert told[3:] == [BEFORE]
