"""The list of saved conversations: search, open, rename, delete, export, preview.

Deleting needs no confirmation because Ctrl+Z undoes it. Keys for the highlighted row wait for a
running search.
"""

import asyncio
import contextlib
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
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.chats.conversation_store import SearchResult
from akunu_py.chats.export import UNTITLED, export
from akunu_py.chats.search import find_words
from akunu_py.chats.tree import ConversationTree
from akunu_py.errors import ConversationError
from akunu_py.text import collapse, displayable
from akunu_py.tui.prompt.attachments import full_prompt
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog
from akunu_py.tui.status import report_errors
from akunu_py.tui.transcript.drafting import Mark
from akunu_py.tui.transcript.find import hits_in, search_finder
from akunu_py.tui.transcript.markdown import AnswerMarkdown, MarkdownSection
from akunu_py.tui.workers.store_thread import StoreThread

_WIDE, _NORMAL = 100, 60  # columns
_EMPTY = "No conversations yet. Chats are saved here."
MATCH = "$text-accent bold"  # the style of found words
_MATCHING = "-matching"  # the class of the matching message in a preview
_PREVIEWED = 6  # messages
_PREVIEWED_CHARACTERS = 2000  # per message; longer layouts would delay keys
_PROGRESS_S = 0.5  # between two updates of the answers' progress
_PREVIEW_DELAY_S = 0.1  # before a highlighted row is previewed


@dataclass(frozen=True, slots=True)
class ChosenConversation:
    conversation: str
    message: str | None = None  # the matching message, perhaps on an inactive branch
    words: str = ""  # of the search


@dataclass
class ConversationDeleted(Message):
    """A conversation was deleted; it may be the open one."""

    conversation: str


@dataclass
class ConversationRenamed(Message):
    conversation: str
    title: str


