"""The saved conversations: find one by its words and open it, rename it, delete it or export it; on
a wide terminal with a preview.

Deleting asks nothing: Ctrl+Z undoes it. Keys that act on the chosen row wait for a search that is
under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.style import Style
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.chats.export import FORMATS, UNTITLED, ExportFormat, file_name, render, write_new
from akunu_py.chats.search import Hit
from akunu_py.chats.store import ConversationStore, SearchResult
from akunu_py.chats.tree import ChatMessage, Tree
from akunu_py.errors import ConversationError
from akunu_py.text import collapse, displayable
from akunu_py.tui.screens.dialog import DIALOG_STYLE, Dialog, ListDialog
from akunu_py.tui.workers.store_thread import StoreThread

_WIDE, _NORMAL = 100, 60  # columns
_EMPTY = "No conversations yet. What is said in the chat is kept here."
_KEYS = (
    "Enter open · Ctrl+R rename · Ctrl+D delete · F1 keys · Ctrl+Z undo · Ctrl+S export · Esc close"
)
_EXPORT_FORMATS: dict[ExportFormat, tuple[str, str]] = {
    "markdown": ("Markdown", "what is on the screen, as text"),
    "json": ("JSON", "everything, with all branches; akunu can import it"),
}
_PREVIEWED = 6  # messages
_PREVIEWED_CHARACTERS = 2000  # of each: to lay out more would hold up the keys
_PROGRESS_S = 0.5  # between two looks at how far the answers are
_PREVIEW_DELAY_S = 0.1  # a row is previewed when the highlight stays on it


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to open. message: the one that was found, which may be on a branch that is not active;
    None for the conversation as it was left."""

    conversation: str
    message: str | None = None


