"""The open conversation: its active branch as turns, whose changes are saved.

Text is stored as the model wrote it; widgets pass it through `text.displayable`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from akunu_py.chats.options import ChatOptions
from akunu_py.chats.tree import (
    ChatMessage,
    ConversationTree,
    ToolRound,
    ToolUse,
    messages_of,
    new_id,
    stopped,
    title_of,
)
from akunu_py.engine.events import Rejected, Span, TextDelta, add_spans, shifted
from akunu_py.tui.prompt.attachments import title_text
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import Constraint, FinishReason, Message, Stats, ToolCall

SUMMARY_PROMPT = (  # of /compact; shown as a prompt, and part of the history
    "Summarize our conversation so far, so that you can continue from the summary alone. Keep "
    "facts, names, numbers, decisions, code that is still needed, and open questions. "
    "Write only the summary."
)
TurnState = Literal["queued", "prefill", "answering", "calling", "done", "failed"]

_turn_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class ChatTurn:
    """A prompt and its answer. Drafting details exist only for answers of this run."""

    prompt: ChatMessage
    answer: str = ""
    thinking: str = ""
    spans: list[Span] = field(default_factory=list)  # accepted draft tokens in `answer`, in order
    rejected: list[Rejected] = field(default_factory=list)  # rejected drafts, by place in `answer`
    branches: list[Rejected] = field(default_factory=list)  # the same of token trees' alternatives
    passes: list[int] = field(default_factory=list)  # tokens per decode step
    speedup: float | None = None  # estimate versus plain decoding; None if unknown
    state: TurnState = "queued"
    finish_reason: FinishReason | None = None  # None until the end, and after a failure or kill
    stats: Stats | None = None
    model: str = ""
    created: float = field(default_factory=time.time)
    reply_id: str = field(default_factory=new_id)
    number: int = field(default_factory=lambda: next(_turn_numbers))  # unique in this process
    request: int = 0  # number of the latest request for the answer, 0 for none
    constraint: Constraint | None = None  # on the answer; not saved, nor used when continuing
    rounds: list[ToolRound] = field(default_factory=list)  # of tool calls, before `answer`
    calling: ToolCall | None = None  # the call that the model is writing
    summarizes: Sequence[Message] = ()  # for /compact: the history, instead of earlier turns

    @classmethod
    def from_messages(cls, prompt: ChatMessage, reply: ChatMessage) -> ChatTurn:
        return cls(
            prompt,
            reply.text,
            reply.thinking,
            state="done",
            finish_reason=reply.finish_reason,
            stats=reply.stats,
            model=reply.model,
            created=reply.created,
            reply_id=reply.id,
            rounds=[stopped(each) for each in reply.rounds],
        )

    @property
    def reply(self) -> ChatMessage:
        """The current answer as a message to save."""
        return ChatMessage(
            "assistant",
            self.answer,
            self.prompt.id,
            self.thinking,
            self.model,
            self.stats,
            self.finish_reason,
            self.created,
            self.reply_id,
            tuple(self.rounds),
        )

    def add(self, delta: TextDelta) -> None:
        offset = len(self.answer)
        self.answer += delta.text
        add_spans(self.spans, delta.drafted, offset)
        self.rejected += shifted(delta.rejected, offset)
        self.branches += shifted(delta.branches, offset)
        self.passes += delta.passes
        self.stats = delta.stats or self.stats
        self.speedup = delta.speedup or self.speedup

    def begin_round(self, uses: Iterable[ToolUse]) -> None:
        """Move the text so far into a round of tool calls."""
        self.rounds.append(ToolRound(self.answer, tuple(uses), self.thinking))
        self.answer, self.thinking, self.calling = "", "", None
        self.spans, self.rejected, self.branches = [], [], []

    @property
    def has_output(self) -> bool:
        return bool(self.answer or self.thinking or self.rounds)

    @property
    def markdown_prefix(self) -> str:
        """What makes the answer a code block if it is JSON, to the end of the text."""
        text = self.answer.strip()
        is_json = self.constraint is not None
        if not is_json and text[:1] in ("{", "[") and text[-1:] in ("}", "]"):
            with contextlib.suppress(ValueError, RecursionError):
                json.loads(text)
                is_json = True
        return "```json\n" if is_json else ""

    @property
    def is_answered(self) -> bool:
        """Whether the turn belongs in the history: it has text or the model ended it."""
        return bool(self.answer or self.rounds) or self.finish_reason == "stop"

    @property
    def can_continue(self) -> bool:
        """Whether the answer was cut off before its end."""
        has_ended = self.state in ("done", "failed")
        return self.has_output and has_ended and self.finish_reason != "stop"


class Conversation:
    """A message tree and its active branch as turns. Every prompt has a reply, empty at first."""

    def __init__(
        self, tree: ConversationTree | None = None, store: StoreThread | None = None
    ) -> None:
        self._any_store = store  # saves every change; None saves nothing
        self.is_elsewhere = False  # also open in another process
        self.open(tree or ConversationTree())

    def open(self, tree: ConversationTree, *, private: bool = False) -> None:
        """Switch to the conversation `tree`; nothing of a private one is saved."""
        self.tree, self.is_private = tree, private
        self._store = None if private else self._any_store
        self._turns: dict[str, ChatTurn] = {}  # by reply id; keeps drafting details per branch
        self.turns: list[ChatTurn] = []
        self._load_branch()

    def __contains__(self, turn: ChatTurn) -> bool:
        return self._turns.get(turn.reply_id) is turn

    def detach(self) -> Conversation:
        """Return a copy that stays the same while `open` replaces this conversation."""
        return copy.copy(self)  # `open` replaces the containers.

    def restore(self, other: Conversation) -> None:
        """Switch to a conversation returned by `detach`."""
        vars(self).update(vars(other))

    def show(self, message: str) -> None:
        """Activate the branch with `message` until the conversation is closed."""
        self.tree.activate_branch(message)
        self._load_branch()

    def history(self, until: ChatTurn, system: str = "") -> list[Message]:
        """Return the messages to answer `until`; an unfinished answer, if any, is last."""
        messages = [Message("system", system)] if system else []
        messages += until.summarizes
        for turn in itertools.takewhile(lambda turn: turn is not until, self.turns):
            if turn.is_answered:
                messages.append(Message("user", turn.prompt.text))
                messages += messages_of(turn.rounds)
                messages.append(Message("assistant", turn.answer))
        messages.append(Message("user", until.prompt.text))
        messages += messages_of(until.rounds, thinking=True)
        if until.answer or until.thinking:
            messages.append(Message("assistant", until.answer, thinking=until.thinking))
        return messages

    def ask(self, text: str) -> ChatTurn:
        if not self.tree.title:
            self.tree.title = title_of(title_text(text))
        parent = self.turns[-1].reply_id if self.turns else None
        return self._add(ChatMessage("user", text, parent))

    def edit(self, turn: ChatTurn, text: str) -> ChatTurn:
        """Replace `turn` by a turn with another prompt; the old turn becomes a branch."""
        del self.turns[self.turns.index(turn) :]
        return self._add(ChatMessage("user", text, turn.prompt.parent))

    def regenerate(self, turn: ChatTurn) -> ChatTurn:
        """Replace `turn` by a turn with the same prompt; the old answer becomes a branch."""
        del self.turns[self.turns.index(turn) :]
        return self._add(turn.prompt)

    def summarize(self, messages: Sequence[Message]) -> ChatTurn:
        """Start a branch with a summary of `messages`; the present branch stays."""
        parent = self.turns[0].prompt.parent
        self.turns.clear()
        turn = self._add(ChatMessage("user", SUMMARY_PROMPT, parent))
        turn.summarizes = messages
        return turn

    def shorten(self, turn: ChatTurn, answer: str) -> None:
        """Replace an answer by a shorter one, on a branch with copies of all later turns."""
        later = self.turns[self.turns.index(turn) + 1 :]
        self._fill(self.regenerate(turn), turn, answer)
        self.copy_turns(later)

    def copy_turns(self, turns: Sequence[ChatTurn]) -> None:
        for turn in turns:
            prompt = replace(turn.prompt, id=new_id(), parent=self.turns[-1].reply_id)
            self._fill(self._add(prompt), turn, turn.answer)

    def _fill(self, copied: ChatTurn, turn: ChatTurn, answer: str) -> None:
        """Copy the answer of a turn, without its statistics."""
        for name in ("thinking", "finish_reason", "model", "created"):
            setattr(copied, name, getattr(turn, name))
        copied.answer, copied.rounds, copied.state = answer, list(turn.rounds), "done"
        if copied.finish_reason == "context":  # There is room again.
            copied.finish_reason = "cancelled"
        self.save(copied)

    def save(self, turn: ChatTurn) -> None:
        self.tree.replace(turn.reply)
        if self._store is not None:
            self._store.save(self.tree.conversation, turn.reply)

    def set_options(self, options: ChatOptions) -> None:
        """Change a conversation's options; an empty chat is saved with its first turn."""
        self.tree.options = options
        if self._store is not None and self.turns:
            self._store.set_options(self.tree.conversation, options)

    def remove(self, turn: ChatTurn) -> ChatMessage:
        """Remove an unanswered turn, reactivate the replaced branch; return the message."""
        alone = len(self.tree.siblings(turn.reply_id)) == 1
        removed = turn.prompt if alone else turn.reply
        self.tree.remove(removed.id)
        if not len(self.tree):
            self.tree.title = ""  # the next prompt names the conversation
        self._load_branch()
        if self._store is not None:
            self._store.remove(self.tree.conversation, removed.id, turn.reply_id)
        return removed

    def switch_branch(self, message: str, direction: int) -> str | None:
        """Activate the previous (-1) or next (1) branch at `message`; return its start, if any."""
        sibling = self.tree.neighbor(message, direction)
        if sibling is not None:
            self.tree.activate(sibling)
            self._load_branch()
            if self._store is not None:
                self._store.activate_branch(self.tree.conversation, sibling)
        return sibling

    def branch_number(self, message: str) -> tuple[int, int]:
        """Return the 1-based index of `message` among its siblings, and their count."""
        siblings = self.tree.siblings(message)
        return siblings.index(message) + 1, len(siblings)

    def _load_branch(self) -> None:
        self.turns = []
        path = [message for message in self.tree.active_branch() if message.role != "system"]
        for prompt, reply in itertools.zip_longest(path[::2], path[1::2]):
            if reply is None:  # missing for the last prompt
                reply = ChatMessage("assistant", "", prompt.id)
                self.tree.add(reply)
            turn = ChatTurn.from_messages(prompt, reply)
            self.turns.append(self._turns.setdefault(reply.id, turn))

    def _add(self, prompt: ChatMessage) -> ChatTurn:
        turn = ChatTurn(prompt)
        if prompt.id not in self.tree:
            self.tree.add(prompt)
        self.tree.add(turn.reply)
        self._turns[turn.reply_id] = turn
        self.turns.append(turn)
        if self._store is not None:
            self._store.save(self.tree.conversation, prompt, self.tree.title)
            if len(self._turns) == 1 and self.tree.options != ChatOptions():
                self._store.set_options(self.tree.conversation, self.tree.options)
        self.save(turn)
        return turn
