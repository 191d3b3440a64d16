"""The conversations: find one by its words and open it, rename it, delete it, export it.

Owns the list and its keys; those that act on the chosen row wait for a search that is under way.
The store is called in its thread. The result is the
conversation to open, None for no change. Refuses to ask before it deletes: Ctrl+Z brings back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from akunu_py.chats.store import SearchResult
from akunu_py.errors import ConversationError
from akunu_py.text import displayable
from akunu_py.tui.library.export import ExportScreen, export_here
from akunu_py.tui.library.preview import PreviewPane
from akunu_py.tui.library.rows import UNTITLED, row_of
from akunu_py.tui.library.store_thread import StoreThread

_WIDE, _NORMAL = 100, 60  # columns
_EMPTY = "No conversations yet. What is said in the chat is kept here."
_HINTS = (
    "Enter open · Ctrl+R rename · Ctrl+D delete · Ctrl+Z undo · Ctrl+S export · Esc close",
    "Enter open · ^R rename · ^D delete · ^Z undo · ^S export",
    "Enter open · F1 keys",
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to open. message: the one that was found, which may be on a branch that is not active;
    None for the conversation as it was left."""

    conversation: str
    message: str | None = None


class ConversationsScreen(ModalScreen[Chosen | None]):
    """The list. current: the conversation on the screen below. clock: seconds since 1970."""

    @dataclass
    class Deleted(Message):
        """A conversation was deleted; it may be the one on the screen below."""

        conversation: str

    @dataclass
    class Renamed(Message):
        """A conversation has another title."""

        conversation: str
        title: str

    CSS_PATH = "screen.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_NORMAL, "-normal"), (_WIDE, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close"),
        Binding("down", "move(1)", "Next conversation", show=False, priority=True),
        Binding("up", "move(-1)", "Conversation before", show=False, priority=True),
        Binding("pagedown", "move(7)", "Further down", show=False),
        Binding("pageup", "move(-7)", "Further up", show=False),
        Binding("ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
        Binding("ctrl+z", "undo", "Bring back what was deleted last", priority=True),
        Binding("ctrl+s", "export", "Export", priority=True),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "conversations--mark",
        "conversations--muted",
        "conversations--match",
    }

    def __init__(
        self, store: StoreThread, current: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._clock = clock
        self._found: dict[str, SearchResult] = {}
        self._nothing = ""  # what to say where the list is empty
        self._renaming: str | None = None  # the conversation that gets another title
        self._is_found = asyncio.Event()  # the list is what the words find

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = "Conversations"
            yield Input(id="words", placeholder="Find by words", compact=True)
            yield Input(id="name", placeholder="New title", compact=True)
            with Horizontal():
                yield OptionList(compact=True)
                yield PreviewPane(self._store)

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        self.query_one("#name").display = False
        self._hint()
        self._search()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)  # once sizes and styles are known

    # Keys

    def action_close(self) -> None:
        if self._renaming is None:
            self.dismiss(None)
        else:
            self._end_renaming()

    def action_move(self, steps: int) -> None:
        rows = self.query_one(OptionList)
        if self._found and self._renaming is None:
            now = rows.highlighted or 0
            rows.highlighted = min(max(0, now + steps), len(self._found) - 1)

    def action_rename(self) -> None:
        if (found := self._chosen()) and self._renaming is None:
            self._renaming = found.info.id
            self.query_one("#words").display = False
            name = self.query_one("#name", Input)
            name.display = True
            name.value = displayable(found.info.title)
            name.focus()
            self._hint()

    @work
    async def action_delete(self) -> None:
        found = await self._chosen_now()
        if found is None or self._renaming is not None:
            return
        conversation = found.info.id
        try:
            await self._store.call(lambda store: store.delete(conversation))
        except ConversationError as error:
            self._tell(error)
            return
        title = displayable(found.info.title) or UNTITLED
        self.notify(title, title="Deleted; Ctrl+Z brings it back", markup=False)
        self.post_message(self.Deleted(conversation))
        self._search(self._neighbour(conversation))

    @work
    async def action_undo(self) -> None:
        if self._renaming is not None:
            return
        try:
            info = await self._store.call(lambda store: store.undo_delete())
        except ConversationError as error:
            self._tell(error)
            return
        if info is None:
            self.notify("Nothing was deleted lately.")
        else:
            self.notify(displayable(info.title) or UNTITLED, title="Back again", markup=False)
            self._search(info.id)

    @work
    async def action_export(self) -> None:
        found = await self._chosen_now()
        if found is None or self._renaming is not None:
            return
        form = await self.app.push_screen_wait(ExportScreen(found.info.title))
        if form is None:
            return
        try:
            tree = await self._store.call(lambda store: store.load(found.info.id))
            path = await export_here(tree, form)
        except ConversationError as error:
            self._tell(error)
        else:
            self.notify(displayable(str(path)), title="Exported", markup=False)

    @on(Input.Changed, "#words")
    def _words_changed(self) -> None:
        self._search()

    @on(Input.Submitted, "#words")
    @on(OptionList.OptionSelected)
    def _open(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        event.stop()
        self._open_chosen()

    @work(exclusive=True, group="open")
    async def _open_chosen(self) -> None:
        found = await self._chosen_now()
        if found and self._renaming is None:
            self.dismiss(Chosen(found.info.id, found.hit.message))

    @on(Input.Submitted, "#name")
    async def _rename(self, event: Input.Submitted) -> None:
        event.stop()
        conversation, title = self._renaming, event.value
        self._end_renaming()
        if conversation is None or not title.strip():
            return
        try:
            await self._store.call(lambda store: store.rename(conversation, title))
        except ConversationError as error:
            self._tell(error)
            return
        self.post_message(self.Renamed(conversation, title))
        self._search(conversation)

    # In between

    def _search(self, choose: str | None = None) -> None:
        """Looks for the words anew; then `choose` is chosen, or again what was."""
        self._is_found.clear()
        self._find(choose)

    @work(exclusive=True, group="search")
    async def _find(self, choose: str | None) -> None:
        words = self.query_one("#words", Input).value
        try:
            found = await self._store.call(lambda store: store.search(words))
            problem = ""
        except ConversationError as error:
            found, problem = [], str(error)
        chosen = self._chosen()
        self._found = {each.info.id: each for each in found}
        self._nothing = problem or (f"Nothing found for: {words}" if words.strip() else _EMPTY)
        self._draw(choose or (chosen.info.id if chosen else None))
        self._is_found.set()

    def _draw(self, choose: str | None = None) -> None:
        """All rows, in the width that there is."""
        rows = self.query_one(OptionList)
        if choose is None and (chosen := self._chosen()):
            choose = chosen.info.id
        width = rows.scrollable_content_region.width
        looks = ("conversations--mark", "conversations--muted", "conversations--match")
        styles = [self.get_visual_style(name, partial=True) for name in looks]
        rows.clear_options()
        for each in self._found.values():
            mark = "●" if each.info.id == self._current else " "
            row = row_of(each, width, self._clock(), mark, styles)
            rows.add_option(Option(row, id=each.info.id))
        if self._found:
            rows.highlighted = list(self._found).index(choose) if choose in self._found else 0
        elif self._nothing:
            rows.add_option(Option(Content(displayable(self._nothing)), disabled=True))
        self._hint()
        self._look()

    @on(OptionList.OptionHighlighted)
    def _look(self) -> None:
        self.query_one(PreviewPane).show(self._chosen())

    def _chosen(self) -> SearchResult | None:
        option = self.query_one(OptionList).highlighted_option
        return self._found.get(option.id) if option and option.id else None

    async def _chosen_now(self) -> SearchResult | None:
        """The chosen one of those that the words find: a search that is under way ends first."""
        await self._is_found.wait()
        return self._chosen()

    def _neighbour(self, conversation: str) -> str | None:
        """What to choose when that conversation is gone."""
        names = list(self._found)
        place = names.index(conversation)
        left = names[place + 1 :] or names[:place][-1:]
        return left[0] if left else None

    def _end_renaming(self) -> None:
        self._renaming = None
        self.query_one("#name").display = False
        words = self.query_one("#words", Input)
        words.display = True
        words.focus()
        self._hint()

    def _hint(self) -> None:
        """The keys, in the words that there is room for."""
        width = self.size.width
        hint = _HINTS[0 if width >= _WIDE else 1 if width >= _NORMAL else 2]
        if self._renaming is not None:
            hint = "Enter keep the title · Esc leave it"
        self.query_one("#dialog").border_subtitle = hint

    def _tell(self, error: ConversationError) -> None:
        self.notify(displayable(str(error)), severity="error", timeout=10, markup=False)