class ConversationsScreen(ListDialog[Chosen]):
    """The list. The result is what to open, None for no change.

    current: the conversation on the screen below. progress: how far those are that are being
    answered, in words. unread: those that were answered behind the screen. words: what is
    searched for at first. clock: seconds since
    1970.
    """

    @dataclass
    class Deleted(Message):
        """A conversation was deleted; it may be the one on the screen below."""

        conversation: str

    @dataclass
    class Renamed(Message):
        """A conversation has another title."""

        conversation: str
        title: str

    CSS_PATH = [DIALOG_STYLE, "conversations.tcss"]  # noqa: RUF012 - declared so there
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_NORMAL, "-normal"), (_WIDE, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
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
        self,
        store: StoreThread,
        current: str | None = None,
        progress: Callable[[], Mapping[str, str]] = dict,
        unread: Collection[str] = (),
        words: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._store = store
        self._current = current
        self._progress = progress
        self._unread = unread
        self._words = words
        self._clock = clock
        self._found: dict[str, SearchResult] = {}
        self._empty_text = ""  # shown where nothing is found
        self._drawn_progress: dict[str, str] = {}
        self._renaming: str | None = None  # the conversation that gets another title
        self._search_done = asyncio.Event()  # the list is what the words find

    def compose(self) -> ComposeResult:
        with self.frame("Conversations", _KEYS):
            yield Input(self._words, id="words", placeholder="Find by words", compact=True)
            yield Input(id="name", placeholder="New title", compact=True)
            with Horizontal():
                yield OptionList(compact=True)
                yield PreviewPane(self._store)

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#name").display = False
        self._hint()
        self._search()
        self._drawn_progress = dict(self._progress())
        self.set_interval(_PROGRESS_S, self._show_progress)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)  # once sizes and styles are known

    # Keys

    def action_close(self) -> None:
        if self._renaming is None:
            self.dismiss(None)
        else:
            self._end_renaming()

    def action_move(self, steps: int) -> None:
        if self._renaming is None:
            super().action_move(steps)

    def action_rename(self) -> None:
        if (found := self._chosen()) and self._renaming is None:
            self._renaming = found.info.id
            self.query_one("#words").display = False
            name = self.query_one("#name", Input)
            name.display = True
            name.value = displayable(found.info.title)
            self.set_focus(name)  # at once: the next key is for it
            self._hint()

    @work
    async def action_delete(self) -> None:
        found = await self._chosen_after_search()
        if found is None or self._renaming is not None:
            return
        conversation = found.info.id
        try:
            await self._store.call(lambda store: store.delete(conversation))
        except ConversationError as error:
            self._show_error(error)
            return
        self.notify(
            found.info.title or UNTITLED, title="Deleted; Ctrl+Z brings it back", markup=False
        )
        self.post_message(self.Deleted(conversation))
        if conversation == self._current:  # the screen below shows a new one
            self._current = None
        self._search(self._neighbour(conversation))

    @work
    async def action_undo(self) -> None:
        if self._renaming is not None:
            return
        try:
            info = await self._store.call(lambda store: store.undo_delete())
        except ConversationError as error:
            self._show_error(error)
            return
        if info is None:
            self.notify("Nothing was deleted lately.")
        else:
            self.notify(info.title or UNTITLED, title="Back again", markup=False)
            self._search(info.id)

    @work
    async def action_export(self) -> None:
        found = await self._chosen_after_search()
        if found is None or self._renaming is not None:
            return
        form = await self.app.push_screen_wait(ExportScreen(found.info.title))
        if form is None:
            return
        try:
            tree = await self._store.call(lambda store: store.load(found.info.id))
            text = await asyncio.to_thread(render, tree, form)
            path = Path.cwd() / file_name(tree.title, form)
            path = await asyncio.to_thread(write_new, path, text, numbered=True)
        except ConversationError as error:
            self._show_error(error)
        else:
            self.notify(str(path), title="Exported", markup=False)

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
        found = await self._chosen_after_search()
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
            self._show_error(error)
            return
        self.post_message(self.Renamed(conversation, title))
        self._search(conversation)

    # Searching and drawing

    def _search(self, choose: str | None = None) -> None:
        """Searches for the words again, then highlights `choose`, or what was highlighted."""
        self._search_done.clear()
        self._find(choose)

    @work(exclusive=True, group="search")
    async def _find(self, choose: str | None) -> None:
        words = self.query_one("#words", Input).value
        try:
            found = await self._store.call(lambda store: _found(store, words, choose))
            problem = ""
        except ConversationError as error:
            found, problem = [], str(error)
        chosen = self._chosen()
        self._found = {each.info.id: each for each in found}
        self._empty_text = problem or (f"Nothing found for: {words}" if words.strip() else _EMPTY)
        self._draw(choose or (chosen.info.id if chosen else None))
        self._search_done.set()

    def _draw(self, choose: str | None = None) -> None:
        """Draws all rows in the width that there is."""
        rows = self.rows
        if choose is None and (chosen := self._chosen()):
            choose = chosen.info.id
        rows.clear_options()
        for each in self._found.values():
            rows.add_option(Option(self._row(each), id=each.info.id))
        if self._found:
            rows.highlighted = list(self._found).index(choose) if choose in self._found else 0
        elif self._empty_text:
            rows.add_option(Option(Content(displayable(self._empty_text)), disabled=True))
        self._hint()
        self._show_preview()

    def _row(self, found: SearchResult) -> Content:
        names = ("conversations--mark", "conversations--muted", "conversations--match")
        styles = [self.get_visual_style(name, partial=True) for name in names]
        conversation = found.info.id
        state = self._drawn_progress.get(conversation) or (
            "• new" if conversation in self._unread else ""
        )
        mark = "●" if conversation == self._current else " "
        width = self.rows.scrollable_content_region.width
        time = moment(found.info.updated, self._clock())
        return row_of(found, width, (state, True) if state else (time, False), mark, styles)

    def _show_progress(self) -> None:
        """Draws the rows anew of the conversations that are being answered, or were."""
        progress = dict(self._progress())
        before, self._drawn_progress = self._drawn_progress, progress
        for name in before.keys() | progress.keys():
            if before.get(name) != progress.get(name) and name in self._found:
                self.rows.replace_option_prompt(name, self._row(self._found[name]))

    @on(OptionList.OptionHighlighted)
    def _show_preview(self) -> None:
        self.query_one(PreviewPane).show(self._chosen())

    def _chosen(self) -> SearchResult | None:
        return self._found.get(self.chosen_id)

    async def _chosen_after_search(self) -> SearchResult | None:
        """The chosen one of those that the words find: waits for a search that is under way."""
        await self._search_done.wait()
        return self._chosen()

    def _neighbour(self, conversation: str) -> str | None:
        """What to highlight when that conversation is gone."""
        names = list(self._found)
        place = names.index(conversation)
        others = names[place + 1 :] or names[:place][-1:]
        return others[0] if others else None

    def _end_renaming(self) -> None:
        self._renaming = None
        self.query_one("#name").display = False
        words = self.query_one("#words", Input)
        words.display = True
        words.focus()
        self._hint()

    def _hint(self) -> None:
        """Shows the keys that matter now."""
        self._keys = _KEYS if self._renaming is None else "Enter keep the title · Esc leave it"
        self._show_keys()

    def _show_error(self, error: ConversationError) -> None:
        self.notify(str(error), severity="error", timeout=10, markup=False)


def _found(store: ConversationStore, words: str, also: str | None) -> Sequence[SearchResult]:
    """What the words find, and one more conversation: a title that was just changed may lack
    them."""
    found = store.search(words)
    if also is None or any(each.info.id == also for each in found):
        return found
    more = [SearchResult(info, Hit()) for info in store.list() if info.id == also]
    return [*more, *found]


