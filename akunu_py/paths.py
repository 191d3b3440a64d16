"""Where akunu keeps its files. Nothing else in the project names a directory of the user's.

XDG_DATA_HOME, XDG_CACHE_HOME and XDG_CONFIG_HOME are honoured on every system;
without them the system's own places are used (on a Mac, ~/Library/...).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import platformdirs

_APP = "akunu"


def data_dir() -> Path:
    """What must not be lost: models, conversations."""
    return _xdg("XDG_DATA_HOME") or platformdirs.user_data_path(_APP)


def cache_dir() -> Path:
    """What can be made again."""
    return _xdg("XDG_CACHE_HOME") or platformdirs.user_cache_path(_APP)


def config_dir() -> Path:
    """What the user wrote."""
    return _xdg("XDG_CONFIG_HOME") or platformdirs.user_config_path(_APP)


def models_dir() -> Path:
    """The model store."""
    return data_dir() / "models"


def conversations_file() -> Path:
    """The database of conversations."""
    return data_dir() / "conversations.db"


def chat_file() -> Path:
    """What the chat remembers besides conversations."""
    return data_dir() / "chat.json"


def acceptance_file() -> Path:
    """What became of completions: counts."""
    return data_dir() / "completions.json"


def servers_dir() -> Path:
    """A file for each server that runs."""
    return data_dir() / "servers"


def prompt_caches_dir() -> Path:
    """What models had read: a directory for each."""
    return cache_dir() / "prompt-caches"


def name_of_model(model: Path) -> str:
    """What a directory about the model in the directory `model` is called: models may be named by
    any path, so it is a legible part of that, and a digest of all."""
    path = model.resolve()
    legible = "".join(c for c in path.name if c.isalnum() or c in "._-")[:40]
    return f"{legible}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _xdg(variable: str) -> Path | None:
    value = os.environ.get(variable, "")
    return Path(value) / _APP if os.path.isabs(value) else None
