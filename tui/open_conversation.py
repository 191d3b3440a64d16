"""The conversation on the screen: the active branch of its tree, as turns; changes are saved.

Text stays as the model wrote it; `text.displayable` is for those who show it.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from akunu_py.chats.tree import ChatMessage, Tree, new_id, title_of
from akunu_py.tui.workers.session_thread import Rejected, Span, add_spans
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import Constraint, FinishReason, Message, Stats

TurnState = Literal["waiting", "reading", "answering", "done", "failed"]

_numbers = itertools.count(1)


@dataclass(slots=True)
class ChatTurn:
    """A prompt and its answer.

    spans: half-open ranges into `answer` that were accepted draft tokens, in order. rejected: text
    of rejected drafts, each with the place in `answer` where it was proposed. passes: tokens that
    each pass yielded. These three are of answers made since the program started.
    finish: None until the answer ended, and for an answer that failed or was cut off by a kill.
    speedup: times faster than plain decoding, the planner's estimate; None where it has none.
    number: tells turns apart. request: of the last request for its answer; 0 where there was none.
    constraint: what the answer must match; not saved, and not for what continues it.
    """

    prompt: ChatMessage
    answer: str = ""
    thinking: str = ""
    spans: list[Span] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    speedup: float | None = None
    state: TurnState = "waiting"
    finish: FinishReason | None = None
    stats: Stats | None = None
    model: str = ""
    created: float = field(default_factory=time.time)
    reply_id: str = field(default_factory=new_id)
    number: int = field(default_factory=lambda: next(_numbers))
    request: int = 0
    constraint: Constraint | None = None

    @classmethod
    def from_messages(cls, prompt: ChatMessage, reply: ChatMessage) -> ChatTurn:
        """The turn that two messages of a tree make."""
        return cls(
            prompt,
            reply.text,
            reply.thinking,
            state="done",
            finish=reply.finish_reason,
            stats=reply.stats,
            model=reply.model,
            created=reply.created,
            reply_id=reply.id,
        )

    @property
    def reply(self) -> ChatMessage:
        """The answer as it is now, to be saved."""
        return ChatMessage(
            "assistant",
            self.answer,
            self.prompt.id,
            self.thinking,
            self.model,
            self.stats,
            self.finish,
            self.created,
            self.reply_id,
        )

    def add(
        self, text: str, drafted: tuple[Span, ...] = (), rejected: tuple[Rejected, ...] = ()
    ) -> None:
        """Appends a piece of the answer; `drafted` and `rejected` are places in `text`."""
        offset = len(self.answer)
        self.answer += text
        add_spans(self.spans, drafted, offset)
        self.rejected += [(offset + place, what) for place, what in rejected]

    @property
    def answered(self) -> bool:
        """Whether it belongs to the history: it has text, or the model ended it without any."""
        return bool(self.answer) or self.finish == "stop"

    @property
    def can_continue(self) -> bool:
        """Whether it is an answer that was cut off in the middle."""
        return bool(self.answer) and self.state in ("done", "failed") and self.finish != "stop"


class Conversation:
    """A tree of messages, and the turns of its active branch.

    Every prompt has a reply in the tree from the beginning, empty at first, so that the next
    prompt, which may wait, has something to follow. store: where every change is saved; None saves
    nothing.
    """

    def __init__(self, tree: Tree | None = None, store: StoreThread | None = None) -> None:
        self._store = store
        self.open(tree or Tree())

    def open(self, tree: Tree) -> None:
        """Makes this the conversation of `tree`."""
        self.tree = tree
        self._turns: dict[
            str, ChatTurn
        ] = {}  # by reply, of all branches seen: they have the drafting
        self.turns: list[ChatTurn] = []
        self._read_branch()

    def __contains__(self, turn: ChatTurn) -> bool:
        return self._turns.get(turn.reply_id) is turn

    def set_aside(self) -> Conversation:
        """What is open, as a conversation of its own, before another one is opened here."""
        return copy.copy(self)  # `open` makes new containers and leaves these

    def bring_back(self, other: Conversation) -> None:
        """Makes this the conversation that was set aside."""
        self.tree, self.turns, self._turns = other.tree, other.turns, other._turns

    def show(self, message: str) -> None:
        """Makes a branch with that message the active one, as long as the conversation is open."""
        self.tree.choose(message)
        self._read_branch()

    def history(self, until: ChatTurn, system: str = "") -> list[Message]:
        """What the model reads to answer `until`: all answered turns before it, and its prompt;
        at the end what there is of its answer, if it is to continue."""
        messages = [Message("system", system)] if system else []
        for turn in itertools.takewhile(lambda turn: turn is not until, self.turns):
            if turn.answered:
                messages.append(Message("user", turn.prompt.text))
                messages.append(Message("assistant", turn.answer))
        messages.append(Message("user", until.prompt.text))
        return [*messages, Message("assistant", until.answer)] if until.answer else messages

    def ask(self, text: str) -> ChatTurn:
        """A new turn at the end."""
        if not self.tree.title:
            self.tree.title = title_of(text)
        parent = self.turns[-1].reply_id if self.turns else None
        return self._add(ChatMessage("user", text, parent))

    def edit(self, turn: ChatTurn, text: str) -> ChatTurn:
        """A turn with another prompt in the place of `turn`, which becomes a branch."""
        del self.turns[self.turns.index(turn) :]
        return self._add(ChatMessage("user", text, turn.prompt.parent))

    def regenerate(self, turn: ChatTurn) -> ChatTurn:
        """A turn with the same prompt in the place of `turn`, whose answer becomes a branch."""
        del self.turns[self.turns.index(turn) :]
        return self._add(turn.prompt)

    def save(self, turn: ChatTurn) -> None:
        """Saves the answer of a turn as it is now."""
        self.tree.replace(turn.reply)
        if self._store is not None:
            self._store.save(self.tree.conversation, turn.reply)

    def remove(self, turn: ChatTurn) -> ChatMessage:
        """Removes a turn that got no answer; the branch that it replaced is active again.

        Returns the message that was removed from the tree: the prompt, or only the reply where the
        prompt has others.
        """
        alone = len(self.tree.siblings(turn.reply_id)) == 1
        removed = turn.prompt if alone else turn.reply
        self.tree.remove(removed.id)
        self._read_branch()
        if self._store is not None:
            self._store.remove(self.tree.conversation, removed.id)
        return removed

    def switch_branch(self, message: str, direction: int) -> str | None:
        """Makes the branch before (-1) or after (1) that of `message` the active one; returns the
        sibling that it begins with, None where there is no more."""
        sibling = self.tree.neighbour(message, direction)
        if sibling is not None:
            self.tree.activate(sibling)
            self._read_branch()
            if self._store is not None:
                self._store.choose(self.tree.conversation, sibling)
        return sibling

    def branch_number(self, message: str) -> tuple[int, int]:
        """(which, of how many) `message` is among its siblings, from 1."""
        siblings = self.tree.siblings(message)
        return siblings.index(message) + 1, len(siblings)

    def _read_branch(self) -> None:
        """Makes `turns` the active branch of the tree."""
        self.turns = [
            self._turns.setdefault(reply.id, ChatTurn.from_messages(prompt, reply))
            for prompt, reply in self._pairs()
        ]

    def _pairs(self) -> Iterator[tuple[ChatMessage, ChatMessage]]:
        """The prompts of the active branch, each with its reply. An imported conversation may lack
        the last reply."""
        path = [message for message in self.tree.path() if message.role != "system"]
        for prompt, reply in itertools.zip_longest(path[::2], path[1::2]):
            if reply is None:
                reply = ChatMessage("assistant", "", prompt.id)
                self.tree.add(reply)
            yield prompt, reply

    def _add(self, prompt: ChatMessage) -> ChatTurn:
        turn = ChatTurn(prompt)
        if prompt.id not in self.tree:
            self.tree.add(prompt)
        self.tree.add(turn.reply)
        self._turns[turn.reply_id] = turn
        self.turns.append(turn)
        if self._store is not None:
            self._store.save(self.tree.conversation, prompt, self.tree.title)
        self.save(turn)
        return turn
