"""The chat's commands: one table for `/name` in the prompt and for the help."""

import contextlib
import difflib
import re
from dataclasses import dataclass
from typing import Any

from textual.app import App
from textual.keys import format_key

from akunu_py.errors import AkunuError, UsageError
from akunu_py.models.store import model_store
from akunu_py.tui import themes


@dataclass(frozen=True, slots=True)
class Command:
    """A chat command, typed as `/name argument`."""

    name: str
    action: str  # runs the app's method `action_...`
    title: str
    argument: str = ""  # placeholder; in brackets if optional; "" for none

    @property
    def needs_argument(self) -> bool:
        return bool(self.argument) and not self.argument.startswith("[")

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


# Not those that have a key, apart from the ones that users type in every chat program.
COMMANDS = (
    Command("new", "new_chat", "New chat"),
    Command("private", "private_chat", "New chat of which nothing is saved"),
    Command("chats", "conversations", "Open or search earlier chats"),
    Command("rename", "rename_chat", "Rename this chat", "[TITLE]"),
    Command("find", "find", "Find text in this chat", "TEXT"),
    Command("export", "export", "Save this chat as Markdown or JSON", "[FILE]"),
    Command("model", "use_model", "Use another model from here on", "[NAME]"),
    Command("settings", "settings", "Settings of this chat and of all chats"),
    Command("tools", "tools", "Turn tools of MCP servers on or off"),
    Command("json", "answer_json", "Return the next answer as JSON", "[SCHEMA]"),
    Command("compact", "compact", "Make room: a summary replaces older messages"),
    Command("theme", "use_theme", "Change the colors", "[NAME]"),
    Command("help", "help", "Keys and commands"),
    Command("quit", "quit", "Quit"),
)
_BY_NAME = {command.name: command for command in COMMANDS}


def argument_choices(command: str) -> list[str]:
    if command in ("model", "draft_model"):
        with contextlib.suppress(AkunuError):  # the command itself reports the error
            models = [each for each in model_store.all_models() if not each.damaged]
            return [each.name for each in models if command == "draft_model" or not each.kind]
    return themes.choices() if command == "theme" else []


# One word after the slash: "/usr/bin", "//" and "/ 2" are prompts.
_CALL = re.compile(r"/([A-Za-z]+)(?:[ \t]+(\S(?:.*\S)?))?\s*", re.DOTALL)


def parse(prompt: str) -> tuple[Command, str] | None:
    """Return a command and its argument, None for a prompt. Raises UsageError."""
    found = _CALL.fullmatch(prompt)
    if found is None:
        return None
    name, argument = found[1].lower(), found[2] or ""
    command = _BY_NAME.get(name)
    if command is None:
        # Several words may be a sentence that starts with a slash; one word is a typo.
        if len(argument.split()) > 1:
            return None
        close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.5)
        hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
        raise UsageError(f"unknown command /{name}; {hint}")
    if "\n" in argument and command.argument != "[SCHEMA]":
        return None
    if argument and not command.argument:
        raise UsageError(f"/{name} takes no argument, found {argument[:40]!r}")
    if command.needs_argument and not argument:
        raise UsageError(f"/{name} requires an argument: {command.usage}")
    return command, argument


_KEY_NAMES = {"escape": "Esc", "pageup": "Page Up", "pagedown": "Page Down"}


def key_name(key: str) -> str:
    """Return the name of a key for users, such as Ctrl+N for `ctrl+n`."""
    *modifiers, last = key.split("+")
    if "_" in last:
        named = format_key(last)
    elif len(last) == 1:
        named = last.upper() if modifiers else last
    else:
        named = _KEY_NAMES.get(last, last.capitalize())
    return "+".join([*(modifier.capitalize() for modifier in modifiers), named])


def keys_of_actions(app: App[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for _, binding in app._bindings:
        found.setdefault(binding.action.removeprefix("app."), key_name(binding.key))
    return found
