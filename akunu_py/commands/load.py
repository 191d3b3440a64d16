"""From what the user typed to a loaded engine and what was learned about it."""

from __future__ import annotations

from akunu_py import backend
from akunu_py.backend import WeightMode
from akunu_py.engine import Engine
from akunu_py.experience import Experience
from akunu_py.models import store
from akunu_py.settings import load_settings


def load_engine(model: str | None, weights: WeightMode, kv_bits: int | None = None) -> Engine:
    """Loads the model of that name or folder, the one in the settings for None."""
    found = store.resolve(model or load_settings().model)
    store.check(found)
    return Engine.load(found.path, name=found.name, weights=weights, kv_bits=kv_bits)


def load_experience(engine: Engine, *, no_memory: bool) -> Experience:
    """What was learned about the engine's model in earlier runs."""
    layout = f"{engine.weights} on {backend.device_name()}"
    memory = load_settings().memory and not no_memory
    return Experience(engine.path, engine.tokenizer_digest, layout, memory=memory)
