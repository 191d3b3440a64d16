"""A conversation as a tree of messages, as plain data.

Editing a prompt or regenerating an answer adds a sibling; the old branch stays. Of the siblings at
one place one is active, and the active ones from the root on are the conversation that is read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from akunu_py.types import FinishReason, Stats

Role = Literal["system", "user", "assistant"]
_FOLLOWS: dict[Role, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user",),
}


def new_id() -> str:
    """A unique id for a message or a conversation: 32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A prompt or an answer; `dataclasses.replace` makes the next state of an answer.

    parent: the id of the message it follows, None for a first one.
    created: seconds since 1970. model: what answered, "" for the user's messages.
    finish_reason: why an answer ended; None for prompts, and for answers that failed or whose
    program was killed.
    """

    role: Role
    text: str
    parent: str | None = None
    thinking: str = ""
    model: str = ""
    stats: Stats | None = None
    finish_reason: FinishReason | None = None
    created: float = field(default_factory=time.time)
    id: str = field(default_factory=new_id)


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """What a list shows of a conversation. created, updated: seconds since 1970. preview: the
    beginning of its last message."""

    id: str
    title: str
    created: float
    updated: float
    messages: int
    model: str
    preview: str = ""


class Tree:
    """All messages of one conversation, and which branch is active. In one thread only."""

    def __init__(self, conversation: str | None = None, title: str = "") -> None:
        self.conversation = conversation or new_id()
        self.title = title
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
        """All messages of all branches, oldest first: each after the one it follows."""
        return list(self._messages.values())

    def add(self, message: ChatMessage) -> None:
        """Adds a message, which becomes the active one of its siblings.

        Raises ValueError where its parent is not here, or it is here already.
        """
        if message.id in self._messages:
            raise ValueError(f"message {message.id} is here already")
        if message.parent is not None and message.parent not in self._messages:
            raise ValueError(f"message {message.id} follows an unknown one: {message.parent}")
        self._messages[message.id] = message
        self._children[message.id] = []
        self._children[message.parent].append(message.id)
        self._active[message.parent] = message.id

    def replace(self, message: ChatMessage) -> None:
        """Replaces a message by its new state."""
        if self._messages[message.id].parent != message.parent:
            raise ValueError(f"message {message.id} cannot move to another place")
        self._messages[message.id] = message

    def remove(self, message: str) -> None:
        """Removes a message and all its descendants; a sibling becomes active."""
        parent = self._messages[message].parent
        siblings = self._children[parent]
        place = siblings.index(message)
        siblings.remove(message)
        if self._active[parent] == message:
            del self._active[parent]
            if siblings:
                self._active[parent] = siblings[max(0, place - 1)]
        pending = [message]
        while pending:
            removed = pending.pop()
            pending += self._children.pop(removed)
            del self._messages[removed]
            self._active.pop(removed, None)

    def path(self) -> list[ChatMessage]:
        """The active branch, from the first message to the last."""
        path: list[ChatMessage] = []
        following = self._active.get(None)
        while following is not None:
            path.append(self._messages[following])
            following = self._active.get(following)
        return path

    def siblings(self, message: str) -> Sequence[str]:
        """The siblings of `message`, itself among them, oldest first."""
        return tuple(self._children[self._messages[message].parent])

    def choose(self, message: str) -> None:
        """Makes the branch that leads to `message` the active one."""
        following: str | None = message
        while following is not None:
            self.activate(following)
            following = self._messages[following].parent

    def activate(self, message: str) -> None:
        """Makes `message` the active one of its siblings, whether its branch is active or not."""
        self._active[self._messages[message].parent] = message

    def neighbour(self, message: str, direction: int) -> str | None:
        """The sibling before (-1) or after (1) `message`; None where there is no more."""
        siblings = self.siblings(message)
        place = siblings.index(message) + direction
        return siblings[place] if 0 <= place < len(siblings) else None

    def chosen(self) -> list[str]:
        """The active messages of all places that have branches."""
        return [self._active[at] for at, here in self._children.items() if len(here) > 1]


def fitting_role(role: object, previous: str | None) -> Role:
    """`role` where it is one that may follow a message of the role `previous`, else another that
    may; None stands before the first message."""
    for each, follows in _FOLLOWS.items():
        if each == role and previous in follows:
            return each
    return "assistant" if previous == "user" else "user"


def title_of(prompt: str, length: int = 80) -> str:
    """A title for a conversation that begins with `prompt`: its first line, cut at a word."""
    line = next((line.strip() for line in prompt.splitlines() if line.strip()), "")
    line = " ".join(line.split())
    if len(line) <= length:
        return line
    cut = line[: length - 1]
    return (cut.rpartition(" ")[0] or cut).rstrip() + "…"


def tree_of(
    conversation: str, title: str, messages: Iterable[ChatMessage], chosen: Iterable[str] = ()
) -> Tree:
    """A tree of messages, each after its parent; `chosen` are activated in their order."""
    tree = Tree(conversation, title)
    for message in messages:
        tree.add(message)
    for message_id in chosen:
        if message_id in tree:
            tree.activate(message_id)
    return tree
