"""The key help: every key and every command of the chat.

Generated from bindings and commands; only keys of the prompt box without bindings are listed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static, TextArea

from akunu_py.tui.prompt.slash_commands import COMMANDS, key_name, keys_of_actions
from akunu_py.tui.screens.dialog import DIALOG_STYLE, Dialog
from akunu_py.tui.transcript.view import Transcript

_WRITING = (
    ("Enter", "Send; queued while an answer is generated"),
    ("Ctrl+J", "New line; Shift+Enter in some terminals"),
    ("Up, Down", "Earlier prompts; a queued prompt first"),
    ("@path", "Attach a text file, or list a directory"),
    ("/name", "Run a command; Tab completes"),
    ("Tab", "Switch to the messages and back; expand a paste"),
    ("Ctrl+X Ctrl+E", "Edit the prompt in $VISUAL or $EDITOR"),
    ("Ctrl+C", "Copy, else stop, else empty the box, else quit"),
    ("Ctrl+D", "Quit, in an empty box"),
)
_WIDE = 130  # columns for two columns of keys
# The most wanted actions first.
_GROUPS = {
    "The answer": (
        "stop", "regenerate", "edit", "continue", "copy_answer", "copy_code", "toggle_thinking",
        "show_drafting",
    ),
    "Chats and models": (
        "new_chat", "conversations", "models", "settings", "help", "quit",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeySection:
    """A heading and its rows: a key or command, and its description."""

    heading: str
    rows: tuple[tuple[str, str], ...]


def help_sections(app: App[Any]) -> list[KeySection]:
    """Return the help for the top screen. Call this before opening the help."""
    ours, editing = _bindings_of(app.screen)
    keys = keys_of_actions(app)
    commands = tuple(
        (each.usage, f"{each.title} ({keys[each.action]})" if each.action in keys else each.title)
        for each in COMMANDS
    )
    on_messages = [each for each in Binding.make_bindings(Transcript.BINDINGS) if each.show]
    only_there = {(each.action, each.key) for each in on_messages}
    groups: dict[str, list[Binding]] = {action: [] for each in _GROUPS.values() for action in each}
    others: list[Binding] = []
    for each in ours:
        if (each.action, each.key) not in only_there:
            groups.get(_name(each), others).append(each)
    return [
        KeySection("Writing", _WRITING + _rows_of(others)),
        *(
            KeySection(heading, _rows_of(chain.from_iterable(map(groups.__getitem__, actions))))
            for heading, actions in _GROUPS.items()
        ),
        KeySection("On a message (Tab, then Up and Down)", _rows_of(on_messages)),
        KeySection("Commands", commands),
        KeySection("Editing", _rows_of(editing, most=2)),
    ]


def _name(binding: Binding) -> str:
    return binding.action.removeprefix("app.")


class HelpScreen(Dialog[None]):
    """Keys and commands, in a scrolling dialog."""

    CSS_PATH = [DIALOG_STYLE, "help.tcss"]  # noqa: RUF012 - as in Textual
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal"), (_WIDE, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,f1,question_mark", "close", "Close")]

    def __init__(self, shown: list[KeySection]) -> None:
        super().__init__()
        self._sections = shown

    def compose(self) -> ComposeResult:
        with (
            self.frame("Keys and commands", "Up Down scroll · Esc close"),
            VerticalScroll(),
            Container(id="columns"),
        ):
            for sections in in_two_columns([each for each in self._sections if each.rows]):
                with Vertical():
                    for section in sections:
                        yield Static(section.heading, classes="heading")
                        with Grid(classes="rows"):
                            for key, words in section.rows:
                                yield Static(Content(key), classes="key")
                                yield Static(Content(words))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def in_two_columns(sections: list[KeySection]) -> list[list[KeySection]]:
    """Split the sections into two columns of similar height."""
    heights = [len(section.rows) + 2 for section in sections]
    cut = min(
        range(1, len(sections)),
        key=lambda at: abs(sum(heights[:at]) - sum(heights[at:])),
        default=0,
    )
    return [sections[:cut], sections[cut:]]


def _bindings_of(screen: Screen[Any]) -> tuple[list[Binding], list[Binding]]:
    """Return the active bindings of `screen`: akunu's, and those of any text area."""
    plain = {binding.action for binding in Binding.make_bindings(TextArea.BINDINGS)}
    ours: list[Binding] = []
    editing: list[Binding] = []
    for active in screen.active_bindings.values():
        if not active.binding.description or not active.enabled:
            continue
        if active.binding.action in _akunu_actions(type(active.node)):
            ours.append(active.binding)
        elif isinstance(active.node, TextArea) and active.binding.action in plain:
            editing.append(active.binding)
    return ours, editing


def _rows_of(bindings: Iterable[Binding], most: int = 3) -> tuple[tuple[str, str], ...]:
    """Return one row per action, with up to `most` of its keys."""
    keys: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    for binding in bindings:
        action = _name(binding)
        names = keys.setdefault(action, [])
        name = binding.key_display or key_name(binding.key)
        if name not in names and len(names) < most:
            names.append(name)
        words.setdefault(action, binding.description[:1].upper() + binding.description[1:])
    return tuple((", ".join(names), words[action]) for action, names in keys.items())


@cache
def _akunu_actions(node: type) -> frozenset[str]:
    """Return the actions bound by akunu's base classes of a node, plus one of Textual's."""
    actions = {"quit"}
    for each in node.__mro__:
        if each.__module__.startswith("akunu_py."):
            bindings = Binding.make_bindings(each.__dict__.get("BINDINGS", ()))
            actions |= {binding.action for binding in bindings}
    return frozenset(actions)
