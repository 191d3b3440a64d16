"""Paths of akunu's files, and the command that starts this installation.

XDG_DATA_HOME, XDG_CACHE_HOME and XDG_CONFIG_HOME apply on every system; the defaults are the
system's own directories (on a Mac, ~/Library/...).
"""

import os
import sys
from pathlib import Path

_APP = "akunu"


def data_dir() -> Path:
    """Models and conversations."""
    return _base("XDG_DATA_HOME", "data")


def cache_dir() -> Path:
    """Files that can be rebuilt."""
    return _base("XDG_CACHE_HOME", "cache")


def config_dir() -> Path:
    """Settings."""
    return _base("XDG_CONFIG_HOME", "config")


def models_dir() -> Path:
    """The model store."""
    return data_dir() / "models"


def conversations_file() -> Path:
    """The database of conversations."""
    return data_dir() / "conversations.db"


def chat_file() -> Path:
    """The state of the chat's user interface."""
    return data_dir() / "chat.json"


def servers_dir() -> Path:
    """One file for each running server."""
    return data_dir() / "servers"


def logs_dir() -> Path:
    """Logs of the service on a Mac; elsewhere the system has them."""
    return Path.home() / "Library" / "Logs" / _APP


def kernels_file() -> Path:
    """Results of the probes of Metal kernels."""
    return cache_dir() / "kernels.json"


def prompt_caches_dir() -> Path:
    """Prompt caches, in one directory for each model."""
    return cache_dir() / "prompt-caches"


def model_directory_name(model: Path) -> str:
    """Return the name of a directory for the data of `model`: a legible part and a digest."""
    import hashlib

    path = model.resolve()
    legible = "".join(c for c in path.name if c.isalnum() or c in "._-")[:40]
    return f"{legible}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _base(variable: str, kind: str) -> Path:
    """Return our directory below the one in `variable`, by default below the system's."""
    value = os.environ.get(variable, "")
    if os.path.isabs(value):
        return Path(value) / _APP
    import platformdirs

    found: Path = getattr(platformdirs, f"user_{kind}_path")(_APP)
    return found


def program_words() -> list[str]:
    """Return the command with an absolute path, for programs with another PATH or directory."""
    script = Path(sys.executable).with_name("akunu")
    return [str(script)] if script.exists() else [sys.executable, "-m", "akunu_py"]


def shell_command() -> str:
    """Return the command for the user's shell: "akunu" if that is this installation."""
    import shlex
    import shutil

    program, *more = program_words()
    found = shutil.which("akunu")
    if not more and found is not None and Path(found).samefile(program):
        return "akunu"
    near = os.path.relpath(program)
    return shlex.join([program if near.startswith("..") else near, *more])
