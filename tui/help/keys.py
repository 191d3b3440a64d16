"""Which keys do what, read from the bindings of the app and of what has the focus.

Owns how keys are named for people. The one source of the key help and of the palette's hints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.keys import format_key
from textual.screen import Screen
from textual.widgets import TextArea

_WORDS = {
    "escape": "Esc",
    "pageup": "Page Up",
    "pagedown": "Page Down",
    "question_mark": "?",
    "space": "Space",
    "backspace": "Backspace",
    "delete": "Delete",
    "enter": "Enter",
    "tab": "Tab",
    "up": "Up",
    "down": "Down",
    "left": "Left",
    "right": "Right",
    "home": "Home",
    "end": "End",
}


@dataclass(frozen=True, slots=True)
class KeySection:
    """A heading and its rows: what to press or type, and what that does."""

    heading: str
    rows: tuple[tuple[str, str], ...]


def key_name(key: str) -> str:
    """`ctrl+t` as people write it: Ctrl+T."""
    *modifiers, last = key.split("+")
    named = _WORDS.get(last) or (format_key(last) if len(format_key(last)) == 1 else last)
    if last not in _WORDS:
        short = len(named) == 1 or named[1:].isdecimal()
        named = named.upper() if short else named.replace("_", " ").capitalize()
    return "+".join([*(modifier.capitalize() for modifier in modifiers), named])


def bindings_of(screen: Screen[Any]) -> tuple[list[Binding], list[Binding]]:
    """What can be pressed on `screen` now: what we bound, and what any text area knows."""
    plain = {binding.action for binding in Binding.make_bindings(TextArea.BINDINGS)}
    ours: list[Binding] = []
    editing: list[Binding] = []
    for active in screen.active_bindings.values():
        if not active.binding.description or not active.enabled:
            continue
        if active.binding.action in _our_actions(type(active.node)):
            ours.append(active.binding)
        elif isinstance(active.node, TextArea) and active.binding.action in plain:
            editing.append(active.binding)
    return ours, editing


def rows_of(bindings: Iterable[Binding], most: int = 3) -> tuple[tuple[str, str], ...]:
    """The keys of an action in one row, at most so many of them."""
    keys: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    for binding in bindings:
        names = keys.setdefault(binding.action, [])
        name = binding.key_display or key_name(binding.key)
        if name not in names and len(names) < most:
            names.append(name)
        words.setdefault(binding.action, binding.description[:1].upper() + binding.description[1:])
    return tuple((", ".join(names), words[action]) for action, names in keys.items())


def keys_of_actions(app: App[Any]) -> dict[str, str]:
    """The first key of each action of the app."""
    found: dict[str, str] = {}
    for binding in app._bindings.key_to_bindings.values():
        for each in binding:
            found.setdefault(each.action.removeprefix("app."), key_name(each.key))
    return found


@cache
def _our_actions(node: type) -> frozenset[str]:
    """The actions that the classes of akunu among a node's bind, and two of Textual's own."""
    actions = {"quit", "command_palette"}
    for each in node.__mro__:
        if each.__module__.startswith("akunu_py."):
            bindings = Binding.make_bindings(each.__dict__.get("BINDINGS", ()))
            actions |= {binding.action for binding in bindings}
    return frozenset(actions)
