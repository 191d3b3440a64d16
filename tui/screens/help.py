"""The key help: every key and every command of the chat.

Made from bindings and commands; only the keys of the prompt box are listed here.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rich.table import Column, Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
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
_KEYS = 23  # columns
Rows = Sequence[tuple[str, str]]  # a key or command, and its description


def help_sections(app: App[Any]) -> dict[str, Rows]:
    """Return the help for the top screen, by heading. Call it before opening the help."""
    if isinstance(app.screen, Dialog):  # The keys of the chat do not work there.
        return {"In this list": [("Up, Down", "Move"), *app.screen.described_keys]}
    keys = keys_of_actions(app)
    return {
        "Writing": _WRITING,
        "Everywhere": _rows_of(app.BINDINGS),
        "On a message (Tab, then Up and Down)": _rows_of(Transcript.BINDINGS),
        "Commands": [
            (each.usage, f"{each.title} ({key})" if (key := keys.get(each.action)) else each.title)
            for each in COMMANDS
        ],
    }


class HelpScreen(Dialog[None]):
    """Keys and commands, in a scrolling dialog."""

    CSS_PATH = [DIALOG_STYLE, "help.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,f1,question_mark", "close", "Close")]

    def __init__(self, sections: Mapping[str, Rows]) -> None:
        super().__init__()
        self._sections = sections

    def compose(self) -> ComposeResult:
        with self.frame("Keys and commands", "Up Down scroll · Esc close"), VerticalScroll():
            for heading, rows in self._sections.items():
                yield Static(heading, classes="heading")
                table = Table.grid(
                    Column(width=_KEYS), Column(ratio=1), padding=(0, 1), expand=True
                )
                for key, words in rows:
                    table.add_row(Text(key, "bold"), Text(words))
                yield Static(table, classes="rows")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def _rows_of(bindings: Iterable[BindingType]) -> Rows:
    return [
        (", ".join(map(key_name, each.key.split(","))), each.description)
        for each in bindings
        if isinstance(each, Binding) and each.show
    ]
