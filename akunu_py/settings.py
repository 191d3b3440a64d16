"""The user's settings in settings.toml: names, checks, and writes that keep comments and order."""

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
from akunu_py.text import parse_size
from akunu_py.types import DEFAULT_MODEL, DEFAULT_WIRE, MAX_TEMPERATURE, NO_TOKEN_LIMIT, WIRE_MODES

if TYPE_CHECKING:  # imported only to save settings
    from tomlkit import TOMLDocument

MAX_BYTES = 1 << 20  # of the file
# The meaning of an empty size; "": a size is required.
_SIZES = {"prompt_cache_memory": "0B", "memory_limit": "0B", "prompt_cache_disk": ""}
_LEAST = {"max_tokens": 0, "thinking_budget": -1}  # tokens
_SURROGATE = re.compile("[\ud800-\udfff]")


# Names of files that usually contain passwords or private keys.
SECRET_FILES = (
    ".env*", "*.env", "*.pem", "*.key", "*.crt", "*.cert", "*.p12", "*.pfx", "*.jks", "*.kdbx",
    "secret.*", "secrets.*", "credentials*", "*.p8", "*.keystore", "*.tfvars", "*.tfstate",
    "kubeconfig", ".npmrc", ".pypirc", ".aws/*", ".ssh/*",
    ".dev.vars", ".htpasswd", ".netrc", ".pgpass", ".git-credentials", "id_rsa", "id_ecdsa",
    "id_ed25519",
)  # fmt: skip

DEFAULT_PORT = 8012  # the default of llama.vim and llama.vscode


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of `akunu serve`: the table [serve], and the environment before it."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free port
    model: str = ""  # or several, separated by commas; "": the model of the chat
    api_key: str = ""

    @property
    def models(self) -> list[str]:
        return [name for each in self.model.split(",") if (name := each.strip())]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. Sizes are texts such as "2GB"."""

    answer_cache: bool = True  # store answers and prompt caches on this machine
    model: str = DEFAULT_MODEL
    completion_model: str = ""  # for `akunu complete`; "": `model`
    completion_exclude: tuple[str, ...] = SECRET_FILES  # patterns of files without completions
    save_battery: bool = True  # on battery: complete after a longer pause, and never ahead
    draft_model: str = ""  # drafts for models with the same tokenizer; "": none
    unload_after: float = 30.0  # minutes without a request before unloading; 0: never
    temperature: float = 0.7  # of the chat
    max_tokens: int = 0  # of an answer in the chat; 0: the room left in the context
    thinking_budget: int = -1  # maximum thinking tokens of an answer in the chat; -1: no limit
    system_prompt: str = ""  # of the chat
    persona: str = ""  # name of the persona in use; "": `system_prompt`
    personas: dict[str, str] = field(default_factory=dict)  # more system prompts, by name
    theme: str = "auto"
    model_titles: bool = True  # the model titles new chats, while it is idle
    reduced_motion: bool = False  # no animations
    prompt_cache_memory: str = ""  # size of the prompt caches in memory; "": what fits
    memory_limit: str = ""  # size of model and caches; "": available memory
    wire: str = DEFAULT_WIRE  # memory that macOS must keep, see `WireMode`
    prompt_cache_disk: str = "10GB"  # size of the prompt caches on disk; "0B": none
    bell: bool = True  # after a long answer, if the terminal has no focus
    server: str = "auto"  # "auto": a running `akunu serve` with the model; "off"; or an address
    serve: ServeSettings = field(default_factory=ServeSettings)

    @property
    def unload_s(self) -> float | None:
        """Seconds without a request before the model is unloaded; None: never."""
        return self.unload_after * 60 or None

    @property
    def token_limit(self) -> int:
        """`max_tokens` for `GenerateOptions`."""
        return self.max_tokens or NO_TOKEN_LIMIT

    @property
    def thinking_limit(self) -> int | None:
        """`thinking_budget` for `GenerateOptions`."""
        return None if self.thinking_budget < 0 else self.thinking_budget

    @property
    def system(self) -> str:
        """The system prompt in use; "" for none."""
        return self.personas[self.persona] if self.persona else self.system_prompt


def settings_file() -> Path:
    return paths.config_dir() / "settings.toml"


def load_settings() -> Settings:
    """Return the user's settings. Raises UsageError if the file or a setting is invalid."""
    settings, wrong = read_settings()
    if wrong:
        raise UsageError(wrong[0])
    return settings


def serve_settings() -> ServeSettings:
    """Return the settings of `akunu serve`; AKUNU_HOST and the like override the file.

    Raises UsageError if a value is invalid.
    """
    found: dict[str, Any] = {}
    for name in asdict(ServeSettings()):
        variable = f"AKUNU_{name.upper()}"
        if value := os.environ.get(variable, ""):
            found[name] = int(value) if name == "port" and value.isdecimal() else value
            if wrong := _validate_table({name: found[name]}, ServeSettings())[1]:
                raise UsageError(wrong[0].replace(f"serve.{name}", variable))
    return replace(load_settings().serve, **found)


