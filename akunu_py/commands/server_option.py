"""`--server`: whether a running `akunu serve` answers, or a model that is loaded here."""

from __future__ import annotations

import argparse
import os

from akunu_py.commands.serve import KEY_VARIABLE
from akunu_py.errors import AkunuError
from akunu_py.models.store import store
from akunu_py.serve.own.client import ServedFacts, ServerClient, running_server, server_at
from akunu_py.types import LoadOptions


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds which server may answer."""
    parser.add_argument(
        "--server",
        default=None,
        metavar="auto|off|URL",
        help="auto (the default): a running akunu serve answers where it has the model loaded; "
        "off: the model is loaded here; URL: that server answers",
    )


def server_for(
    choice: str, asked: str | None, model: store.StoredModel | None, loading: LoadOptions
) -> tuple[ServerClient, ServedFacts] | None:
    """The server to use instead of loading `model`, None for none. asked: the model that must be
    served at an address, None for whatever is. Raises AkunuError where nothing answers there."""
    if choice == "off":
        return None
    if choice == "auto":
        return running_server(model.path, loading) if model else None
    return server_at(choice, asked and _name(asked), os.environ.get(KEY_VARIABLE, ""))


def is_address(choice: str) -> bool:
    """Whether a certain server is asked for."""
    return choice not in ("auto", "off")


def name_at(url: str, asked: str | None) -> str:
    """The name of the model that the server at an address has, which must be the one that is asked
    for. Raises AkunuError where nothing answers."""
    found = server_for(url, asked, None, LoadOptions())
    assert found is not None
    return found[1].name


def _name(model: str) -> str:
    try:
        return store.resolve(model).name
    except AkunuError:  # the server may have what this machine has not
        return model
