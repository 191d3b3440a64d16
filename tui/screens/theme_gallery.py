"""The theme gallery: the highlighted theme colors the whole chat, next to a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.tui import themes
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog
from akunu_py.tui.transcript.highlighting import highlight

_CODE = 'def greet(name: str) -> int:  #\n    return print(f"Hi {name}", 2)'
_DIFF = "@@ -1 +1 @@\n-an old line\n+a new line"


class ThemesScreen(ListDialog[str]):
    """The list of themes. The result is the chosen theme; None restores the current one."""

    CSS_PATH = [DIALOG_STYLE, "theme_gallery.tcss"]  # noqa: RUF012 - as in Textual

    heading = "Themes"
    keys = "Enter use · Esc close"
    placeholder = "Search themes"
    none_found = "No matching theme."

    def __init__(self, current: str, show_theme: Callable[[str], None]) -> None:
        super().__init__()
        self.preferred = current
        self._show_theme = show_theme  # previews a theme

    def compose_list(self) -> ComposeResult:
        with Horizontal():
            yield from super().compose_list()
            with Vertical(id="sample"):
                yield Static(Content("Your prompt looks like this."), id="prompt-sample")
                yield Static(Content("An answer, and a note."), id="text-sample")
                yield Static(highlight(_CODE, "python"), classes="code-sample")
                yield Static(highlight(_DIFF, "diff"), classes="code-sample")
                yield Static(Content("words that were guessed right"), id="accepted-sample")
                yield Static(Content("An error."), id="error-sample")

    def options(self) -> Sequence[Option]:
        words = self.words.strip().lower()
        return [
            Option(f"{'●' if name == self.preferred else ' '} {themes.describe(name)}", id=name)
            for name in themes.choices()
            if words in name
        ]

    def choose(self) -> None:
        if self.highlighted_id:
            self.dismiss(self.highlighted_id)

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_id:
            self._show_theme(event.option_id)

    def action_close(self) -> None:
        self._show_theme(self.preferred)
        self.dismiss(None)
