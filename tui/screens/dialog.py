"""Dialogs over the chat: the frame, and the searchable list."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from akunu_py.text import displayable
from akunu_py.tui.status import MessageLine

DIALOG_STYLE = Path(__file__).with_suffix(".tcss")
Result = TypeVar("Result")
_SEPARATOR = " · "


class Dialog(ModalScreen[Result | None]):
    """A dialog; Esc closes it without a result. `CSS_PATH` starts with `DIALOG_STYLE`."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Close")]

    def frame(self, title: str, keys: str) -> Vertical:
        """Return the frame that contains the dialog; `keys` are listed at its bottom edge."""
        frame = Vertical(id="dialog")
        frame.border_title = title
        self._keys = keys
        return frame

    @property
    def described_keys(self) -> list[tuple[str, str]]:
        """The keys at the bottom edge, and what they do."""
        pairs = (each.partition(" ") for each in self._keys.split(_SEPARATOR))
        return [(key, words.capitalize()) for key, _, words in pairs]

    def on_mount(self) -> None:
        self.query_one("#dialog").mount(MessageLine())
        # Textual sets these classes only after the first frame.
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
        """Show the keys that fit; the last one, which closes the dialog, always does."""
        frame, shown = self.query_one("#dialog"), self._keys.split(_SEPARATOR)
        while len(shown) > 1 and len(_SEPARATOR.join(shown)) > frame.outer_size.width - 6:
            del shown[-2]
        before, close, after = _SEPARATOR.join(shown).partition("Esc close")
        link = Content.from_markup(f"[@click=screen.close]{close}[/]") if close else Content("")
        frame.border_subtitle = Content.assemble(before, link, after)

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.action_close()

    def action_close(self) -> None:
        self.dismiss(None)


class ListDialog(Dialog[Result]):
    """A list below a search box that keeps the focus. Enter or a click chooses a row."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,ctrl+n,ctrl+j", "move('cursor_down')", "Next row", show=False),
        Binding("up,ctrl+p", "move('cursor_up')", "Previous row", show=False),
        Binding("pagedown", "move('page_down')", "Further down", show=False),
        Binding("pageup", "move('page_up')", "Further up", show=False),
    ]

    heading: ClassVar[str]
    keys: ClassVar[str]  # listed at the bottom edge
    placeholder: ClassVar[str]  # of the search box
    none_found = "No match."  # shown instead of rows, if not ""
    preferred = ""  # the row to highlight first
    first_words = ""  # the initial search

    def compose(self) -> ComposeResult:
        with self.frame(self.heading, self.keys):
            yield Input(self.first_words, self.placeholder, id="words", compact=True)
            yield from self.compose_list()

    def compose_list(self) -> ComposeResult:
        """Compose the list, and what is shown with it."""
        yield OptionList(compact=True, markup=False)

    def options(self) -> Sequence[Option]:
        """Return the rows that match `words`. Ids are unique; headings have none."""
        raise NotImplementedError

    def choose(self) -> None:
        """Handle Enter, or a click on a row."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.rows.can_focus = False
        self.search()

    @property
    def rows(self) -> OptionList:
        return self.query_one(OptionList)

    @property
    def words(self) -> str:
        return self.query_one("#words", Input).value

    @property
    def highlighted_id(self) -> str:
        """The id of the highlighted row, "" for none."""
        option = self.rows.highlighted_option
        return (option.id if option else None) or ""

    @on(Input.Changed, "#words")
    def _words_changed(self) -> None:
        self.search()

    def search(self) -> None:
        self.draw()

    def draw(self, highlight: str = "") -> None:
        """List all rows again. Highlight a row: `highlight`, the present or preferred one."""
        wanted = (highlight, self.highlighted_id, self.preferred)
        options = list(self.options())
        if not options and self.none_found:
            options.append(Option(displayable(self.none_found), disabled=True))
        rows, ids = self.rows, [each.id for each in options]
        rows.clear_options()
        rows.add_options(options)
        rows.highlighted = next((ids.index(each) for each in wanted if each in ids), None)
        if rows.highlighted is None:
            rows.action_first()

    @on(Input.Submitted, "#words")
    @on(OptionList.OptionSelected)
    def _choose(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        event.stop()
        self.choose()

    def action_move(self, action: str) -> None:
        getattr(self.rows, f"action_{action}")()
