"""Fixtures that several test files share."""

import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import mlx.core as mx
import pytest

from akunu_py.engine.engine import Engine
from akunu_py.errors import DamagedModel, UnknownModel
from akunu_py.models.pull.pull import pull
from akunu_py.models.store import model_store
from akunu_py.types import LoadOptions
from tests.support.engines import altered
from tests.support.tiny_fim import write_chat_model

# Examples have no deadline: their duration depends on the load of the machine.
hypothesis.settings.register_profile("akunu", deadline=None, max_examples=30)
hypothesis.settings.load_profile("akunu")

TESTS = Path(__file__).parent
RELIABILITY = TESTS / "reliability"
_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze


def pytest_configure() -> None:
    _restore_signals()
    _disable_compile()
    _set_freezing(lambda: None, lambda: None)


def _restore_signals() -> None:
    """Let the processes that tests start receive SIGINT, SIGQUIT and SIGHUP.

    `nohup` and shells that start a background job ignore these signals, and processes inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            # New processes reset handlers, but not SIG_IGN. The test run itself goes on.
            signal.signal(number, lambda *_: None)


def _set_freezing(freeze: Callable[[], None], unfreeze: Callable[[], None]) -> None:
    """Replace what a model's thread calls. It would unfreeze the objects of all tests."""
    setattr(gc, "freeze", freeze)  # noqa: B010 - mypy forbids the assignment
    setattr(gc, "unfreeze", unfreeze)  # noqa: B010


def _disable_compile() -> None:
    """On Linux, MLX starts a C++ compiler for each kind of function, which takes a second."""
    if sys.platform == "linux":
        os.environ["MLX_DISABLE_COMPILE"] = "1"  # in the processes that tests start
        mx.disable_compile()


def pytest_collection() -> None:
    gc.disable()  # imports leave no garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark end-to-end tests, and sort: slowest modules first, and all wings in turn.

    End-to-end tests generate with the whole starter, inject faults, or drive a terminal. Modules
    that use the starter come first, so that none is left when the other workers have finished.
    Some wings compute and some mostly wait.
    """
    wings: dict[str, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        wings.setdefault(path.relative_to(TESTS).parts[0], []).append(path)
    turn = {path: at / len(wing) for wing in wings.values() for at, path in enumerate(wing)}
    place = dict.fromkeys(turn, 2)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        whole = "starter" in fixtures and not any("shallow" in name for name in fixtures)
        if whole or "terminal" in fixtures or item.path.is_relative_to(RELIABILITY):
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
    """Exclude existing objects (modules, session fixtures) from garbage collection.

    Otherwise each unloading of a model costs 0.4 s of CPU time late in a run.
    """
    gc.collect()
    _FREEZE()


@pytest.fixture
def compiled() -> Iterator[None]:
    """Let MLX compile functions, as it does for users."""
    mx.enable_compile()
    yield
    _disable_compile()


@pytest.fixture
def models_frozen() -> Iterator[None]:
    """Let garbage collection ignore the objects of a loaded model, as it does for users."""
    _set_freezing(_FREEZE, _UNFREEZE)
    yield
    _set_freezing(lambda: None, lambda: None)


@pytest.fixture
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep data, caches and settings below `tmp_path`."""
    for kind in ("data", "cache", "config"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / kind))


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the local time zone to UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="session")
def starter() -> model_store.StoredModel:
    """The starter of the user's model store, pulled if it is missing."""
    try:
        model = model_store.get("starter")
        model_store.check(model)
    except (UnknownModel, DamagedModel):
        model = pull("starter")
    return model


@pytest.fixture(scope="session")
def starter_engine(starter: model_store.StoredModel) -> Engine:
    """The starter, loaded once. Engines are immutable."""
    return Engine.load(starter.path, name="starter")


@pytest.fixture(scope="session")
def shallow_starter(starter_engine: Engine) -> Engine:
    """The starter with 2 of its 30 layers, four times as fast. Its answers make no sense.

    Tokenizer, template, vocabulary and weights are those of the starter.
    """
    whole = starter_engine.model
    model = type(whole)(replace(whole.args, num_hidden_layers=2))
    model.model.embed_tokens, model.model.norm = whole.model.embed_tokens, whole.model.norm
    model.model.layers = [whole.model.layers[0], whole.model.layers[-1]]
    return replace(starter_engine, model=model)


@pytest.fixture(scope="session")
def shallow_directory(
    starter: model_store.StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a model like `shallow_starter`, for processes. Tests share its files."""
    directory = tmp_path_factory.mktemp("shallow")
    config = json.loads((starter.path / "config.json").read_text("utf-8"))
    renamed = {0: 0, config["num_hidden_layers"] - 1: 1}
    weights: dict[str, Any] = {}
    for name, array in mx.load(str(starter.path / "model.safetensors")).items():
        first, layers, rest = name.partition("model.layers.")
        number, _, rest = rest.partition(".")
        if not layers:
            weights[first] = array
        elif int(number) in renamed:
            weights[f"{layers}{renamed[int(number)]}.{rest}"] = array
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(starter.path / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model of random weights, for processes. Tests share its files."""
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_store(tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model store for this test's processes; its starter is `tiny_chat_model`."""
    models = tmp_path / "data" / "akunu" / "models"
    models.mkdir(parents=True)
    (models / "starter").symlink_to(tiny_chat_model)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def loaded_starter(starter_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Let each load of the starter in this process return the loaded one, with its own KV cache.

    For tests that do not test loading.
    """
    return _reuse(starter_engine, monkeypatch)


@pytest.fixture
def loaded_shallow_starter(shallow_starter: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """As `loaded_starter`, for tests that need no sensible answer."""
    return _reuse(shallow_starter, monkeypatch)


def _reuse(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    load, plain_options = Engine.load, LoadOptions()

    def reuse(path: Path, options: LoadOptions = plain_options, **others: Any) -> Engine:
        plain = options.weights in ("auto", engine.plan.weights) and options.context is None
        if path == engine.path and plain:
            return altered(engine, kv_bits=options.kv_bits)
        return load(path, options, **others)

    monkeypatch.setattr(Engine, "load", reuse)
    return engine
