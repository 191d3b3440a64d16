"""From what the user typed to a loaded engine."""

from __future__ import annotations

from akunu_py.backend import WeightMode
from akunu_py.engine import Engine
from akunu_py.models import store
from akunu_py.types import DEFAULT_MODEL


def load_engine(model: str | None, weights: WeightMode) -> Engine:
    """Loads the model of that name or folder, the default one for None."""
    found = store.resolve(model or DEFAULT_MODEL)
    store.check(found)
    return Engine.load(found.path, name=found.name, weights=weights)
