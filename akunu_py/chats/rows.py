"""Rows of the store's tables as the plain data of `tree`, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from akunu_py.chats.tree import ChatMessage, ConversationInfo
from akunu_py.types import Stats

INFO_COLUMNS = """
number, id, title, created, updated, model,
(SELECT count(*) FROM messages m WHERE m.conversation = c.number AND m.text <> ''),
(SELECT substr(text, 1, 300) FROM messages m WHERE m.conversation = c.number AND m.text <> ''
    ORDER BY m.number DESC LIMIT 1)
"""
MESSAGE_COLUMNS = "id, parent, role, text, thinking, created, model, stats, finish_reason"

_STATS_TYPES = {field.name: (int, float) for field in fields(Stats)}


def info_of(row: tuple[Any, ...]) -> tuple[int, ConversationInfo]:
    """A row of INFO_COLUMNS: the number of the conversation, and what a list shows of it."""
    number, conversation, title, created, updated, model, messages, preview = row
    info = ConversationInfo(conversation, title, created, updated, messages, model, preview or "")
    return number, info


def messages_of(rows: Iterable[tuple[Any, ...]]) -> Iterator[ChatMessage]:
    """Rows of MESSAGE_COLUMNS, oldest first. What follows a message that is not here comes first
    of all."""
    seen: set[str] = set()
    for message_id, parent, role, text, thinking, created, model, stats, finish in rows:
        message = ChatMessage(
            role=role,
            text=text,
            parent=parent,
            thinking=thinking,
            model=model,
            stats=stats_of(json.loads(stats)) if stats else None,
            finish_reason=finish,
            created=created,
            id=message_id,
        )
        seen.add(message_id)
        yield message if parent in seen else replace(message, parent=None)


def values_of(message: ChatMessage) -> tuple[Any, ...]:
    """What is kept of a message, in the order of MESSAGE_COLUMNS."""
    stats = json.dumps(asdict(message.stats)) if message.stats else None
    said = storable(message.text), storable(message.thinking)
    head = message.id, message.parent, message.role
    return (*head, *said, message.created, message.model, stats, message.finish_reason)


def stats_of(values: dict[str, Any]) -> Stats:
    """Statistics from what was kept of them; what this version does not know is left out.

    Raises ValueError where a value is no number.
    """
    known = {name: value for name, value in values.items() if name in _STATS_TYPES}
    for name, value in known.items():
        if isinstance(value, bool) or not isinstance(value, _STATS_TYPES[name]):
            raise ValueError(f"expected a number for {name}, found {value!r}")
    return Stats(**known)


def storable(text: str) -> str:
    """`text` without halves of characters, which no encoder takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
