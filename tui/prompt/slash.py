"""The commands of the chat: their names, what they do, and how one is called from the prompt.

Owns the one table that the `/` completion, the command palette and the key help are made of.
Carries nothing out itself: a command is the name of an action of the app, with or without the
words that followed it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from textual.app import App


@dataclass(frozen=True, slots=True)
class Command:
    """`/name words` runs `action`, a method `action_...` of the app.

    title: what it does, as a heading of the palette. argument: what may follow the name, in
    capitals; in brackets where it may be left out; empty where nothing may.
    """

    name: str
    action: str
    title: str
    argument: str = ""

    @property
    def needs_argument(self) -> bool:
        return bool(self.argument) and not self.argument.startswith("[")

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS = (
    Command("new", "new_chat", "New chat"),
    Command("chats", "conversations", "Open or search earlier chats"),
    Command("rename", "rename_chat", "Rename this chat", "[TITLE]"),
    Command("export", "export", "Save this chat as Markdown, JSON or a picture", "[FILE]"),
    Command("models", "models", "Choose or fetch a model"),
    Command("model", "use_model", "Use another model from here on", "[NAME]"),
    Command("persona", "use_persona", "Use another persona from here on", "[NAME]"),
    Command("system", "use_system_prompt", "Tell the model who it is", "[TEXT]"),
    Command("temperature", "use_temperature", "Set the temperature of sampling", "NUMBER"),
    Command("attach", "attach", "Attach a text file to the prompt", "[FILE]"),
    Command("regenerate", "regenerate", "Answer again, on a branch of its own"),
    Command("edit", "edit", "Edit your last message and send it again"),
    Command("continue", "continue", "Continue an answer that was cut off"),
    Command("stop", "stop", "Stop the answer"),
    Command("copy", "copy_answer", "Copy the last answer"),
    Command("code", "copy_code", "Copy a block of code"),
    Command("drafting", "show_drafting", "See the drafting"),
    Command("thinking", "toggle_thinking", "Unfold or fold the thinking"),
    Command("settings", "settings", "Settings"),
    Command("theme", "use_theme", "Change the colours", "[NAME]"),
    Command("help", "help", "Keys and commands"),
    Command("quit", "quit", "Quit"),
)
_BY_NAME = {command.name: command for command in COMMANDS}

# One word after the slash: "/usr/bin", "//" and "/ 2" are things people say to a model.
_CALL = re.compile(r"/([A-Za-z]+)(?:[ \t]+(\S.*?))?\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A command that was typed, and what followed its name."""

    command: Command
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that looks like a command and is none; `text` says so to the person."""

    text: str


def parse(prompt: str) -> Call | Mistake | None:
    """What `prompt` asks of the program; None where it is for the model."""
    found = _CALL.fullmatch(prompt)
    if found is None:
        return None
    name, argument = found[1].lower(), found[2] or ""
    command = _BY_NAME.get(name)
    if command is None:
        # Many words may well be a sentence that begins with a slash; one word is a slip.
        return None if len(argument.split()) > 1 else Mistake(_unknown(name))
    if "\n" in argument and command.argument != "[TEXT]":
        return None
    if argument and not command.argument:
        return Mistake(f"/{name} takes nothing after it, found {argument[:40]!r}")
    if command.needs_argument and not argument:
        return Mistake(f"expected {command.usage}, found nothing after /{name}")
    return Call(command, argument)


async def dispatch(app: App[Any], call: Call) -> None:
    """Runs the action of a command; one that takes words is given them, empty ones too."""
    words = (call.argument,) if call.command.argument else ()
    await app.run_action(("app", call.command.action, words))


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.5)
    hint = f"did you mean /{close[0]}?" if close else "/help lists those there are"
    return f"no command /{name}; {hint}"
