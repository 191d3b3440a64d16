"""The command palette: all commands, and every model, persona, theme and chat by its name.

Owns what is offered; `slash` has the commands, the app carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from textual.app import App
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.widgets import TextArea

from akunu_py.chats.tree import ConversationInfo
from akunu_py.errors import AkunuError
from akunu_py.text import displayable
from akunu_py.tui.help.keys import keys_of_actions
from akunu_py.tui.prompt.files import best
from akunu_py.tui.prompt.slash import COMMANDS, Call, Command, dispatch
from akunu_py.tui.prompt.suggestions import WORDS

_HEADS = {"model": "Use the model", "persona": "Use the persona", "theme": "Theme"}
_MOST = 30

Run = Callable[[], Any]


@runtime_checkable
class Chats(Protocol):
    """An app that keeps chats."""

    async def chats(self) -> Sequence[ConversationInfo]: ...

    async def open_chat(self, conversation: str) -> None: ...


class ChatCommands(Provider):
    """What the palette of the chat offers."""

    async def discover(self) -> Hits:
        for command, hint in self._commands():
            yield DiscoveryHit(command.title, self._run(command), help=hint)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command, hint in self._commands():
            score = max(matcher.match(command.title), matcher.match(command.name))
            if score > 0:
                yield Hit(score, matcher.highlight(command.title), self._run(command), help=hint)
        named = {**self._words(), **await self._chats()}
        style = matcher.match_style
        for rank, match in enumerate(best(query, named, _MOST)):
            text = Content(match.path)
            for place in match.places:
                text = text.stylize(style, place, place + 1)
            # After the commands, whose scores are above 1.
            yield Hit(1 / (rank + 2), text, named[match.path], text=match.path)

    def _commands(self) -> Iterator[tuple[Command, str]]:
        """Each command, and how else it is called."""
        keys = keys_of_actions(self.app)
        for command in COMMANDS:
            key = keys.get(command.action, "")
            # Textual reads markup in it, and an argument that may be left out looks like a tag.
            yield command, f"{command.usage}   {key}".rstrip().replace("[", r"\[")

    def _words(self) -> dict[str, Run]:
        """What can be chosen by name, and how."""
        found: dict[str, Run] = {}
        for command in COMMANDS:
            if command.name not in _HEADS:
                continue
            try:
                words = list(WORDS[command.name]())
            except AkunuError:
                continue  # whoever carries the command out says what is wrong
            for word in words:
                text = displayable(f"{_HEADS[command.name]} {word}")
                found[text] = partial(dispatch, self.app, Call(command, word))
        return found

    async def _chats(self) -> dict[str, Run]:
        app = self.app
        if not isinstance(app, Chats):
            return {}
        return {
            displayable(f"Open the chat {chat.title}").replace("\n", " "): partial(
                app.open_chat, chat.id
            )
            for chat in reversed(await app.chats())  # of two with one title the later one stays
        }

    def _run(self, command: Command) -> Run:
        if command.needs_argument:
            return partial(_begin, self.app, f"/{command.name} ")
        return partial(dispatch, self.app, Call(command))


def _begin(app: App[Any], text: str) -> None:
    """Writes the beginning of a command into the prompt, before what is there."""
    box = app.query_one("#prompt", TextArea)
    box.text = text + box.text
    box.move_cursor((0, len(text)))
    box.focus()
