"""Titles of new conversations: the model writes them while it is idle, after the first answers.

A title that the user chose stays. The title from the first prompt stays if the model's is unusable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from akunu_py.chats.tree import title_of
from akunu_py.errors import ConversationError
from akunu_py.text import typeable
from akunu_py.tui.controllers.answering import AnswerController
from akunu_py.tui.open_conversation import ChatTurn, Conversation
from akunu_py.tui.prompt.attachments import title_text
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.screens.settings_form import SettingsController
from akunu_py.tui.workers.chat_client import ChatClient, TitleWritten
from akunu_py.tui.workers.store_thread import StoreThread

TITLE_PROMPT = (
    "Give this conversation a short title of three to six words, in its language. Reply only with "
    "the title, without quotes."
)
_MAX_WORDS = 8
# Small models answer the user or repeat the request instead.
_NO_TITLE = re.compile(
    r"^\s*(i|i['’]\w+|here|here['’]s|sure|certainly|okay|title)\b(?!['’])"
    r"|\btitle (of|for)\b|\bthis conversation\b",
    re.IGNORECASE,
)
_ATTEMPTS = 3  # first answers after each of which the model may write a title


@dataclass(eq=False)
class TitleController:
    """Requests titles, and stores those that still fit."""

    _answering: AnswerController
    _view: ChatView
    _settings: SettingsController
    _client: ChatClient | None  # None: no model answers
    _store: StoreThread | None  # None: nothing is saved
    _renamed: set[str] = field(default_factory=set)  # conversations that the user named
    _replaced: dict[str, str] = field(default_factory=dict)  # titles to replace, by conversation

    def keep(self, conversation: str) -> None:
        """Never replace the title of a conversation, because the user chose it."""
        self._renamed.add(conversation)

    def on_end(self, conversation: Conversation, turn: ChatTurn) -> None:
        """Request a title after an answer, unless the conversation has one or the model is busy."""
        tree = conversation.tree
        is_answered = turn.is_answered and turn.finish_reason in ("stop", "length", "context")
        if (
            self._client is not None
            and self._settings.current.model_titles
            and is_answered
            and not turn.summarizes
            and not self._answering.has_pending
            and len(conversation.turns) <= _ATTEMPTS
            and tree.conversation not in self._renamed
            and tree.title == title_of(title_text(tree.messages[0].text))
        ):
            self._replaced[tree.conversation] = tree.title
            request = self._answering.side_request(conversation, TITLE_PROMPT)
            self._client.request_title(tree.conversation, *request)

    async def receive(self, message: TitleWritten) -> None:
        """Use a title, unless it is unusable or the user was faster."""
        conversation = message.conversation
        before = self._replaced.pop(conversation, "")
        title = usable_title(message.text)
        if not (before and title) or conversation in self._renamed:
            return
        if self._store is not None:
            try:
                if not await self._store.call(
                    lambda store: store.retitle(conversation, before, title)
                ):
                    return
            except ConversationError:
                return  # `SavingFailed` reports the reason.
        if conversation not in self._renamed:
            self._answering.set_title(conversation, title)
            self._view.show_state()


def usable_title(text: str) -> str:
    """Return what the model wrote as a title, "" if it is unusable."""
    words = typeable(text).split()
    is_title = len(words) <= _MAX_WORDS and not _NO_TITLE.search(text)
    return title_of(" ".join(words).rstrip(" .,:;!-")) if is_title else ""
