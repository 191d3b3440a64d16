"""What was said in the conversation that is chosen in the list, where there is room for it."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from akunu_py.chats.store import SearchResult
from akunu_py.errors import ConversationError
from akunu_py.tui.library.rows import peek
from akunu_py.tui.library.store_thread import StoreThread

_MESSAGES = 6
_REST_S = 0.1  # a row is looked into when the highlight stays on it


class PreviewPane(VerticalScroll, can_focus=False):
    """The end of a conversation, or what is around the message that was found."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"peek--name", "peek--prompt"}

    def __init__(self, store: StoreThread) -> None:
        super().__init__(id="peek")
        self._store = store

    def compose(self) -> ComposeResult:
        yield Static(id="said")

    @work(exclusive=True)
    async def show(self, found: SearchResult | None) -> None:
        """Looks into that one, a moment later."""
        said = self.query_one(Static)
        if found is None or not self.display:
            said.update("")
            return
        await asyncio.sleep(_REST_S)
        try:
            tree = await self._store.call(lambda store: store.load(found.info.id))
        except ConversationError:  # deleted by another program a moment ago; the list will know
            said.update("")
            return
        name = self.get_visual_style("peek--name", partial=True)
        prompt = self.get_visual_style("peek--prompt", partial=True)
        said.update(peek(tree, found.hit.message, _MESSAGES, (name, prompt)))
        scroll = self.scroll_home if found.hit.message else self.scroll_end
        self.call_after_refresh(scroll, animate=False)
