"""Fixtures that several test files share."""

from __future__ import annotations

import os

# OpenBLAS's threads wait for each other, and for seconds where other tests hold the cores. It reads
# this when it is loaded, so before anything of ours is imported; the processes we start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from akunu_py.decoding.engine import Engine
from akunu_py.errors import DamagedModel, UnknownModel
from akunu_py.models import store
from akunu_py.models.pull import pull


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What happens in a real terminal happens in real time: nothing else should hold the cores."""
    for item in items:
        if "terminal" in getattr(item, "fixturenames", ()):
            item.add_marker("alone")


@pytest.fixture(scope="session")
def starter() -> store.StoredModel:
    """The real starter in the user's store, fetched if it is not there."""
    try:
        model = store.get("starter")
        store.check(model)
    except (UnknownModel, DamagedModel):
        model = pull("starter")
    return model


@pytest.fixture(scope="session")
def starter_engine(starter: store.StoredModel) -> Engine:
    """The real starter, loaded once. Engines are immutable."""
    return Engine.load(starter.path, name="starter")
