"""The chat's commands: one table for `/name` in the prompt, the palette and the help."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from textual.app import App
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.keys import format_key
from textual.widgets import TextArea

from akunu_py.errors import AkunuError
from akunu_py.models.store import model_store
from akunu_py.settings import read_settings
from akunu_py.text import collapse, displayable
from akunu_py.tui import themes
from akunu_py.tui.prompt.file_index import best_matches


@dataclass(frozen=True, slots=True)
class Command:
    """A chat command, typed as `/name argument`."""

    name: str
    action: str  # runs the app's method `action_...`
    title: str  # shown in the palette
    argument: str = ""  # placeholder; in brackets if optional; "" for none

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
    Command("find", "find", "Find text in this chat", "TEXT"),
    Command("export", "export", "Save this chat as Markdown or JSON", "[FILE]"),
    Command("models", "models", "Choose or fetch a model"),
    Command("model", "use_model", "Use another model from here on", "[NAME]"),
    Command("persona", "use_persona", "Use another persona from here on", "[NAME]"),
    Command("system", "use_system_prompt", "Set the system prompt", "[TEXT]"),
    Command("options", "chat_options", "Options of this chat: sampling, limits, thinking"),
    Command("temperature", "use_temperature", "Set the temperature of this chat", "NUMBER"),
    Command("tools", "tools", "Turn tools of MCP servers on or off"),
    Command("json", "answer_json", "Return the next answer as JSON", "[SCHEMA]"),
    Command("attach", "attach", "Attach a text file to the prompt", "[FILE]"),
    Command("regenerate", "regenerate", "Regenerate the answer on a new branch"),
    Command("edit", "edit", "Edit your last message and send it again"),
    Command("compact", "compact", "Replace older messages with a summary, to make room"),
    Command("continue", "continue", "Continue a truncated answer"),
    Command("stop", "stop", "Stop the answer"),
    Command("copy", "copy_answer", "Copy the last answer"),
    Command("code", "copy_code", "Copy a code block"),
    Command("drafting", "show_drafting", "Show or hide drafts"),
    Command("thinking", "toggle_thinking", "Show or hide the thinking"),
    Command("settings", "settings", "Settings"),
    Command("theme", "use_theme", "Change the colors", "[NAME]"),
    Command("help", "help", "Keys and commands"),
    Command("quit", "quit", "Quit"),
)
_BY_NAME = {command.name: command for command in COMMANDS}


def argument_choices(command: str) -> list[str]:
    """Return the argument names of a command."""
    try:
        if command == "model":
            models = model_store.all_models()
            return [model.name for model in models if not model.damaged]
        if command == "persona":
            return list(read_settings()[0].personas)
    except AkunuError:
        return []  # the command itself reports the error
    return list(themes.choices()) if command == "theme" else []


# One word after the slash: "/usr/bin", "//" and "/ 2" are prompts.
_CALL = re.compile(r"/([A-Za-z]+)(?:[ \t]+(\S.*?))?\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CommandCall:
    """A typed command with its argument."""

    command: Command
    argument: str = ""


@dataclass(frozen=True, slots=True)
class InvalidCommand:
    """Input that looks like a command but is not valid."""

    text: str  # error message for the user


def parse(prompt: str) -> CommandCall | InvalidCommand | None:
    """Parse a command (None: a prompt for the model)."""
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
        return InvalidCommand(f"unknown command /{name}; {hint}")
    if "\n" in argument and command.argument not in ("[TEXT]", "[SCHEMA]"):
        return None
    if argument and not command.argument:
        return InvalidCommand(f"/{name} takes no argument, found {argument[:40]!r}")
    if command.needs_argument and not argument:
        return InvalidCommand(f"/{name} requires an argument: {command.usage}")
    return CommandCall(command, argument)


async def dispatch(app: App[Any], call: CommandCall) -> None:
    """Run the action of a command."""
    arguments = (call.argument,) if call.command.argument else ()
    await app.run_action(("app", call.command.action, arguments))


_CHOICE_TITLES = {"model": "Use the model", "persona": "Use the persona", "theme": "Theme"}
_MAX_HITS = 30

Run = Callable[[], Any]


class ChatCommands(Provider):
    """The command palette: all commands, models, personas, themes and chats."""

    async def discover(self) -> Hits:
        for command, hint in self._commands():
            yield DiscoveryHit(command.title, self._run(command), help=hint)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command, hint in self._commands():
            score = max(matcher.match(command.title), matcher.match(command.name))
            if score > 0:
                yield Hit(score, matcher.highlight(command.title), self._run(command), help=hint)
        named = {**self._choices(), **await self._chats()}
        style = matcher.match_style
        for rank, match in enumerate(best_matches(query, named, _MAX_HITS)):
            text = Content(match.path)
            for place in match.places:
                text = text.stylize(style, place, place + 1)
            # Below the commands, whose scores are above 1.
            yield Hit(1 / (rank + 2), text, named[match.path], text=match.path)

    def _commands(self) -> Iterator[tuple[Command, str]]:
        """Yield each command with its usage and key."""
        keys = keys_of_actions(self.app)
        for command in COMMANDS:
            key = keys.get(command.action, "")
            # Textual parses this as markup, where an optional argument looks like a tag.
            yield command, f"{command.usage}   {key}".rstrip().replace("[", r"\[")

    def _choices(self) -> dict[str, Run]:
        """Return functions that choose a model, persona or theme, by palette title."""
        return {
            displayable(f"{title} {word}"): partial(
                dispatch, self.app, CommandCall(_BY_NAME[name], word)
            )
            for name, title in _CHOICE_TITLES.items()
            for word in argument_choices(name)
        }

    async def _chats(self) -> dict[str, Run]:
        app: Any = self.app
        return {  # the latest chat of a title wins
            collapse(f"Open the chat {chat.title}"): partial(app.open_chat, chat.id)
            for chat in reversed(await app.library.list())
        }

    def _run(self, command: Command) -> Run:
        if command.needs_argument:
            return partial(_insert_command, self.app, f"/{command.name} ")
        return partial(dispatch, self.app, CommandCall(command))


def _insert_command(app: App[Any], text: str) -> None:
    """Insert the start of a command before the text of the prompt box."""
    box = app.query_one("#prompt", TextArea)
    box.text = text + box.text
    box.move_cursor((0, len(text)))
    box.focus()


_KEY_NAMES = {"escape": "Esc", "pageup": "Page Up", "pagedown": "Page Down"}


def key_name(key: str) -> str:
    """Return the name of a key for users, such as Ctrl+T for `ctrl+t`."""
    *modifiers, last = key.split("+")
    if "_" in last:
        named = format_key(last)
    elif len(last) == 1:
        named = last.upper() if modifiers else last
    else:
        named = _KEY_NAMES.get(last, last.capitalize())
    return "+".join([*(modifier.capitalize() for modifier in modifiers), named])


def keys_of_actions(app: App[Any]) -> dict[str, str]:
    """Return the first key of each app action."""
    found: dict[str, str] = {}
    for binding in app._bindings.key_to_bindings.values():
        for each in binding:
            found.setdefault(each.action.removeprefix("app."), key_name(each.key))
    return found
