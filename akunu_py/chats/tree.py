"""A conversation as a tree of messages, some of them with tool calls.

Editing a prompt or regenerating an answer adds a sibling. One of the siblings is active; the active
messages from the root form the active branch.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from akunu_py.chats.options import ChatOptions
from akunu_py.types import FinishReason, Message, Stats, ToolCall

Role = Literal["system", "user", "assistant"]
_FOLLOWS: dict[Role, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user",),
}
Outcome = Literal["waiting", "running", "done", "failed", "denied", "stopped"]


def new_id() -> str:
    """Return a unique id for a message or conversation: 32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call that a model made, and its outcome."""

    call: ToolCall
    server: str = ""  # that has the tool; "" if there is no such tool
    outcome: Outcome = "waiting"
    result: str = ""  # or the error

    @property
    def has_ended(self) -> bool:
        return self.outcome not in ("waiting", "running")

    @property
    def shown_result(self) -> str:
        """The result for the model, or why there is none."""
        if self.outcome in ("done", "failed"):
            return self.result
        if self.outcome == "denied":
            return "The user did not allow this call."
        return "The call was stopped before it had a result."


@dataclass(frozen=True, slots=True)
class ToolRound:
    """The part of an answer up to its next tool calls, and these calls."""

    text: str
    uses: tuple[ToolUse, ...]
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A prompt or an answer. Immutable: a growing answer is replaced as a whole."""

    role: Role
    text: str
    parent: str | None = None  # id of the previous message; None for a first message
    thinking: str = ""
    model: str = ""  # "" for the user's messages
    stats: Stats | None = None
    finish_reason: FinishReason | None = None  # None for prompts and for failed or killed answers
    created: float = field(default_factory=time.time)  # seconds since 1970
    id: str = field(default_factory=new_id)
    rounds: tuple[ToolRound, ...] = ()  # before `text`: the parts that ended with tool calls


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    id: str
    title: str
    created: float  # seconds since 1970
    updated: float  # seconds since 1970
    messages: int
    model: str
    preview: str = ""  # start of the last message


def stopped(tool_round: ToolRound) -> ToolRound:
    """Return the round with its unfinished calls stopped, as after a kill or a cancellation."""
    uses = (use if use.has_ended else replace(use, outcome="stopped") for use in tool_round.uses)
    return replace(tool_round, uses=tuple(uses))


def messages_of(rounds: Iterable[ToolRound], *, thinking: bool = False) -> list[Message]:
    """Return the messages of the rounds for a model. thinking: include the thinking."""
    messages = []
    for each in rounds:
        calls = tuple(use.call for use in each.uses)
        thought = each.thinking if thinking else ""
        messages.append(Message("assistant", each.text, thought, calls))
        messages += [
            Message("tool", use.shown_result, tool_call_id=use.call.id, name=use.call.name)
            for use in each.uses
        ]
    return messages


class ConversationTree:
    """All messages of one conversation, with its active branch. Not thread-safe."""

    def __init__(self, conversation: str | None = None, title: str = "") -> None:
        self.conversation = conversation or new_id()
        self.title = title
        self.options = ChatOptions()
        self._messages: dict[str, ChatMessage] = {}
        self._children: dict[str | None, list[str]] = {None: []}
        self._active: dict[str | None, str] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message: str) -> bool:
        return message in self._messages

    def __getitem__(self, message: str) -> ChatMessage:
        return self._messages[message]

    @property
    def messages(self) -> Sequence[ChatMessage]:
        """All messages of all branches, oldest first: each after its parent."""
        return list(self._messages.values())

    def add(self, message: ChatMessage) -> None:
        """Add and activate a message. Raises ValueError for a known id or an unknown parent."""
        if message.id in self._messages:
            raise ValueError(f"message {message.id} already exists")
        if message.parent is not None and message.parent not in self._messages:
            raise ValueError(f"message {message.id} has an unknown parent: {message.parent}")
        self._messages[message.id] = message
        self._children[message.id] = []
        self._children[message.parent].append(message.id)
        self._active[message.parent] = message.id

    def replace(self, message: ChatMessage) -> None:
        """Replace the message with the same id. Raises ValueError for another parent."""
        if self._messages[message.id].parent != message.parent:
            raise ValueError(f"message {message.id} cannot change its parent")
        self._messages[message.id] = message

    def remove(self, message: str) -> None:
        """Remove a message and all its descendants; activate a sibling if any."""
        parent = self._messages[message].parent
        siblings = self._children[parent]
        index = siblings.index(message)
        siblings.remove(message)
        if self._active[parent] == message:
            del self._active[parent]
            if siblings:
                self._active[parent] = siblings[max(0, index - 1)]
        pending = [message]
        while pending:
            removed = pending.pop()
            pending += self._children.pop(removed)
            del self._messages[removed]
            self._active.pop(removed, None)

    def active_branch(self) -> list[ChatMessage]:
        """Return the active branch, from the first message to the last."""
        path: list[ChatMessage] = []
        message_id = self._active.get(None)
        while message_id is not None:
            path.append(self._messages[message_id])
            message_id = self._active.get(message_id)
        return path

    def siblings(self, message: str) -> Sequence[str]:
        """Return `message` and its siblings, oldest first."""
        return tuple(self._children[self._messages[message].parent])

    def activate_branch(self, message: str) -> None:
        """Activate the branch from the root to `message`."""
        message_id: str | None = message
        while message_id is not None:
            self.activate(message_id)
            message_id = self._messages[message_id].parent

    def activate(self, message: str) -> None:
        """Activate `message` among its siblings, even in an inactive branch."""
        self._active[self._messages[message].parent] = message

    def neighbor(self, message: str, direction: int) -> str | None:
        """Return the previous (-1) or next (1) sibling, if any."""
        siblings = self.siblings(message)
        index = siblings.index(message) + direction
        return siblings[index] if 0 <= index < len(siblings) else None

    def active_siblings(self) -> list[str]:
        """Return the ids of the active messages that have siblings."""
        return [self._active[parent] for parent, each in self._children.items() if len(each) > 1]


def valid_role(role: object, previous: str | None) -> Role:
    """Return `role` if it may follow `previous` (None: at the start), else an allowed role."""
    for each, follows in _FOLLOWS.items():
        if each == role and previous in follows:
            return each
    return "assistant" if previous == "user" else "user"


def title_of(prompt: str, length: int = 80) -> str:
    """Return the first line of `prompt`, truncated at a word, as a conversation title."""
    line = next(filter(None, (" ".join(line.split()) for line in prompt.splitlines())), "")
    if len(line) <= length:
        return line
    cut = line[: length - 1]
    return (cut.rpartition(" ")[0] or cut).rstrip() + "…"


def tree_of(
    conversation: str,
    title: str,
    messages: Iterable[ChatMessage],
    active: Iterable[str] = (),
    options: ChatOptions = ChatOptions(),  # noqa: B008 - immutable
) -> ConversationTree:
    """Build a tree of messages, each after its parent; activate `active` in order."""
    tree = ConversationTree(conversation, title)
    tree.options = options
    for message in messages:
        tree.add(message)
    for message_id in active:
        if message_id in tree:
            tree.activate(message_id)
    return tree