class ConversationsScreen(ListDialog[ChosenConversation]):
    """The list of conversations. The result is the one to open, None for no change."""

    CSS_PATH = [DIALOG_STYLE, "conversation_list.tcss"]  # noqa: RUF012 - as in Textual
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_NORMAL, "-normal"), (_WIDE, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "app.help", "Keys", priority=True),
        Binding("ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
        Binding("ctrl+z", "undo", "Undo the last deletion", priority=True),
        Binding("ctrl+s", "export", "Export", priority=True),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"conversations--mark", "conversations--muted"}

    heading = "Conversations"
    keys = (
        "Enter open · Ctrl+R rename · Ctrl+D delete · F1 keys · Ctrl+Z undo · Ctrl+S export · "
        "Esc close"
    )
    placeholder = "Search conversations"

    def __init__(
        self,
        store: StoreThread,
        current: str | None = None,
        progress: Callable[[], Mapping[str, str]] = dict,
        unread: Collection[str] = (),
        words: str = "",
    ) -> None:
        super().__init__()
        self._store = store
        self._current = current  # the open conversation
        self._progress = progress  # describes running answers, by conversation
        self._unread = unread  # conversations answered in the background
        self.first_words = words
        self._found: dict[str, SearchResult] = {}
        self.none_found = ""
        self._shown_progress: dict[str, str] = {}
        self._renaming: str | None = None  # the conversation being renamed
        self._search_done = asyncio.Event()

    def compose_list(self) -> ComposeResult:
        yield Input(id="name", placeholder="New title", compact=True)
        with Horizontal():
            yield from super().compose_list()
            yield PreviewPane(self._store)

    def on_mount(self) -> None:
        self.query_one("#name").display = False
        self._shown_progress = dict(self._progress())
        self.set_interval(_PROGRESS_S, self._show_progress)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)  # sizes are known then

    # Keys

    def action_close(self) -> None:
        if self._renaming is None:
            self.dismiss(None)
        else:
            self._end_renaming()

    def action_move(self, action: str) -> None:
        if self._renaming is None:
            super().action_move(action)

    def action_rename(self) -> None:
        if (found := self._chosen()) and self._renaming is None:
            self._renaming = found.info.id
            self.query_one("#words").display = False
            name = self.query_one("#name", Input)
            name.display = True
            name.value = displayable(found.info.title)
            self.set_focus(name)  # immediately, for the next key
            self._update_keys()

    @work
    async def action_delete(self) -> None:
        found = await self._chosen_after_search()
        if found is None:
            return
        conversation = found.info.id
        with report_errors(self._show_error):
            await self._store.call(lambda store: store.delete(conversation))
            title = found.info.title or UNTITLED
            self.notify(title, title="Deleted (Ctrl+Z to undo)", markup=False)
            self.post_message(ConversationDeleted(conversation))
            if conversation == self._current:  # The app opens a new one.
                self._current = None
            self.search(self._neighbor(conversation))

    @work
    async def action_undo(self) -> None:
        if self._renaming is not None:
            return
        with report_errors(self._show_error):
            info = await self._store.call(lambda store: store.undo_delete())
            if info is None:
                self.notify("There is no recent deletion to undo.")
            else:
                self.notify(info.title or UNTITLED, title="Restored", markup=False)
                self.search(info.id)

    @work
    async def action_export(self) -> None:
        found = await self._chosen_after_search()
        if found is None:
            return
        with report_errors(self._show_error):
            tree = await self._store.call(lambda store: store.load(found.info.id))
            written = await asyncio.to_thread(export, tree, Path.cwd())
            self.notify(str(written), title="Exported", markup=False)

    @work(exclusive=True, group="open")
    async def choose(self) -> None:  # type: ignore[override]
        if found := await self._chosen_after_search():
            self.dismiss(ChosenConversation(found.info.id, found.hit.message, self.words))

    @on(Input.Submitted, "#name")
    async def _rename(self, event: Input.Submitted) -> None:
        event.stop()
        conversation, title = self._renaming, event.value
        self._end_renaming()
        if conversation is not None and title.strip():
            with report_errors(self._show_error):
                await self._store.call(lambda store: store.rename(conversation, title))
                self.post_message(ConversationRenamed(conversation, title))
                self.search(conversation)

    # Searching and drawing

    def search(self, choose: str | None = None) -> None:
        """Search again, then highlight `choose` or keep the highlighted conversation."""
        self._search_done.clear()
        self._update_results(choose)

    @work(exclusive=True, group="search")
    async def _update_results(self, choose: str | None) -> None:
        words = self.words
        try:
            found = await self._store.call(lambda store: store.search(words))
            problem = ""
        except ConversationError as error:
            found, problem = [], str(error)
        self._found = {each.info.id: each for each in found}
        self.none_found = problem or (f"Nothing found for: {words}" if words.strip() else _EMPTY)
        self.draw(choose or "")
        self._search_done.set()

    def options(self) -> Sequence[Option]:
        return [Option(self._row(each), id=each.info.id) for each in self._found.values()]

    def draw(self, highlight: str = "") -> None:
        """Draw all rows at the current width."""
        super().draw(highlight)
        self._update_keys()
        self._show_preview()

    def _row(self, found: SearchResult) -> Content:
        """Return two lines: the title with time or state, then the match or last message."""
        conversation = found.info.id
        unread = "• new" if conversation in self._unread else ""
        state = self._shown_progress.get(conversation) or unread
        words = state or format_time(found.info.updated, time.time())
        width = self.rows.scrollable_content_region.width
        room = max(1, width - len(words) - 4)
        title = _marked(collapse(found.info.title) or UNTITLED, self.words)
        title = title.truncate(room, ellipsis=True)
        below = _snippet(found).truncate(max(1, width - 2), ellipsis=True)
        return Content.assemble(
            ("● " if conversation == self._current else "  ", ".conversations--mark"),
            title.stylize_before("bold"),
            " " * (room - title.cell_length + 2),
            (words, ".conversations--mark" if state else ".conversations--muted"),
            "\n  ",
            below.stylize_before(".conversations--muted"),
        )

    def _show_progress(self) -> None:
        before, self._shown_progress = self._shown_progress, dict(self._progress())
        for name in before.keys() | self._shown_progress.keys():
            if before.get(name) != self._shown_progress.get(name) and name in self._found:
                self.rows.replace_option_prompt(name, self._row(self._found[name]))

    @on(OptionList.OptionHighlighted)
    def _show_preview(self) -> None:
        self.query_one(PreviewPane).show(self._chosen(), self.words)

    def _chosen(self) -> SearchResult | None:
        return self._found.get(self.highlighted_id)

    async def _chosen_after_search(self) -> SearchResult | None:
        """Wait for a running search; return the highlighted row, None while renaming."""
        await self._search_done.wait()
        return self._chosen() if self._renaming is None else None

    def _neighbor(self, conversation: str) -> str | None:
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
        self._update_keys()

    def _update_keys(self) -> None:
        self._keys = self.keys if self._renaming is None else "Enter save the title · Esc cancel"
        self._show_keys()

    def _show_error(self, error: str) -> None:
        self.notify(error, severity="error", markup=False)


