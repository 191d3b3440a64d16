"""The theme gallery: the highlighted theme colors the whole chat, next to a sample."""

from __future__ import annotations

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.tui import themes
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog
from akunu_py.tui.transcript.highlighting import highlight

_CODE = 'def greet(name: str) -> int:  #\n    return print(f"Hi {name}", 2)'
_DIFF = "@@ -1 +1 @@\n-an old line\n+a new line"


class ThemesScreen(ListDialog[str]):
    """The list of themes. The result is the chosen theme; None restores the current one."""

    CSS_PATH = [DIALOG_STYLE, "theme_gallery.tcss"]  # noqa: RUF012 - as in Textual

    def __init__(self, current: str, show_theme: Callable[[str], None]) -> None:
        super().__init__()
        self._current = current
        self._show_theme = show_theme  # previews a theme

    def compose(self) -> ComposeResult:
        with self.frame("Themes", "Enter use · Esc close"):
            yield Input(placeholder="Search themes", compact=True)
            with Horizontal():
                yield OptionList(compact=True)
                with Vertical(id="sample"):
                    yield Static(Content("Your prompt looks like this."), id="prompt-sample")
                    yield Static(Content("An answer, and a note."), id="text-sample")
                    yield Static(highlight(_CODE, "python"), classes="code-sample")
                    yield Static(highlight(_DIFF, "diff"), classes="code-sample")
                    yield Static(Content("words that were guessed right"), id="accepted-sample")
                    yield Static(Content("An error."), id="error-sample")

    def on_mount(self) -> None:
        super().on_mount()
        self._list_themes("")

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self._list_themes(event.value)

    def _list_themes(self, words: str) -> None:
        names = [each for each in themes.choices() if words.strip().lower() in each]
        rows = self.rows
        rows.clear_options()
        for name in names:
            mark = "● " if name == self._current else "  "
            rows.add_option(Option(f"{mark}{themes.describe(name)}", id=name))
        if names:
            rows.highlighted = names.index(self._current) if self._current in names else 0
        else:
            rows.add_option(Option("No matching theme.", disabled=True))

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_id:
            self._show_theme(event.option_id)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _choose(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        event.stop()
        if self.highlighted_id:
            self.dismiss(self.highlighted_id)

    def action_close(self) -> None:
        self._show_theme(self._current)
        self.dismiss(None)
