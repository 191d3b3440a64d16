"""Search in earlier prompts; the chosen one is copied to the prompt box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from akunu_py.text import on_one_line
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog

_MAX_SHOWN = 200  # prompts in the list
_MAX_CHARACTERS = 300  # displayed per prompt


class HistoryScreen(ListDialog[str]):
    """The prompts that contain all words, newest first. The result is the chosen prompt."""

    CSS_PATH = [DIALOG_STYLE, "earlier_prompts.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "move(-1)", "Newer", show=False),
    ]

    def __init__(self, prompts: Sequence[str]) -> None:  # oldest first
        super().__init__()
        self._prompts = list(dict.fromkeys(reversed(prompts)))
        self._found: list[str] = []

    def compose(self) -> ComposeResult:
        with self.frame("Earlier prompts", "Enter take · Esc close"):
            yield Input(placeholder="Search prompts", compact=True)
            yield OptionList(compact=True, markup=False)

    def on_mount(self) -> None:
        super().on_mount()
        self._show("")

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        self._show(event.value)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _dismiss_with_choice(self) -> None:
        chosen = self.rows.highlighted
        self.dismiss(self._found[chosen] if self._found and chosen is not None else None)

    def _show(self, words: str) -> None:
        wanted = words.casefold().split()
        self._found = [
            prompt for prompt in self._prompts if all(word in prompt.casefold() for word in wanted)
        ][:_MAX_SHOWN]
        rows = self.rows
        rows.clear_options()
        if self._found:
            rows.add_options(on_one_line(prompt[:_MAX_CHARACTERS]) for prompt in self._found)
            rows.highlighted = 0
        else:
            rows.add_option(Option("No matching prompt.", disabled=True))