def read_settings() -> tuple[Settings, list[str]]:
    """Return the user's settings, with defaults for invalid ones, and the errors.

    `answer_cache` is off if its value is unknown: the file may turn it off.
    """
    path = settings_file()
    try:
        content = tomllib.loads(read_bounded(path, MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return Settings(), []
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"cannot read {path}: {error}; correct or remove it"
        return Settings(answer_cache=False), [wrong]
    return _validate(content, str(path))


def save_settings(changes: Mapping[str, Any]) -> Settings:
    """Save changed settings, keep the rest of the file, and return all settings.

    Default values leave the file. Raises UsageError for an unknown name, a wrong value or an
    invalid file, StoreError if the disk fails; the file is unchanged then.
    """
    import tomlkit

    before, wrong = read_settings()
    if not wrong:
        after, wrong = _validate(asdict(before) | dict(changes), "settings")
    if wrong:
        raise UsageError(wrong[0])
    path = settings_file()
    # A link, for example into a directory of dot files, stays a link.
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
    """Set one value in the shortest form; tables keep their comments."""
    import tomlkit
    from tomlkit.items import Table

    if value == getattr(Settings(), name):
        document.pop(name, None)
    elif isinstance(value, dict):
        found = document.get(name)
        table = found if isinstance(found, Table) else tomlkit.table()
        for key in [key for key in table if key not in value]:
            del table[key]
        for key, text in value.items():
            if table.get(key) != text:
                table[key] = _text(text)
        if table is not found:
            document[name] = table
    elif document.get(name) != (list(value) if isinstance(value, tuple) else value):
        document[name] = _text(value) if isinstance(value, str) else value


def _text(value: str) -> Any:
    import tomlkit

    # TOML drops a first newline in a multi-line string, and may change \r\n to \n.
    lines = "\n" in value and "\r" not in value and not value.startswith("\n")
    return tomlkit.string(value, multiline=lines)


def _validate(content: Mapping[str, Any], source: str) -> tuple[Settings, list[str]]:
    """Return the valid settings in `content`, and the errors. source: their file."""
    valid, wrong = _validate_table(content, Settings())
    settings = replace(Settings(), **valid)
    if settings.persona and settings.persona not in settings.personas:
        names = ", ".join(settings.personas) or "none"
        wrong.append(f"no persona called {settings.persona!r}; personas: {names}")
        settings = replace(settings, persona="")
    return settings, [f"{source}: {line}" for line in wrong]


def _validate_table(
    content: Mapping[str, Any], defaults: Settings | ServeSettings
) -> tuple[dict[str, Any], list[str]]:
    known = {each.name: getattr(defaults, each.name) for each in fields(defaults)}
    table = "serve." if isinstance(defaults, ServeSettings) else ""
    valid: dict[str, Any] = {}
    wrong = []
    for key, value in content.items():
        name, kind = f"{table}{key}", type(known.get(key))
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            names = f"settings{' of [serve]' if table else ''}: {', '.join(known)}"
            hint = f"did you mean {close[0]}?" if close else names
            wrong.append(f"unknown setting {table}{key!r:.80}; {hint}")
        elif kind is ServeSettings and isinstance(value, dict):
            inner, lines = _validate_table(value, known[key])
            valid[key] = ServeSettings(**inner)
            wrong += lines
        elif expected := _expected(name, value, kind):
            wrong.append(f"expected {expected} for {name}, found {value!r:.80}")
            if name == "answer_cache":
                valid[key] = False
        else:
            valid[key] = kind(value) if kind in (float, tuple) else value
    return valid, wrong


_EXPECTED = {
    bool: "true or false",
    str: "a text in quotes",
    float: "a number",
    int: "an integer",
    dict: "a table of names and texts",
    tuple: "a list of strings",
    ServeSettings: "a table",
}


def _expected(name: str, value: Any, kind: type) -> str:
    """Return a description of valid values, or "" if the value is valid."""
    if name == "serve.port" and not (type(value) is int and 0 <= value < 65536):
        return "a port from 0 to 65535"
    if not _has_type(value, kind):
        return _EXPECTED[kind]
    if name == "temperature" and not 0 <= value <= MAX_TEMPERATURE:
        return f"0 to {MAX_TEMPERATURE:g}"
    if name in _LEAST and not _LEAST[name] <= value <= NO_TOKEN_LIMIT:
        return f"a number of tokens from {_LEAST[name]}"
    if name == "unload_after" and not 0 <= value < float("inf"):
        return "minutes"
    if name == "server" and value not in ("auto", "off") and not value.startswith("http://"):
        return '"auto", "off" or http://HOST:PORT'
    if name == "wire" and value not in WIRE_MODES:
        return " or ".join(f'"{mode}"' for mode in WIRE_MODES)
    if name in _SIZES:
        try:
            parse_size(value or _SIZES[name])
        except ValueError:
            return "a size such as 500MB"
    return ""


def _has_type(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float)
    if kind is dict:
        return isinstance(value, dict) and all(
            _has_type(part, str) for pair in value.items() for part in pair
        )
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_has_type(part, str) for part in value)
    # A file cannot contain lone surrogates.
    return type(value) is kind and not (isinstance(value, str) and _SURROGATE.search(value))