class PreviewPane(VerticalScroll, can_focus=False):
    """The end of a conversation, or the part from the matching message on."""

    def __init__(self, store: StoreThread) -> None:
        super().__init__(id="preview")
        self._store = store
        self._showing = asyncio.Lock()
        self._wanted: tuple[SearchResult | None, str] = None, ""

    @work
    async def show(self, found: SearchResult | None, words: str) -> None:
        """Preview `found` at the first of the marked `words`, after a short delay."""
        self._wanted, shown = (found, words), list[Widget]()
        await asyncio.sleep(_PREVIEW_DELAY_S)
        async with self._showing:  # Cancelling a removal would block the screen.
            if self._wanted != (found, words):
                return
            if found is not None and self.display:
                with contextlib.suppress(ConversationError):  # Another process has deleted it.
                    tree = await self._store.call(lambda store: store.load(found.info.id))
                    shown = _preview(tree, found.hit.message, words)
            with self.app.batch_update():
                await self.remove_children()
                await self.mount_all(shown)
                for section in self.query(MarkdownSection):
                    await section.restore()
        self.call_after_refresh(self._scroll_to_match)

    def on_resize(self) -> None:
        self.call_after_refresh(self._scroll_to_match)  # Markdown is laid out step by step.

    def _scroll_to_match(self) -> None:
        found, words = self._wanted
        matching = self.query(f".{_MATCHING}") if found else ()
        hits = (hit for view in matching for hit in hits_in(view, search_finder(words)))
        if hit := next(hits, None):
            self.scroll_to(y=max(0, hit.row_in(self) - self.size.height // 3), animate=False)
        else:
            self.scroll_end(animate=False)


def _marked(text: str | Content, words: str) -> Content:
    content = Content(displayable(text)) if isinstance(text, str) else text
    return _stylized(content, find_words(content.plain, words) if words.strip() else ())


def _stylized(content: Content, marks: Sequence[tuple[int, int]]) -> Content:
    for start, end in marks:
        content = content.stylize(MATCH, start, end)
    return content


def _preview(tree: ConversationTree, message: str | None, words: str) -> list[Widget]:
    """Return the title and last messages, or those from `message` on, in its branch."""
    if message is not None and message in tree:
        tree.activate_branch(message)
    path = [each for each in tree.active_branch() if each.text.strip()]
    match = next((place for place, each in enumerate(path) if each.id == message), len(path))
    first = max(0, min(len(path) - _PREVIEWED, match))
    shown: list[Widget] = [Static(_marked(collapse(tree.title) or UNTITLED, words), classes="name")]
    for each in path[first : first + _PREVIEWED]:
        whole = displayable(each.text.strip())
        marks = find_words(whole, words) if each.id == message else []
        start = max(0, marks[0][0] - _PREVIEWED_CHARACTERS // 2) if marks else 0
        text = "… " * bool(start) + whole[start:][:_PREVIEWED_CHARACTERS]
        if (more := len(whole) - start - _PREVIEWED_CHARACTERS) > 0:
            text += f" … {more:,} more characters"
        if each.role == "user":
            shown.append(Static(_marked(full_prompt(text), words), classes="prompt"))
        else:
            mark: Mark = lambda texts, *_: [_marked(text, words) for text in texts]  # noqa: E731
            shown.append(AnswerMarkdown(text, mark))
        shown[-1].set_class(each.id == message, _MATCHING)
    return shown


def _snippet(found: SearchResult) -> Content:
    if found.hit.message is None:
        return Content(collapse(found.info.preview))
    return _stylized(Content(displayable(found.hit.snippet).replace("\n", " ")), found.hit.marks)


def format_time(then: float, now: float) -> str:
    """Format a time briefly: "14:05", "yesterday", "Mon", "3 Nov"; "" for 0 (unknown)."""
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
