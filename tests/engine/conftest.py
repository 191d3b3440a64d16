"""Fixtures of the engine's tests."""

import pytest

from akunu_py.engine.engine import Engine
from tests.support.tiny_fim import load_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model with a token for each byte. Engines are immutable."""
    return load_tiny(tmp_path_factory.mktemp("tiny"), ["<|end|>"])
