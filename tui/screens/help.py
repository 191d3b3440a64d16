"""The key help: every key and every command of the chat.

Made from bindings and commands; only the keys of the prompt box are listed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Grid, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from akunu_py.tui.prompt.slash_commands import COMMANDS, key_name, keys_of_actions
from akunu_py.tui.screens.dialog import DIALOG_STYLE, Dialog
from akunu_py.tui.transcript.view import Transcript

_WRITING = (
    ("Enter", "Send; queued while an answer is generated"),
    ("Ctrl+J", "New line; Shift+Enter in some terminals"),
    ("Up, Down", "Earlier prompts; a queued prompt first"),
    ("Page Up, Page Down", "Scroll; so do Home and End in an empty box"),
    ("@path", "Attach a text file, or list a directory"),
    ("/name", "Run a command; Tab completes"),
    ("Tab", "Switch to the messages and back; expand a paste"),
    ("Ctrl+X Ctrl+E", "Edit the prompt in $VISUAL or $EDITOR"),
    ("Ctrl+C", "Copy, else stop, else empty the box, else quit"),
    ("Ctrl+D", "Quit, in an empty box"),
    ("Ctrl+R", "Search earlier prompts"),
)
_WIDE = 130  # columns for two columns of keys


@dataclass(frozen=True, slots=True)
class KeySection:
    """A heading and its rows: a key or command, and its description."""

    heading: str
    rows: tuple[tuple[str, str], ...]


def help_sections(app: App[Any]) -> list[KeySection]:
    """Return the help for the top screen. Call this before opening the help."""
    keys = keys_of_actions(app)
    commands = tuple(
        (each.usage, f"{each.title} ({keys[each.action]})" if each.action in keys else each.title)
        for each in COMMANDS
    )
    here = app.screen.BINDINGS if isinstance(app.screen, Dialog) else ()
    return [
        KeySection("In this list", _rows_of(here)),
        KeySection("Writing", _WRITING),
        KeySection("Everywhere", _rows_of(app.BINDINGS)),
        KeySection("On a message (Tab, then Up and Down)", _rows_of(Transcript.BINDINGS)),
        KeySection("Commands", commands),
    ]


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


def _rows_of(bindings: Iterable[BindingType]) -> tuple[tuple[str, str], ...]:
    """Return the keys and the description of each binding that is shown."""
    return tuple(
        (", ".join(map(key_name, each.key.split(","))), each.description)
        for each in bindings
        if isinstance(each, Binding) and each.show
    )
