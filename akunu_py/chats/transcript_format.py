"""Who said what in a conversation, and how it ended, in words for those who read it elsewhere."""

from __future__ import annotations

from akunu_py.chats.tree import ChatMessage, Tree
from akunu_py.types import ENDINGS, Ending


def spoken(tree: Tree) -> list[ChatMessage]:
    """The messages of the active branch in which something was said or thought."""
    return [each for each in tree.path() if each.text.strip() or each.thinking.strip()]


def who(message: ChatMessage) -> str:
    """Who said it."""
    names = {"user": "You", "system": "System", "assistant": message.model or "Assistant"}
    return names[message.role]


def ending_of(message: ChatMessage) -> str:
    """Why an answer is not whole; "" where it is, and for prompts."""
    return (
        ENDINGS.get(message.finish_reason, Ending()).export if message.role == "assistant" else ""
    )
