"""What the dialects have in common on the way from a body to a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from akunu_py.decoding.chat_format.effort import Effort, thinking_variables
from akunu_py.serve.errors import RequestError
from akunu_py.serve.service import Service
from akunu_py.types import Message

BETWEEN = "\n\n"  # two parts of a text that a template knows one of


def joined(messages: Iterable[Message]) -> list[Message]:
    """The conversation with neighbours of a role made one turn, as templates expect it. Results of
    tools stay apart, and so do texts of an assistant behind its calls."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        apart = last is None or last.role != message.role or message.role == "tool"
        if last is None or apart or (last.tool_calls and message.content):
            turns.append(message)
            continue
        turns[-1] = replace(
            last,
            content=BETWEEN.join(text for text in (last.content, message.content) if text),
            thinking=BETWEEN.join(text for text in (last.thinking, message.thinking) if text),
            tool_calls=last.tool_calls + message.tool_calls,
        )
    return turns


def effort_variables(service: Service, effort: Effort | None, param: str) -> dict[str, Any]:
    """The chat template's variables for how much to think. Raises RequestError where the model
    cannot be told that."""
    variables = thinking_variables(service.engine.tokens.tokenizer).of(effort)
    if variables is None:
        raise RequestError(
            f"{param}: {service.name} cannot be told {effort!r}; leave it out", param=param
        )
    return variables
