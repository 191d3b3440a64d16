"""Dialogs over the chat: their frame, the list in which words find a row, and a plain question."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.text import displayable
from akunu_py.tui.status import MessageLine

DIALOG_STYLE = Path(__file__).with_suffix(".tcss")
Result = TypeVar("Result")
_BETWEEN = " · "


class Dialog(ModalScreen[Result | None]):
    """A dialog, which Esc closes without a result. CSS_PATH begins with `DIALOG_STYLE`."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Close")]

    def frame(self, title: str, keys: str) -> Vertical:
        """What everything is composed in; the keys that matter stand at its foot."""
        frame = Vertical(id="dialog")
        frame.border_title = title
        self._keys = keys
        return frame

    def on_mount(self) -> None:
        self.query_one("#dialog").mount(MessageLine())
        # As Textual does when it is told its size, which is after the first picture.
        wide = self.HORIZONTAL_BREAKPOINTS or self.app.HORIZONTAL_BREAKPOINTS or []
        high = self.VERTICAL_BREAKPOINTS or self.app.VERTICAL_BREAKPOINTS or []
        self.add_class(
            *self._get_breakpoint_classes(self.app.size.width, wide),
            *self._get_breakpoint_classes(self.app.size.height, high),
        )

    def on_resize(self) -> None:
        if self._keys:
            self.call_after_refresh(self._show_keys)

    def _show_keys(self) -> None:
        """As many as fit; the last one, which closes it, always does."""
        frame, shown = self.query_one("#dialog"), self._keys.split(_BETWEEN)
        while len(shown) > 1 and len(_BETWEEN.join(shown)) > frame.outer_size.width - 6:
            del shown[-2]
        frame.border_subtitle = with_links(_BETWEEN.join(shown))

    def on_click(self, event: events.Click) -> None:
        """A click outside closes it."""
        if event.widget is self:
            self.action_close()

    def action_close(self) -> None:
        self.dismiss(None)


def with_links(keys: str) -> Content:
    """The keys at the foot of a dialog, of which what closes it can be clicked."""
    before, close, after = keys.partition("Esc close")
    link = Content.from_markup(f"[@click=screen.close]{close}[/]") if close else Content("")
    return Content.assemble(before, link, after)


class ListDialog(Dialog[Result]):
    """A list of rows below the words that find them. The words keep the focus, so keys that move
    the highlight are bound here."""

    def on_mount(self) -> None:
        self.rows.can_focus = False

    @property
    def rows(self) -> OptionList:
        return self.query_one(OptionList)

    @property
    def chosen_id(self) -> str:
        """Of the highlighted row, "" where there is none."""
        option = self.rows.highlighted_option
        return (option.id if option else None) or ""

    def action_move(self, steps: int) -> None:
        """Highlights another row; headings and remarks cannot be."""
        places = [at for at, option in enumerate(self.rows.options) if not option.disabled]
        if places:
            highlighted = self.rows.highlighted
            now = places.index(highlighted) if highlighted in places else 0
            self.rows.highlighted = places[min(max(0, now + steps), len(places) - 1)]


class QuestionScreen(Dialog[str]):
    """A question. choices: what may be answered, in words, by the result; Esc gives None."""

    CSS_PATH = [DIALOG_STYLE]  # noqa: RUF012 - declared so there

    def __init__(self, question: str, choices: Mapping[str, str]) -> None:
        super().__init__()
        self._question = question
        self._choices = choices

    def compose(self) -> ComposeResult:
        with self.frame("", "Enter choose · Esc leave it as it is"):
            yield Static(Content(displayable(self._question)), id="question")
            yield OptionList(
                *(Option(words, id=result) for result, words in self._choices.items()), compact=True
            )

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _take(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)
