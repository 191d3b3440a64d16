"""Rows of the database as objects, whatever a damaged file has in their columns.

A text that is no UTF-8 is shown with what can be read of it, a time or statistics that cannot be
are missing, and a message without a good id or role gets one. Nothing here raises.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, get_args

from akunu_py.chats.json import ID, is_time, stats_of
from akunu_py.chats.tree import ChatMessage, ConversationInfo, fitting_role
from akunu_py.files import parse_json
from akunu_py.types import FinishReason, Stats

INFO_COLUMNS = """
number, id, substr(title, 1, 1000), created, updated, substr(model, 1, 1000),
(SELECT count(*) FROM messages m WHERE m.conversation = c.number AND m.text <> ''),
(SELECT substr(text, 1, 300) FROM messages m WHERE m.conversation = c.number AND m.text <> ''
    ORDER BY m.number DESC LIMIT 1)
"""
MESSAGE_COLUMNS = "id, parent, role, text, thinking, created, model, stats, finish_reason"
_MADE_UP = "damaged-"  # begins the ids of rows that have none


def info_of(row: tuple[Any, ...]) -> tuple[int, ConversationInfo]:
    """A row of INFO_COLUMNS: the number of the conversation, and what a list shows of it."""
    number, conversation, title, created, updated, model, messages, preview = row
    times = _time(created), _time(updated)
    names = id_of(number, conversation), text_of(title)
    return number, ConversationInfo(*names, *times, messages, text_of(model), text_of(preview))


def messages_of(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, ChatMessage]]:
    """Rows of a number and MESSAGE_COLUMNS, oldest first, each with its number. A message whose
    parent is not here gets none."""
    roles: dict[str | None, str | None] = {None: None}
    ids: dict[Any, str] = {}  # by what is written
    for number, written, parent, role, text, thinking, created, model, stats, finish in rows:
        message_id = id_of(number, written)
        if message_id in roles:
            message_id = f"{_MADE_UP}{number}"
        parent = ids.get(parent)
        role = fitting_role(role, roles[parent])
        ids.setdefault(written, message_id)
        ids.setdefault(message_id, message_id)
        roles[message_id] = role
        yield (
            number,
            ChatMessage(
                role=role,
                text=text_of(text),
                parent=parent,
                thinking=text_of(thinking),
                model=text_of(model),
                stats=_stats(stats),
                finish_reason=finish if finish in get_args(FinishReason) else None,
                created=_time(created),
                id=message_id,
            ),
        )


def values_of(message: ChatMessage) -> tuple[Any, ...]:
    """A message as the values of MESSAGE_COLUMNS."""
    stats = json.dumps(asdict(message.stats)) if message.stats else None
    texts = storable(message.text), storable(message.thinking)
    head = message.id, message.parent, message.role
    model = storable(message.model)
    return (*head, *texts, message.created, model, stats, message.finish_reason)


def number_of(name: str) -> int | None:
    """The number of a row that got `name` because it had no good id; None for other names."""
    digits = name.removeprefix(_MADE_UP)
    is_made_up = digits != name and len(digits) < 19 and digits.isascii() and digits.isdigit()
    return int(digits) if is_made_up else None


def text_of(value: object) -> str:
    """What a column of text holds, "" for nothing."""
    if isinstance(value, bytes):
        return decode(value)
    return "" if value is None else str(value)


def decode(data: bytes) -> str:
    """For `sqlite3.Connection.text_factory`."""
    return data.decode("utf-8", "replace")


def storable(text: str) -> str:
    """`text` without lone surrogates, which no encoder takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def id_of(number: int, value: object) -> str:
    """The id of a row; made up of its number where what is written is none."""
    return value if isinstance(value, str) and ID.fullmatch(value) else f"{_MADE_UP}{number}"


def _time(value: object) -> float:
    """Seconds since 1970, 0 where that is not known."""
    return float(value) if is_time(value) else 0.0  # type: ignore[arg-type]


def _stats(value: object) -> Stats | None:
    try:
        values = parse_json(text_of(value))
        return stats_of(values) if isinstance(values, dict) else None
    except ValueError:
        return None