class PreviewPane(VerticalScroll, can_focus=False):
    """The end of a conversation, or what is around the message that was found."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"preview--name", "preview--prompt"}

    def __init__(self, store: StoreThread) -> None:
        super().__init__(id="preview")
        self._store = store

    def compose(self) -> ComposeResult:
        yield Static(id="text")

    @work(exclusive=True)
    async def show(self, found: SearchResult | None) -> None:
        """Previews that one, a moment later."""
        text = self.query_one(Static)
        if found is None or not self.display:
            text.update("")
            return
        await asyncio.sleep(_PREVIEW_DELAY_S)
        try:
            tree = await self._store.call(lambda store: store.load(found.info.id))
        except ConversationError:  # deleted by another program a moment ago
            text.update("")
            return
        name = self.get_visual_style("preview--name", partial=True)
        prompt = self.get_visual_style("preview--prompt", partial=True)
        text.update(preview(tree, found.hit.message, _PREVIEWED, (name, prompt)))
        scroll = self.scroll_home if found.hit.message else self.scroll_end
        self.call_after_refresh(scroll, animate=False)


def preview(tree: Tree, message: str | None, most: int, styles: Sequence[Style]) -> Content:
    """The end of a conversation, or what is around one message of it, as plain text.

    most: messages. styles: of the names of models, and of prompts.
    """
    if message is not None and message in tree:
        tree.choose(message)
    path = [each for each in tree.path() if each.text.strip()]
    first = len(path) - most
    for place, each in enumerate(path):
        if each.id == message:
            first = min(first, place)
    shown = path[max(0, first) :][:most]
    return Content("\n\n").join(_previewed(each, *styles) for each in shown)


def _previewed(message: ChatMessage, name: Style, prompt: Style) -> Content:
    whole = message.text.strip()
    text = Content(displayable(whole[:_PREVIEWED_CHARACTERS]))
    if len(whole) > _PREVIEWED_CHARACTERS:
        text += Content(f" … {len(whole) - _PREVIEWED_CHARACTERS:,} more characters")
    if message.role == "user":
        return text.stylize(prompt)
    author = message.model or message.role
    return Content.assemble((collapse(author), name), "\n", text)


def row_of(
    found: SearchResult, width: int, state: tuple[str, bool], mark: str, styles: Sequence[Style]
) -> Content:
    """Two lines of `width` columns: the title and the state, below the match or the last message.

    state: the time, or what is going on there, and whether it is that. mark: one character before
    the title. styles: of the mark, of muted text, and of matches.
    """
    marked, muted, match = styles
    words, is_news = state
    room = max(1, width - len(words) - 4)
    title = Content(collapse(found.info.title) or UNTITLED).truncate(room, ellipsis=True)
    gap = " " * (room - title.cell_length + 2)
    below = _snippet(found, match).truncate(max(1, width - 2), ellipsis=True)
    return Content.assemble(
        (f"{mark} ", marked),
        title.stylize("bold"),
        gap,
        (words, marked if is_news else muted),
        "\n  ",
        below.stylize_before(muted),
    )


def _snippet(found: SearchResult, match: Style) -> Content:
    if found.hit.message is None:
        return Content(collapse(found.info.preview))
    content = Content(displayable(found.hit.snippet).replace("\n", " "))
    for start, end in found.hit.marks:
        content = content.stylize(match, start, end)
    return content


def moment(then: float, now: float) -> str:
    """A time in the fewest words: "14:05", "yesterday", "Mon", "3 Nov"; "" for 0, not known."""
    if not then:
        return ""
    day, today = datetime.fromtimestamp(then), datetime.fromtimestamp(now)
    days = (today.date() - day.date()) // timedelta(days=1)
    if days <= 0:
        return f"{day:%H:%M}"
    if days == 1:
        return "yesterday"
    if days < 7:
        return f"{day:%a}"
    year = "" if day.year == today.year else f" {day.year}"
    return f"{day.day} {day:%b}{year}"


class ExportScreen(Dialog[ExportFormat]):
    """The list of formats. The result is the one to write, None for none."""

    CSS_PATH = [DIALOG_STYLE, "conversations.tcss"]  # noqa: RUF012 - declared so there
    COMPONENT_CLASSES: ClassVar[set[str]] = {"export--muted"}

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        with self.frame("Export", "Enter write · Esc close"):
            yield OptionList(compact=True)
            yield Static(id="file")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self.call_after_refresh(self._show_formats)  # once styles are known

    def _show_formats(self) -> None:
        muted = self.get_visual_style("export--muted", partial=True)
        formats = self.query_one(OptionList)
        for form in FORMATS:
            name, words = _EXPORT_FORMATS[form]
            formats.add_option(Option(Content.assemble(f"{name:<10}", (words, muted)), id=form))
        formats.highlighted = 0

    @on(OptionList.OptionHighlighted)
    def _show_file(self, event: OptionList.OptionHighlighted) -> None:
        path = Path.cwd() / file_name(self._title, FORMATS[event.option_index])
        self.query_one("#file", Static).update(Content(displayable(str(path))))

    @on(OptionList.OptionSelected)
    def _take(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(FORMATS[event.option_index])
