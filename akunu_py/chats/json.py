"""JSON export and import of conversations with all branches.

    {"format": "akunu-conversations", "version": 1, "conversations": [
        {"id", "title", "chosen": [ids], "options": {}, "messages": [
            {"id", "parent", "role", "text", "thinking", "created", "model", "stats",
             "finish_reason", "rounds"}, ...]}, ...]}

`parent` is the id of an earlier message or null; `created` is in seconds since 1970; `chosen` lists
the active message of each set of siblings; `rounds`, if present, has tool calls.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from akunu_py.chats.options import options_of
from akunu_py.chats.tree import (
    ChatMessage,
    ConversationTree,
    Outcome,
    ToolRound,
    ToolUse,
    valid_role,
)
from akunu_py.errors import ConversationError
from akunu_py.files import parse_json
from akunu_py.types import FinishReason, NotCached, Stats, ToolCall

FORMAT = "akunu-conversations"
VERSION = 1

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_TIME = 253402128000.0  # before the year 10000 in every time zone
_MAX_NUMBER = 2**53  # in statistics
_STATS_FIELDS = {field.name for field in fields(Stats)}
_FIELDS = ("id", "parent", "role", "text", "thinking", "created", "model", "stats", "finish_reason")


def as_json(trees: Iterable[ConversationTree]) -> str:
    conversations = [
        {
            "id": tree.conversation,
            "title": tree.title,
            "chosen": tree.active_siblings(),
            **({"options": options} if (options := tree.options.as_dict()) else {}),
            "messages": [
                {name: values[name] for name in _FIELDS}
                | ({"rounds": as_values(message.rounds)} if message.rounds else {})
                for message, values in ((each, asdict(each)) for each in tree.messages)
            ],
        }
        for tree in trees
    ]
    content = {"format": FORMAT, "version": VERSION, "conversations": conversations}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_json(text: str, name: str) -> list[ConversationTree]:
    """Parse the output of `as_json`. Raises ConversationError. name: the source, for errors."""
    where = "expected JSON: "
    try:
        content = parse_json(text)
        where = ""
        _expect(isinstance(content, dict) and content.get("format") == FORMAT, f'"{FORMAT}"', "")
        version = content.get("version")
        _expect(version == VERSION, f"version {VERSION}", version)
        _expect(isinstance(content.get("conversations"), list), "a list of conversations", "")
        return [_read_conversation(each) for each in content["conversations"]]
    except ValueError as error:
        raise ConversationError(
            f"cannot import {name}: {where}{error}; expected a file from `akunu chats export "
            "--format json`"
        ) from error


def as_values(rounds: Iterable[ToolRound]) -> list[dict[str, Any]]:
    """Return the rounds as JSON values for `rounds_of`."""
    return [
        {
            "text": each.text,
            "thinking": each.thinking,
            "calls": [
                asdict(use.call)
                | {"server": use.server, "outcome": use.outcome, "result": use.result}
                for use in each.uses
            ],
        }
        for each in rounds
    ]


def rounds_of(values: Any) -> tuple[ToolRound, ...]:
    """Parse the values of `as_values`. Raises ValueError if they are invalid."""
    _expect(isinstance(values, list), "a list of rounds", values)
    return tuple(map(_round_of, values))


def _round_of(values: Any) -> ToolRound:
    _expect(isinstance(values, dict), "a round", values)
    _expect(isinstance(values.get("calls"), list), "a list of calls", values.get("calls"))
    text, thinking = _texts(values, "text", "thinking")
    return ToolRound(text, tuple(map(_use_of, values["calls"])), thinking)


def _use_of(values: Any) -> ToolUse:
    _expect(isinstance(values, dict), "a tool call", values)
    outcome, names = values.get("outcome"), ("name", "arguments", "id", "server", "result")
    _expect(outcome in get_args(Outcome), "an outcome", outcome)
    name, arguments, call_id, server, result = _texts(values, *names)
    return ToolUse(ToolCall(name, arguments, call_id), server, outcome, result)


def stats_of(values: Any) -> Stats:
    """Parse statistics; ignore unknown fields. Raises ValueError for invalid values."""
    _expect(isinstance(values, dict), "statistics", values)
    known = {name: value for name, value in values.items() if name in _STATS_FIELDS}
    for name, value in known.items():
        if name == "not_cached":
            _expect(value in get_args(NotCached), f"a reason for {name}", value)
        else:
            _expect(_is_number(value, _MAX_NUMBER), f"a number for {name}", value)
    return Stats(**known)


def is_time(value: object) -> bool:
    """Return whether a value is a number of seconds since 1970 with a valid date."""
    return _is_number(value, _MAX_TIME)


def _is_number(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _read_conversation(values: Any) -> ConversationTree:
    _expect(isinstance(values, dict), "a conversation", values)
    conversation = _read_id(values.get("id"))
    title, chosen, listed = (values.get(key) for key in ("title", "chosen", "messages"))
    _expect(isinstance(title, str), "a title", title)
    _expect(isinstance(listed, list), "a list of messages", listed)
    _expect(isinstance(chosen, list), "a list of ids", chosen)
    tree = ConversationTree(conversation, title)
    tree.options = options_of(values.get("options"))
    for message in map(_read_message, listed):
        tree.add(message)
        previous = tree[message.parent].role if message.parent else None
        follows = valid_role(message.role, previous) == message.role
        _expect(follows, f"a message that may follow {previous or 'nothing'}", message.role)
    for message_id in map(_read_id, chosen):
        if message_id in tree:
            tree.activate(message_id)
    return tree


def _read_message(values: Any) -> ChatMessage:
    _expect(isinstance(values, dict), "a message", values)
    role, created, finish = (values.get(key) for key in ("role", "created", "finish_reason"))
    _expect(is_time(created), "a time", created)
    _expect(finish is None or finish in get_args(FinishReason), "a reason", finish)
    text, thinking, model = _texts(values, "text", "thinking", "model")
    parent, stats = values.get("parent"), values.get("stats")
    return ChatMessage(
        role=role,
        text=text,
        parent=None if parent is None else _read_id(parent),
        thinking=thinking,
        model=model,
        created=float(created),
        finish_reason=finish,
        stats=None if stats is None else stats_of(stats),
        id=_read_id(values.get("id")),
        rounds=rounds_of(values.get("rounds", [])),
    )


def _read_id(value: Any) -> str:
    _expect(isinstance(value, str) and ID.fullmatch(value), "an id of letters and digits", value)
    return str(value)


def _texts(values: Mapping[str, Any], *names: str) -> list[str]:
    for name in names:
        _expect(isinstance(values.get(name), str), f"a string for {name}", values.get(name))
    return [values[name] for name in names]


def _expect(holds: object, expected: str, found: object) -> None:
    if not holds:
        shown = repr(found) if len(repr(found)) <= 60 else f"{repr(found)[:57]}..."
        raise ValueError(f"expected {expected}" + (f", found {shown}" if found != "" else ""))
