"""What the user set once for all: settings.toml in the settings folder. Read, never written."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import UsageError
from akunu_py.types import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class Settings:
    """memory: whether answers are remembered, on this machine, to draft from. model: the one that
    is used when none is named."""

    memory: bool = True
    model: str = DEFAULT_MODEL


def settings_file() -> Path:
    """Where the settings are."""
    return paths.config_dir() / "settings.toml"


def load_settings() -> Settings:
    """The user's settings, the built-in ones where there is no file.

    Raises UsageError where the file is not TOML, or sets something unknown or of the wrong type.
    """
    path = settings_file()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; correct or remove it") from error
    known = {field.name: type(field.default) for field in fields(Settings)}
    for name, value in content.items():
        if name not in known:
            raise UsageError(f"{path}: unknown setting {name!r}; there are: {', '.join(known)}")
        if type(value) is not known[name]:
            expected = {bool: "true or false", str: "a text in quotes"}[known[name]]
            raise UsageError(f"{path}: expected {expected} for {name}, found {value!r}")
    return Settings(**content)
