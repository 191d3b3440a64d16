"""Chats that are kept: new, earlier ones, renaming, saving as a file.

Owns which conversation is on the screen. The keeper has a thread of its own; what it has to tell
is shown here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from akunu_py.chats.export import SUFFIXES, ExportFormat, file_name, render, write_new
from akunu_py.chats.tree import ConversationInfo, Tree
from akunu_py.errors import AkunuError, ConversationError
from akunu_py.tui.answering import Answering
from akunu_py.tui.conversation import Conversation
from akunu_py.tui.library.screen import Chosen, ConversationsScreen
from akunu_py.tui.library.store_thread import Kept, NotKept, StoreWarning
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.history import HistoryScreen

_RECALLED = 500  # prompts of earlier chats


class Keeping(Answering):
    """Actions on whole chats."""

    async def action_new_chat(self) -> None:
        await self._show_chat(Tree())

    def action_conversations(self) -> None:
        if self._keeper is None:
            self._say("Nothing is kept here.")
            return
        current = self._conversation.tree.conversation
        self.push_screen(ConversationsScreen(self._keeper, current), self._open_chosen)

    async def action_rename_chat(self, title: str = "") -> None:
        tree = self._conversation.tree
        if not self._conversation.turns:
            self._say("The chat is empty; it gets its title from the first prompt.")
        elif not title:
            self._prompt.write(f"/rename {tree.title}")
            self._prompt.focus()
        else:
            tree.title = title
            try:
                if self._keeper is not None:
                    await self._keeper.ask(lambda kept: kept.rename(tree.conversation, title))
            except ConversationError as error:
                self._warn(str(error))
            else:
                self._say(f"Renamed: {title}")

    async def action_export(self, file: str = "") -> None:
        """Saves the chat as `file`; its ending says in which form, Markdown if it says none."""
        if not self._conversation.turns:
            self._say("The chat is empty.")
            return
        tree = self._conversation.tree
        form = _format_of(file)
        path = Path(file or file_name(tree.title, form)).expanduser()
        try:
            text = await asyncio.to_thread(render, tree, form)
            path = self._setup.folder / path
            written = await asyncio.to_thread(write_new, path, text, numbered=not file)
        except AkunuError as error:
            self._warn(str(error))
        else:
            self._say(f"Saved as {written}")

    async def recall_prompts(self) -> None:
        """Gives the box the prompts of earlier chats."""
        if self._keeper is None:
            return
        try:
            prompts = await self._keeper.ask(lambda kept: kept.recent_prompts(_RECALLED))
        except ConversationError:
            return  # NotKept says so already
        self._prompt.remember(prompts)

    async def chats(self) -> Sequence[ConversationInfo]:
        """Those that are kept, the latest first; none where they cannot be read."""
        if self._keeper is None:
            return ()
        try:
            return await self._keeper.ask(lambda kept: kept.list())
        except ConversationError:
            return ()  # NotKept says so already

    async def open_chat(self, conversation: str) -> None:
        """Shows a chat that is kept, as it was left."""
        await self._open_chosen(Chosen(conversation))

    def on_prompt_box_search_wanted(self, event: PromptBox.SearchWanted) -> None:
        if event.earlier:
            self.push_screen(HistoryScreen(event.earlier), self._take_prompt)
        else:
            self._say("There are no earlier prompts yet.")

    # What the keeper tells

    async def on_not_kept(self, message: NotKept) -> None:
        await self._note(f"This chat is not saved for now: {message.error}", "error")

    def on_kept(self, message: Kept) -> None:
        self._say("Everything is saved again.")

    async def on_store_warning(self, message: StoreWarning) -> None:
        await self._note(message.text)

    async def on_conversations_screen_deleted(self, message: ConversationsScreen.Deleted) -> None:
        if message.conversation == self._conversation.tree.conversation:
            await self._show_chat(Tree())

    def on_conversations_screen_renamed(self, message: ConversationsScreen.Renamed) -> None:
        if message.conversation == self._conversation.tree.conversation:
            self._conversation.tree.title = message.title

    # In between

    def _take_prompt(self, prompt: str | None) -> None:
        if prompt is not None:
            self._prompt.write(prompt)
        self._prompt.focus()

    async def _open_chosen(self, chosen: Chosen | None) -> None:
        if chosen is None or self._keeper is None:
            return
        try:
            tree = await self._keeper.ask(lambda kept: kept.load(chosen.conversation))
        except ConversationError as error:
            self._warn(str(error))
            return
        if chosen.message is not None and chosen.message in tree:
            tree.choose(chosen.message)
        await self._show_chat(tree, chosen.message)

    async def _show_chat(self, tree: Tree, message: str | None = None) -> None:
        """Shows another conversation, in which what comes is said, at that message."""
        await self._interrupt()
        self._leave_editing()
        self._conversation = Conversation(tree)
        await self._transcript.open(self._conversation, message)
        if not self._conversation.turns:
            await self._transcript.add(self._welcome())
        self._status.stats = None
        self._panel.show(None, None)
        if self._status.phase == "stopped":
            self._status.phase = "ready"
        self._prompt.focus()
        self._show_hints()


def _format_of(file: str) -> ExportFormat:
    suffix = Path(file).suffix.lower()
    return next((form for form, known in SUFFIXES.items() if known == suffix), "markdown")
