"""Search in earlier prompts; the chosen one is copied to the prompt box."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets.option_list import Option

from akunu_py.text import on_one_line
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog

_MAX_SHOWN = 200  # prompts in the list
_MAX_CHARACTERS = 300  # displayed per prompt


class HistoryScreen(ListDialog[str]):
    """The prompts that contain all words, newest first. The result is the chosen prompt."""

    CSS_PATH = [DIALOG_STYLE, "earlier_prompts.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "move('cursor_up')", "Newer", show=False),
    ]

    heading = "Earlier prompts"
    keys = "Enter take · Esc close"
    placeholder = "Search prompts"
    none_found = "No matching prompt."

    def __init__(self, prompts: Sequence[str]) -> None:  # oldest first
        super().__init__()
        self._prompts = list(dict.fromkeys(reversed(prompts)))

    def options(self) -> Sequence[Option]:
        words = self.words.casefold().split()
        found = (
            Option(on_one_line(prompt[:_MAX_CHARACTERS]), id=str(place))
            for place, prompt in enumerate(self._prompts)
            if all(word in prompt.casefold() for word in words)
        )
        return list(islice(found, _MAX_SHOWN))

    def choose(self) -> None:
        self.dismiss(self._prompts[int(self.highlighted_id)] if self.highlighted_id else None)
