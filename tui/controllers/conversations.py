"""Whole conversations: new, opened, renamed, exported."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.chats.export import file_name, format_of, render, write_new
from akunu_py.chats.tree import ConversationInfo, Tree
from akunu_py.decoding.prompt_cache.store import forget_conversation
from akunu_py.errors import AkunuError, ConversationError
from akunu_py.tui.controllers.answering import AnswerController
from akunu_py.tui.controllers.turns import TurnController
from akunu_py.tui.open_conversation import Conversation
from akunu_py.tui.screens.conversations import Chosen
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.workers.store_thread import StoreThread

_ID_DIGITS = 6  # so many at least name a conversation
_RECALLED = 500  # prompts of earlier conversations


@dataclass(frozen=True, slots=True)
class Resume:
    """What to open at the start: the `last` conversation, or the one that `words` find or whose id
    begins with them; the list where they find several, or there are none."""

    words: str = ""
    last: bool = False


@dataclass(eq=False)
class LibraryController:
    """Opens conversations in the place of the one on the screen, and changes saved ones."""

    _conversation: Conversation
    _answering: AnswerController
    _turns: TurnController
    _view: ChatView
    _store: StoreThread | None  # None: nothing is saved
    _directory: Path  # where exported files go

    async def new(self) -> None:
        """Shows an empty conversation."""
        await self.show(Tree())

    async def open(self, chosen: Chosen | None) -> None:
        """Shows a conversation, as it was left or at a message; None changes nothing. What is being
        answered goes on, here or behind."""
        if chosen is None or self._store is None:
            return
        wanted, message = chosen.conversation, chosen.message
        if wanted != self._conversation.tree.conversation:
            if not self._answering.is_aside(wanted):
                try:
                    tree = await self._store.call(lambda store: store.load(wanted))
                except ConversationError as error:
                    self._view.refuse(str(error))
                    return
            self._answering.set_aside()
            if not self._answering.bring_back(wanted):
                self._conversation.open(tree)
        here = self._conversation
        if message is not None and message in here.tree and not self._answering.is_busy:
            here.show(message)
        await self._show(message)

    async def show(self, tree: Tree, message: str | None = None) -> None:
        """Shows a conversation that is not answered anywhere, at that message or its end."""
        self._answering.set_aside()
        self._conversation.open(tree)
        await self._show(message)

    async def _show(self, message: str | None = None) -> None:
        """Shows what the conversation is now, at that message or its end."""
        self._turns.leave_editing()
        await self._view.show_conversation(message)
        self._answering.show_status()
        self._view.prompt.focus()
        self._view.show_state()

    async def resume(self, wanted: Resume) -> str | None:
        """Opens what is wanted. Where the user has to choose: the words to begin the list with."""
        if wanted.last:
            if not await self.continue_last():
                self._view.refuse("There is no earlier chat to continue.")
            return None
        if self._store is None or not wanted.words:
            return ""
        words = wanted.words
        try:
            infos = await self._store.call(lambda store: store.list())
            found = [
                Chosen(info.id) for info in infos if _is_id(words) and info.id.startswith(words)
            ]
            if not found:
                results = await self._store.call(lambda store: store.search(words))
                found = [Chosen(each.info.id, each.hit.message) for each in results]
        except ConversationError as error:
            self._view.refuse(str(error))
            return None
        if len(found) == 1:
            await self.open(found[0])
            return None
        if not found:
            self._view.refuse(f"No earlier chat has the words: {words}")
            return None
        return words

    async def continue_last(self) -> bool:
        """Opens the conversation that was changed last; False where there is none."""
        infos = await self.list()
        if infos:
            await self.open(Chosen(infos[0].id))
        return bool(infos)

    async def rename(self, title: str = "") -> None:
        """Gives the conversation another title; "" begins to write one."""
        tree = self._conversation.tree
        if not self._conversation.turns:
            self._view.refuse("The chat is empty; it gets its title from the first prompt.")
        elif not title:
            self._view.prompt.write(f"/rename {tree.title}")
            self._view.prompt.focus()
        else:
            tree.title = title
            try:
                if self._store is not None:
                    await self._store.call(lambda store: store.rename(tree.conversation, title))
            except ConversationError as error:
                self._view.refuse(str(error))
            else:
                self._view.inform(f"Renamed: {title}")

    async def export(self, file: str = "") -> None:
        """Writes the conversation to `file`; its suffix says in which format, Markdown for none."""
        if not self._conversation.turns:
            self._view.refuse("The chat is empty.")
            return
        tree = self._conversation.tree
        try:
            form = format_of(Path(file))
            path = self._directory / Path(file or file_name(tree.title, form)).expanduser()
            text = await asyncio.to_thread(render, tree, form)
            written = await asyncio.to_thread(write_new, path, text, numbered=not file)
        except AkunuError as error:
            self._view.refuse(str(error))
        else:
            self._view.inform(f"Saved as {written}")

    async def list(self) -> Sequence[ConversationInfo]:
        """The saved conversations, the latest first; none where they cannot be read."""
        if self._store is None:
            return ()
        try:
            return await self._store.call(lambda store: store.list())
        except ConversationError:
            return ()  # `SavingFailed` says why

    async def recall_prompts(self) -> None:
        """Gives the prompt box the prompts of earlier conversations."""
        if self._store is None:
            return
        try:
            prompts = await self._store.call(lambda store: store.recent_prompts(_RECALLED))
        except ConversationError:
            return  # `SavingFailed` says why
        self._view.prompt.remember(prompts)

    async def on_deleted(self, conversation: str) -> None:
        """A saved conversation was deleted; where it is on the screen, it goes, and so does what
        models have read of it."""
        if conversation == self._conversation.tree.conversation:
            await self.new()
        await self._answering.forget(conversation)
        try:
            await asyncio.to_thread(forget_conversation, conversation)
        except AkunuError as error:
            self._view.refuse(str(error))


def _is_id(words: str) -> bool:
    return len(words) >= _ID_DIGITS and not set(words) - set("0123456789abcdef")
