"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import mlx.core as mx
import pytest

from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import DamagedModel, UnknownModel
from akunu_py.models.pull.pull import pull
from akunu_py.models.store import model_store
from akunu_py.types import LoadOptions
from tests.support.engines import altered

# Examples have no deadline: their duration depends on the load of the machine.
hypothesis.settings.register_profile("akunu", deadline=None, max_examples=40)
hypothesis.settings.load_profile("akunu")

TESTS = Path(__file__).parent
RELIABILITY = TESTS / "reliability"
_PARTS = 3
_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze


def pytest_configure() -> None:
    _leave_uncompiled()
    _set_freezing(lambda: None, lambda: None)


def _set_freezing(freeze: Callable[[], None], unfreeze: Callable[[], None]) -> None:
    """Replace what a model's thread calls. It would unfreeze the objects of all tests."""
    setattr(gc, "freeze", freeze)  # noqa: B010 - mypy forbids the assignment
    setattr(gc, "unfreeze", unfreeze)  # noqa: B010


def _leave_uncompiled() -> None:
    """On Linux, MLX starts a C++ compiler for each kind of function, which takes a second."""
    if sys.platform == "linux":
        os.environ["MLX_DISABLE_COMPILE"] = "1"  # in the processes that tests start
        mx.disable_compile()


def pytest_collection() -> None:
    gc.disable()  # imports leave no garbage


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _rotate(config, items)
    _sort(items)


def _rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a third of the tests marked rotating, if AKUNU_TEST_PART is set, to a hash or number.

    A test with parameters keeps a third of them, at least one; a module keeps a third of its tests
    without parameters. The thirds of different tests start at different places.
    """
    part = os.environ.get("AKUNU_TEST_PART")
    if not part:
        return
    groups = [
        (
            item.nodeid if item.nodeid.endswith("]") else f"{item.path.relative_to(TESTS)}["
        ).partition("[")[0]
        if item.get_closest_marker("rotating") and not item.get_closest_marker("slow")
        else None
        for item in items
    ]
    sizes, place = Counter(groups), Counter[str]()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item, group in zip(items, groups, strict=True):
        if group:
            place[group] += 1
            turn = place[group] + zlib.crc32(group.encode()) + int(part, 16)
        (left if group and turn % min(_PARTS, sizes[group]) else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if part := os.environ.get("AKUNU_TEST_PART"):
        terminalreporter.write_line(
            f"Of tests marked rotating, a third ran: AKUNU_TEST_PART={part}, "
            f"part {int(part, 16) % _PARTS + 1} of {_PARTS}."
        )


def _sort(items: list[pytest.Item]) -> None:
    """From end to end is what asks the whole starter, hurts the commands, or sits at a terminal.

    Modules that need the starter come first, then others with tests from end to end: they take
    longest, and none should be left when the other workers are done. Those of all wings take turns:
    some compute, and some mostly wait.
    """
    wings: dict[str, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        wings.setdefault(path.relative_to(TESTS).parts[0], []).append(path)
    turn = {path: at / len(wing) for wing in wings.values() for at, path in enumerate(wing)}
    place = dict.fromkeys(turn, 2)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        asks = "starter" in fixtures and not any("shallow" in name for name in fixtures)
        if asks or "terminal" in fixtures or item.path.is_relative_to(RELIABILITY):
            item.add_marker("e2e")
        if "starter" in fixtures:
            place[item.path] = 0
        elif item.get_closest_marker("e2e"):
            place[item.path] = min(place[item.path], 1)
    items.sort(key=lambda item: (place[item.path], turn[item.path], item.path))


def pytest_collection_finish() -> None:
    _freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Exclude from garbage collection what exists now: modules, and objects of session fixtures.

    Unloading a model collects garbage. Late in a run, that took 0.4 s of CPU time each.
    """
    gc.collect()
    _FREEZE()


@pytest.fixture
def compiled() -> Iterator[None]:
    """MLX compiles functions, as it does for users."""
    mx.enable_compile()
    yield
    _leave_uncompiled()


@pytest.fixture
def models_frozen() -> Iterator[None]:
    """Garbage collection ignores the objects of a loaded model, as it does for users."""
    _set_freezing(_FREEZE, _UNFREEZE)
    yield
    _set_freezing(lambda: None, lambda: None)


@pytest.fixture
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, caches and settings are kept below `tmp_path`."""
    for kind in ("data", "cache", "config"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / kind))


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local time zone is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="session")
def starter() -> model_store.StoredModel:
    """The real starter in the user's store, fetched if it is not there."""
    try:
        model = model_store.get("starter")
        model_store.check(model)
    except (UnknownModel, DamagedModel):
        model = pull("starter")
    return model


@pytest.fixture(scope="session")
def starter_engine(starter: model_store.StoredModel) -> Engine:
    """The real starter, loaded once. Engines are immutable."""
    return Engine.load(starter.path, name="starter")


@pytest.fixture(scope="session")
def shallow_starter(starter_engine: Engine) -> Engine:
    """The starter with 2 of its 30 layers: its tokenizer, template, vocabulary and weights at a
    quarter of the time, for tests in which no answer has to make sense."""
    whole = starter_engine.model
    model = type(whole)(replace(whole.args, num_hidden_layers=2))
    model.model.embed_tokens, model.model.norm = whole.model.embed_tokens, whole.model.norm
    model.model.layers = [whole.model.layers[0], whole.model.layers[-1]]
    return replace(starter_engine, model=model)


@pytest.fixture(scope="session")
def shallow_directory(
    starter: model_store.StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a model like `shallow_starter`, for processes in which no answer has to make
    sense. Read only: tests share its files."""
    from tests.support.shallow import write_shallow

    directory = tmp_path_factory.mktemp("shallow")
    write_shallow(starter.path, directory)
    return directory


@pytest.fixture
def shallow_store(shallow_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in which `shallow_directory` is the starter, for the processes of this test."""
    models = tmp_path / "data" / "akunu" / "models"
    models.mkdir(parents=True)
    (models / "starter").symlink_to(shallow_directory)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def loaded_starter(starter_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Whatever loads the starter in this process is given the one that is loaded already, with the
    KV cache that it asks for: for tests in which loading is not the point. No use is noted."""
    return _reuse(starter_engine, monkeypatch)


@pytest.fixture
def loaded_shallow_starter(shallow_starter: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """As `loaded_starter`, for tests in which no answer has to make sense either."""
    return _reuse(shallow_starter, monkeypatch)


def _reuse(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    load, plain_options = Engine.load, LoadOptions()

    def reuse(path: Path, options: LoadOptions = plain_options, **others: Any) -> Engine:
        plain = options.weights in ("auto", engine.plan.weights) and options.context is None
        if path == engine.path and plain:
            return altered(engine, kv_bits=options.kv_bits)
        return load(path, options, **others)

    monkeypatch.setattr(Engine, "load", reuse)
    monkeypatch.setattr("akunu_py.decoding.load.note_usage", lambda *_, **__: None)
    return engine
