"""Weights are wired from load to unload, KV caches only while idle. What MLX is told is counted;
only Metal heeds it."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from akunu_py.decoding import device, wired
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_stored
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.errors import DoesNotFit, UsageError
from akunu_py.models.store import model_store
from akunu_py.settings import save_settings
from akunu_py.types import WIRE_MODES, GenerateOptions, LoadOptions, WireMode
from tests.support.tiny_model import tiny_directory

RECOMMENDED, BEFORE = 1 << 40, 77
HEAP, STEP = 1 << 20, 256 << 20  # bytes

pytestmark = pytest.mark.usefixtures("own_directories")


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
    monkeypatch.setattr(wired, "_models", {})
    return limits


def load(path: Path, wire: WireMode | None = None) -> Engine:
    return Engine.load(path, LoadOptions(wire=wire))


def weights_of(engine: Engine) -> int:
    """What Metal allocates: whole pages."""
    sizes = [array.nbytes for _, array in tree_flatten(engine.model.parameters())]
    return sum(-(-size // (16 << 10)) * (16 << 10) for size in sizes)


def test_the_weights_are_wired_from_load_to_unload(
    told: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_directory(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(device, "available_memory", lambda: 1000)
        with pytest.raises(DoesNotFit):
            load(path)
    assert told == []  # what is refused is never wired
    first = load(path)
    limit = weights_of(first) + HEAP
    for _ in range(2):
        Session(first).generate([1, 2], GenerateOptions(max_tokens=2)).answer()
    assert told == [limit]
    second = load(path)  # a pass of the first may be running
    del first
    gc.collect()
    Session(second).generate([1, 2], GenerateOptions(max_tokens=2)).answer()
    assert told == [limit]
    del second
    gc.collect()
    assert told == [limit, BEFORE]
    again = load(path)
    assert told == [limit, BEFORE, limit]
    del again
    gc.collect()
    assert told[3:] == [BEFORE]


def test_the_weights_of_a_draft_model_are_wired_too(told: list[int], tmp_path: Path) -> None:
    path = tiny_directory(tmp_path)
    small = load(path, "off")
    engine = Engine.load(path, draft_model=("small", path))
    assert told == []  # another model is loaded
    expected = 2 * weights_of(small) + HEAP
    del small
    gc.collect()
    Session(engine).save_idle()
    assert told == [expected]
    del engine
    gc.collect()


def test_off_wires_nothing(told: list[int], tmp_path: Path) -> None:
    engine = load(tiny_directory(tmp_path), "off")
    Session(engine).save_idle()
    del engine
    gc.collect()
    assert told == []


def test_caches_are_wired_in_steps_while_idle_and_only_if_asked(
    told: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size = tiny_directory(tmp_path), [0]
    monkeypatch.setattr(TokenHistory, "nbytes", property(lambda self: size[0]))
    for mode in WIRE_MODES:
        told.clear()
        engine = load(path, mode)
        limit, session = weights_of(engine) + HEAP, Session(engine)
        for held, steps in ((1, 1), (STEP, 1), (STEP + 1, 2), (5, 1)):
            size[0] = 0
            before = list(told)
            session.generate([1, 2], GenerateOptions(max_tokens=4)).answer()
            assert told == before  # never between two passes
            size[0] = held
            session.save_idle()
            expected = {"off": [], "weights": [limit], "all": [limit + steps * STEP]}[mode]
            assert told[-1:] == expected
        assert len(told) == {"off": 0, "weights": 1, "all": 4}[mode]
        del engine, session
        gc.collect()


def test_no_limit_exceeds_what_macos_recommends(
    told: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_directory(tmp_path)
    monkeypatch.setattr(device, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 5000})
    engine = load(path)
    assert told == [5000]
    del engine
    gc.collect()


def test_unused_buffers_are_limited_by_what_a_chunk_of_a_prompt_needs(
    told: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    path = tiny_directory(tmp_path)
    load(path)
    assert limits == []  # the limit of MLX's CPU backend is smaller
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    engine = load(path)
    assert limits == [max(wired.MIN_UNUSED, engine.plan.fit.estimate.working)]


def test_option_comes_before_setting(told: list[int], tmp_path: Path) -> None:
    path = tiny_directory(tmp_path)
    save_settings({"wire": "off"})
    stored = model_store.resolve(str(path))
    assert load_stored(stored, LoadOptions()).plan.wire == "off"
    assert load_stored(stored, LoadOptions(wire="all")).plan.wire == "all"
    with pytest.raises(UsageError, match='"off" or "weights" or "all"'):
        save_settings({"wire": "most"})
    assert load_stored(stored, LoadOptions()).plan.wire == "off"
