"""Side requests: titles of new conversations, and summaries of older turns.

Titles: the model writes them while it is idle. A title that the user chose stays.

/compact continues on a branch: the summary as its first turn, then copies of the latest turns. If
one answer fills half of the context, the branch has that answer without its middle instead. The
original stays.
"""

import contextlib
import itertools
import re
from collections.abc import Sequence
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
from akunu_py.types import Message

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
    _client: ChatClient
    _store: StoreThread
    _renamed: set[str] = field(default_factory=set)  # conversations that the user named
    _replaced: dict[str, str] = field(default_factory=dict)  # titles to replace, by conversation

    def keep(self, conversation: str) -> None:
        """Never replace the title of a conversation, because the user chose it."""
        self._renamed.add(conversation)

    def on_end(self, conversation: Conversation, turn: ChatTurn) -> None:
        """Request a title after an answer, unless there is one or the model is busy."""
        tree = conversation.tree
        is_answered = turn.is_answered and turn.finish_reason not in (None, "cancelled")
        if (
            self._settings.current.model_titles
            and is_answered
            and not turn.summarizes
            and not self._answering.pending()
            and len(conversation.turns) <= _ATTEMPTS
            and tree.conversation not in self._renamed
            and tree.title == title_of(title_text(tree.messages[0].text))
        ):
            self._replaced[tree.conversation] = tree.title
            job = self._answering.side_job(conversation, TITLE_PROMPT)
            self._client.request_title(tree.conversation, job)

    async def receive(self, message: TitleWritten) -> None:
        """Use a title, unless it is unusable or the user was faster."""
        conversation = message.conversation
        before = self._replaced.pop(conversation, "")
        title = usable_title(message.text)
        if not (before and title) or conversation in self._renamed:
            return
        with contextlib.suppress(ConversationError):  # `SavingFailed` reports the reason.
            retitle = self._store.call(lambda store: store.retitle(conversation, before, title))
            if await retitle and conversation not in self._renamed:
                self._answering.set_title(conversation, title)
                self._view.show_state()


def usable_title(text: str) -> str:
    """Return what the model wrote as a title, "" if it is unusable."""
    words = typeable(text).split()
    is_title = len(words) <= _MAX_WORDS and not _NO_TITLE.search(text)
    return title_of(" ".join(words).rstrip(" .,:;!-")) if is_title else ""


_KEPT = 0.25  # share of the context for copied turns
_SUMMARIZED = 0.75  # share of the context for the turns to summarize
_FULL = 0.85  # share of the context from which on the chat proposes /compact
_CHARACTERS = 4.0  # per token, until an answer has shown the actual ratio
_CUT = "\n\n[... {:,} characters left out ...]\n\n"  # in the middle of a message that is too long
_MAX_ANSWER = 0.5  # share of the context; the middle of a longer answer is left out


@dataclass(eq=False)
class CompactionController:
    """Makes room in the context of the open conversation."""

    _conversation: Conversation
    _answering: AnswerController
    _view: ChatView
    _kept: dict[str, list[ChatTurn]] = field(default_factory=dict)  # to copy, by summary's reply id
    _hinted: set[str] = field(default_factory=set)  # conversations for which it was proposed

    async def compact(self) -> None:
        """Request a summary of older turns, or cut the middle of a long answer."""
        if self._answering.refuse_while_busy():
            return
        turns = [turn for turn in self._conversation.turns if turn.is_answered]
        context = self._answering.context_length
        if not turns or not context:
            why = "The model is not loaded yet." if turns else "There is nothing to summarize yet."
            self._view.show_error(why)
            return
        stats = turns[-1].stats
        tokens = stats.prompt_tokens + stats.generated_tokens if stats else 0
        room = context * (sum(map(_length, turns)) / tokens if tokens else _CHARACTERS)
        longest = max(turns, key=lambda turn: len(turn.answer))
        if len(longest.answer) > room * _MAX_ANSWER:
            self._conversation.shorten(longest, _shortened(longest.answer, int(room * _KEPT)))
            await self._view.transcript.show_branch()
            self._answering.show_status()
            self._view.inform("Cut the middle of the longest answer. ← on it shows all of it.")
            return
        count = _last_that_fit(turns, room * _KEPT)
        older, kept = turns[: len(turns) - count], turns[len(turns) - count :]
        turn = self._conversation.summarize(_messages(older, int(room * _SUMMARIZED)))
        self._kept[turn.reply_id] = kept
        await self._answering.submit(turn)

    def on_end(self, conversation: Conversation, turn: ChatTurn) -> None:
        """Continue after a summary; return to the original if it was stopped or failed."""
        kept = self._kept.pop(turn.reply_id, None)
        if kept is None:
            self._propose(conversation, turn)
            return
        turn.summarizes = ()
        if turn.finish_reason not in (None, "cancelled") and turn.answer.strip():
            turn.stats = None  # Its request filled the context, the next one does not.
            conversation.save(turn)
            conversation.copy_turns(kept)
            self._view.inform("A summary replaced older messages. ← on it shows the original chat.")
        else:
            conversation.remove(turn)
            self._view.show_error("The summary failed or was stopped. The chat is unchanged.")
        if conversation is self._conversation:
            self._view.prompt.app.call_later(self._view.transcript.show_branch)

    def _propose(self, conversation: Conversation, turn: ChatTurn) -> None:
        stats, context = turn.stats, self._answering.context_length
        if stats is None or not context:
            return
        share = (stats.prompt_tokens + stats.generated_tokens) / context
        name = conversation.tree.conversation
        if share >= _FULL and name not in self._hinted:
            self._hinted.add(name)
            self._view.inform(f"The context is {min(share, 1):.0%} full. /compact makes room.")


def _length(turn: ChatTurn) -> int:
    return len(turn.prompt.text) + len(turn.answer)


def _last_that_fit(turns: Sequence[ChatTurn], room: float) -> int:
    """Return how many of the last turns fit `room` characters, never all turns."""
    lengths = itertools.accumulate(map(_length, reversed(turns[1:])))
    return sum(length <= room for length in lengths)


def _messages(turns: Sequence[ChatTurn], room: int) -> list[Message]:
    """Return the messages of turns; shorten the longest to fit `room` characters."""
    lengths = sorted(len(text) for turn in turns for text in (turn.prompt.text, turn.answer))
    left, most = room, lengths[-1]
    for place, length in enumerate(lengths):
        share = left // (len(lengths) - place)
        if length > share:
            most = share
            break
        left -= length
    messages = []
    for turn in turns:
        messages.append(Message("user", _shortened(turn.prompt.text, most)))
        messages.append(Message("assistant", _shortened(turn.answer, most)))
    return messages


def _shortened(text: str, most: int) -> str:
    half = max(0, most - len(_CUT)) // 2
    if len(text) <= most:
        return text
    return text[:half] + _CUT.format(len(text) - 2 * half) + text[len(text) - half :]
