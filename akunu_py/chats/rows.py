"""Conversion between database rows and objects. Damaged values never raise.

Invalid UTF-8 and roles are replaced; invalid times and statistics are dropped.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar, get_args

from akunu_py.chats.json import as_values, is_time, rounds_of, stats_of
from akunu_py.chats.options import ChatOptions, options_of
from akunu_py.chats.tree import ChatMessage, ConversationInfo, ToolRound, valid_role
from akunu_py.files import parse_json
from akunu_py.types import FinishReason

_Value = TypeVar("_Value")

INFO_COLUMNS = """
number, id, substr(title, 1, 1000), created, updated, substr(model, 1, 1000),
(SELECT count(*) FROM messages m WHERE m.conversation = c.number AND m.text <> ''),
(SELECT substr(text, 1, 300) FROM messages m WHERE m.conversation = c.number AND m.text <> ''
    ORDER BY m.number DESC LIMIT 1)
"""
MESSAGE_COLUMNS = "id, parent, role, text, thinking, created, model, stats, finish_reason, rounds"


def info_of(row: tuple[Any, ...]) -> tuple[int, ConversationInfo]:
    """Convert a row of INFO_COLUMNS to the conversation's row number and info."""
    number, conversation, title, created, updated, model, messages, preview = row
    times = _time(created), _time(updated)
    names = text_of(conversation), text_of(title)
    return number, ConversationInfo(*names, *times, messages, text_of(model), text_of(preview))


def messages_of(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, ChatMessage]]:
    """Convert rows of a number and MESSAGE_COLUMNS, oldest first. Keeps every message."""
    roles: dict[str | None, str | None] = {None: None}
    for number, id, parent, role, text, thinking, created, model, stats, finish, rounds in rows:
        parent = parent if parent in roles else None
        role = roles[id] = valid_role(role, roles[parent])
        message = ChatMessage(
            role=role,
            text=text_of(text),
            parent=parent,
            thinking=text_of(thinking),
            model=text_of(model),
            stats=_parsed(stats, stats_of, None),
            finish_reason=finish if finish in get_args(FinishReason) else None,
            created=_time(created),
            id=id,
            rounds=_parsed(rounds, rounds_of, ()),
        )
        yield number, message


def values_of(message: ChatMessage) -> tuple[Any, ...]:
    """Return the values of MESSAGE_COLUMNS for a message."""
    stats = json.dumps(asdict(message.stats)) if message.stats else None
    texts = storable(message.text), storable(message.thinking)
    head = message.id, message.parent, message.role
    model = storable(message.model)
    rounds = json.dumps(as_values(message.rounds)) if message.rounds else None
    return (*head, *texts, message.created, model, stats, message.finish_reason, rounds)


def options_in(value: object) -> ChatOptions:
    """Return the options in a column value; the defaults if it is damaged."""
    return _parsed(value, options_of, ChatOptions())


def options_text(options: ChatOptions) -> str | None:
    """Return the column value for options; None for the defaults."""
    values = options.as_dict()
    return json.dumps(values) if values else None


def text_of(value: object) -> str:
    """Return a column value as text ("" for NULL)."""
    if isinstance(value, bytes):
        return decode(value)
    return "" if value is None else str(value)


def all_text(text: object, rounds: object) -> str:
    """Return a message's text, including the text before its tool calls."""
    before: tuple[ToolRound, ...] = _parsed(rounds, rounds_of, ())
    return "\n".join(filter(None, [*(each.text for each in before), text_of(text)]))


def decode(data: bytes) -> str:
    """Decode text for `sqlite3.Connection.text_factory`."""
    return data.decode("utf-8", "replace")


def storable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _time(value: object) -> float:
    """Return seconds since 1970 (0: unknown)."""
    return float(value) if is_time(value) else 0.0  # type: ignore[arg-type]


def _parsed(value: object, parse: Callable[[Any], _Value], default: _Value) -> _Value:
    """Parse the JSON in a column value; return `default` if it is damaged or NULL."""
    try:
        return parse(parse_json(text_of(value)))
    except ValueError:
        return default
