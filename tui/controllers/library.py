"""Operations on whole conversations: new, open, resume, rename, export."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.chats.export import export
from akunu_py.chats.tree import ConversationInfo, ConversationTree
from akunu_py.engine.histories.prompt_cache_store import forget_conversation
from akunu_py.errors import ConversationError
from akunu_py.tui.controllers.answering import AnswerController
from akunu_py.tui.controllers.turns import TurnController
from akunu_py.tui.open_conversation import SUMMARY_PROMPT, Conversation
from akunu_py.tui.screens.conversation_list import ChosenConversation
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.status import report_errors
from akunu_py.tui.workers.store_thread import StoreThread

_ID_DIGITS = 6  # minimum length of an id prefix
_OPEN_ELSEWHERE = (
    "Another akunu has this chat open. What you send here becomes a branch; F9 continues a copy of "
    "the last answer."
)
_MAX_PROMPTS = 500  # earlier prompts in the prompt box


@dataclass(frozen=True, slots=True)
class Resume:
    """The chat to open at the start; the list opens if several match or none is named."""

    words: str = ""  # search words, or the start of an id
    last: bool = False  # the most recent conversation


@dataclass(eq=False)
class LibraryController:
    """Replaces the open conversation, and changes saved ones."""

    _conversation: Conversation
    _answering: AnswerController
    _turns: TurnController
    _view: ChatView
    _store: StoreThread
    _directory: Path  # for exported files

    async def new(self, *, private: bool = False) -> None:
        """Open an empty conversation; nothing of a private one is saved."""
        await self.show(ConversationTree(), private=private)
        if private:
            self._view.inform("Nothing of this chat is saved. Ctrl+N starts one that is.")

    async def open(self, chosen: ChosenConversation | None) -> None:
        """Open a saved conversation; None changes nothing. Pending answers continue."""
        if chosen is None:
            return
        wanted, message = chosen.conversation, chosen.message
        if wanted != self._conversation.tree.conversation:
            if wanted not in self._answering.background:
                try:
                    tree = await self._store.call(lambda store: store.load(wanted))
                except ConversationError as error:
                    self._view.show_error(str(error))
                    return
            await self._answering.move_to_background()
            if not self._answering.reopen(wanted):
                self._conversation.open(tree)
        here = self._conversation
        if message is not None and message in here.tree and not self._answering.is_busy:
            here.show(message)
        await self._show(message)

    async def show(self, tree: ConversationTree, *, private: bool = False) -> None:
        """Open `tree`, which has no pending answers, at its end."""
        await self._answering.move_to_background()
        self._conversation.open(tree, private=private)
        await self._show()

    async def _show(self, message: str | None = None) -> None:
        self._turns.stop_editing()
        await self._view.show_conversation(message)
        self._answering.show_status()
        self._view.prompt.focus()
        self._view.show_state()
        await self.claim()

    async def claim(self) -> None:
        """Mark the conversation as open here, and note if another process has it open."""
        here, names = self._conversation, set(self._answering.background)
        name, here.is_elsewhere = here.tree.conversation, False
        with contextlib.suppress(ConversationError):  # `SavingFailed` reports the reason.
            elsewhere = await self._store.call(lambda store: store.hold({name, *names}))
            here.is_elsewhere = name in elsewhere
        if here.is_elsewhere:
            await self._view.add_notice(_OPEN_ELSEWHERE)

    async def resume(self, wanted: Resume) -> str | None:
        """Open the wanted conversation. Return search words if the user must choose."""
        if wanted.last:
            if not await self.continue_last():
                self._view.show_error("There is no earlier chat to continue.")
            return None
        if not wanted.words:
            return ""
        words = wanted.words
        found: list[ChosenConversation] = []
        with report_errors(self._view.show_error):
            if len(words) >= _ID_DIGITS:
                infos = await self._store.call(lambda store: store.list())
                found = [ChosenConversation(info.id) for info in infos if info.id.startswith(words)]
            if not found:
                results = await self._store.call(lambda store: store.search(words))
                found = [ChosenConversation(each.info.id, each.hit.message) for each in results]
            if len(found) == 1:
                await self.open(found[0])
            elif not found:
                self._view.show_error(f"No earlier chat matches: {words}")
        return words if len(found) > 1 else None

    async def continue_last(self) -> bool:
        """Open the most recent conversation. Return False if there is none."""
        infos = await self.list()
        if infos:
            await self.open(ChosenConversation(infos[0].id))
        return bool(infos)

    async def rename(self, title: str = "") -> None:
        """Rename the conversation; "" puts the command into the prompt box."""
        tree = self._conversation.tree
        if not self._conversation.turns:
            self._view.show_error("The chat is empty; its title comes from the first prompt.")
        elif not title:
            self._view.prompt.write(f"/rename {tree.title}")
            self._view.prompt.focus()
        else:
            tree.title = title
            with report_errors(self._view.show_error):
                if not self._conversation.is_private:
                    await self._store.call(lambda store: store.rename(tree.conversation, title))
                self._view.inform(f"Renamed: {title}")

    async def export(self, file: str = "") -> None:
        if not self._conversation.turns:
            self._view.show_error("The chat is empty.")
            return
        tree = self._conversation.tree
        with report_errors(self._view.show_error):
            written = await asyncio.to_thread(export, tree, self._directory, file)
            self._view.inform(f"Saved as {written}")

    async def list(self) -> Sequence[ConversationInfo]:
        """Return the saved conversations, newest first; none if they cannot be read."""
        with contextlib.suppress(ConversationError):  # `SavingFailed` reports the reason.
            return await self._store.call(lambda store: store.list())
        return ()

    async def load_earlier_prompts(self) -> None:
        with contextlib.suppress(ConversationError):  # `SavingFailed` reports the reason.
            prompts = await self._store.call(lambda store: store.recent_prompts(_MAX_PROMPTS))
            prompts = [prompt for prompt in prompts if prompt != SUMMARY_PROMPT]
            self._view.prompt.extend_history(prompts)

    async def on_deleted(self, conversation: str) -> None:
        """Close a deleted conversation if it is open, and delete its prompt caches."""
        if conversation == self._conversation.tree.conversation:
            await self.new()
        await self._answering.close(conversation)
        with report_errors(self._view.show_error):
            await asyncio.to_thread(forget_conversation, conversation)
