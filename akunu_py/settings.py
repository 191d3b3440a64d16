"""The user's settings, in settings.toml: their names, their checks, and writing them so that the
file's comments and order stay. What the name of a theme means is the front end's business.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py import paths
from akunu_py.errors import StoreError, UsageError
from akunu_py.files import read_bounded, write_atomically
from akunu_py.text import is_size
from akunu_py.types import DEFAULT_MODEL

if TYPE_CHECKING:  # only who changes settings pays for its import
    from tomlkit import TOMLDocument

MAX_TEMPERATURE = 5.0  # above, every model talks nonsense
MAX_BYTES = 1 << 20  # of the file
_MAX_SHOWN = 80  # characters of a wrong value that an error repeats
_SIZES = {
    "cache_memory": "0B",
    "memory_limit": "0B",
    "cache_disk": "",
}  # what stands for an empty one; "": none may
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPECTED = {
    bool: "true or false",
    str: "a text in quotes",
    float: "a number",
    dict: "a table of names and texts",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """memory: whether answers are remembered, on this machine, to draft from. model: the one that
    is used when none is named. completion_model: the same for `akunu complete`; empty for `model`.
    draft_model: a smaller one that drafts for those with the same tokens; empty for none.
    cache_memory: a size such as "2GB" for the KV caches of several texts; empty for what fits.
    unload_after: minutes without a request after which the model is unloaded, 0 for never.
    memory_limit: a size that model and caches may take; empty for what there is.
    server: "auto" where a running `akunu serve` answers if it has the model; "off"; or its address.
    cache_disk: a size for those that are kept on disk, "0B" for none; not without `memory`.

    Of the chat: temperature, of sampling. system_prompt: what the model reads before all else.
    personas: further system prompts by name. persona: the one in use, empty for `system_prompt`.
    theme: a name, or "auto". reduced_motion: nothing glides or blinks. bell: it rings when a long
    answer ends that nobody watches.
    """

    memory: bool = True
    model: str = DEFAULT_MODEL
    completion_model: str = ""
    draft_model: str = ""
    unload_after: float = 0.0
    temperature: float = 0.7
    system_prompt: str = ""
    persona: str = ""
    personas: dict[str, str] = field(default_factory=dict)
    theme: str = "auto"
    reduced_motion: bool = False
    cache_memory: str = ""
    memory_limit: str = ""
    cache_disk: str = "10GB"
    bell: bool = True
    server: str = "auto"

    @property
    def unload_s(self) -> float | None:
        """Seconds without a request after which the model is unloaded, None for never."""
        return self.unload_after * 60 or None

    @property
    def system(self) -> str:
        """The system prompt in use; empty for none."""
        return self.personas[self.persona] if self.persona else self.system_prompt


def settings_file() -> Path:
    """Where the settings are."""
    return paths.config_dir() / "settings.toml"


def load_settings() -> Settings:
    """The user's settings, the built-in ones where there is no file.

    Raises UsageError where the file is not TOML, or sets something unknown or of the wrong type.
    """
    settings, wrong = read_settings()
    if wrong:
        raise UsageError(wrong[0])
    return settings


def read_settings() -> tuple[Settings, list[str]]:
    """The user's settings as far as they can be used, built-in ones in the place of the others; and
    what is wrong, a line each. Nothing is remembered where the file may have said so."""
    path = settings_file()
    try:
        content = tomllib.loads(read_bounded(path, MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return Settings(), []
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"cannot read {path}: {error}; correct or remove it"
        return Settings(memory=False), [wrong]
    return _usable(content, str(path))


def save_settings(changes: Mapping[str, Any]) -> Settings:
    """Sets what `changes` names, leaves the rest of the file as it is, and gives all settings.

    What goes back to its built-in value leaves the file. Raises UsageError for an unknown name, a
    wrong value or a file that cannot be read, StoreError where the disk refuses; the file is then
    as it was.
    """
    import tomlkit

    before = load_settings()
    after = _checked(asdict(before) | dict(changes), "settings")
    path = settings_file()
    # A link, into a directory of dot files for one, stays a link.
    target = Path(os.path.realpath(path))
    try:
        text = read_bounded(target, MAX_BYTES).decode("utf-8") if target.exists() else ""
        document = tomlkit.parse(text)
        for name in changes:
            _set(document, name, getattr(after, name))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, tomlkit.dumps(document).encode(), durable=True)
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; free space or correct its permissions"
        ) from error
    return after


def _set(document: TOMLDocument, name: str, value: Any) -> None:
    """Sets one name, in the shortest form; a table of names keeps its comments."""
    import tomlkit
    from tomlkit.items import Table

    if value == getattr(Settings(), name):
        document.pop(name, None)
    elif isinstance(value, dict) and isinstance(table := document.get(name), Table):
        for key in [key for key in table if key not in value]:
            del table[key]
        for key, text in value.items():
            if table.get(key) != text:
                table[key] = _text(text)
    elif isinstance(value, dict):
        table = tomlkit.table()
        for key, text in value.items():
            table.add(key, _text(text))
        document[name] = table
    elif document.get(name) != value:
        document[name] = _text(value) if isinstance(value, str) else value


def _text(value: str) -> Any:
    import tomlkit

    # In a multi-line string a newline right after the quotes would not count, and \r\n is \n.
    lines = "\n" in value and "\r" not in value and not value.startswith("\n")
    return tomlkit.string(value, multiline=lines)


def _checked(content: Mapping[str, Any], where: str) -> Settings:
    """The settings in `content`. Raises UsageError, which begins with `where`."""
    settings, wrong = _usable(content, where)
    if wrong:
        raise UsageError(wrong[0])
    return settings


def _usable(content: Mapping[str, Any], where: str) -> tuple[Settings, list[str]]:
    """The settings in `content` that can be used, and what is wrong with the others; each line
    begins with `where`."""
    known = {field.name: type(value) for field, value in _defaults()}
    usable: dict[str, Any] = {}
    wrong = []
    for name, value in content.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
            wrong.append(f"unknown setting {_short(name)}; {hint}")
        elif not _fits(value, known[name]):
            wrong.append(f"expected {_EXPECTED[known[name]]} for {name}, found {_short(value)}")
        elif name == "temperature" and not 0 <= value <= MAX_TEMPERATURE:
            wrong.append(
                f"expected 0 to {MAX_TEMPERATURE:g} for temperature, found {_short(value)}"
            )
        elif name == "unload_after" and not 0 <= value < float("inf"):
            wrong.append(f"expected minutes for unload_after, found {_short(value)}")
        elif name == "server" and value not in ("auto", "off") and not value.startswith("http://"):
            wrong.append(
                f'expected "auto", "off" or http://HOST:PORT for server, found {_short(value)}'
            )
        elif name in _SIZES and not is_size(value or _SIZES[name]):
            wrong.append(f"expected a size such as 500MB for {name}, found {_short(value)}")
        else:
            usable[name] = float(value) if known[name] is float else value
    if not isinstance(content.get("memory", True), bool):
        usable["memory"] = False
    settings = replace(Settings(), **usable)
    if settings.persona and settings.persona not in settings.personas:
        there = ", ".join(settings.personas) or "none"
        wrong.append(f"no persona called {settings.persona!r}; there are: {there}")
        settings = replace(settings, persona="")
    return settings, [f"{where}: {line}" for line in wrong]


def _short(value: object) -> str:
    """A value as the user may have typed it; a file can hold any number of digits."""
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def _defaults() -> list[tuple[Any, Any]]:
    return [(field, getattr(Settings(), field.name)) for field in fields(Settings)]


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float)
    if kind is dict:
        return isinstance(value, dict) and all(
            _fits(part, str) for pair in value.items() for part in pair
        )
    # A lone surrogate can be typed into no file.
    return type(value) is kind and not (isinstance(value, str) and _SURROGATE.search(value))
