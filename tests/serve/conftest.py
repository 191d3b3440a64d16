"""A served model that the tests of this directory share."""

from collections.abc import Iterator

import pytest

from tests.support.serving import Served, served, write_served_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_served_model(tmp_path_factory.mktemp("served") / "model")
    with served(directory) as model:
        yield model
