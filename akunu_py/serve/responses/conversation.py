"""From the input of a request to a conversation."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from akunu_py.serve.errors import RequestError
from akunu_py.serve.responses.bodies import (
    CustomToolCallItem,
    FunctionCallItem,
    InputItem,
    MessageItem,
    OtherPart,
    OutputItem,
    ReasoningItem,
    RefusalPart,
    ResponsesBody,
    TextPart,
)
from akunu_py.serve.responses.tools import as_arguments, known_name
from akunu_py.serve.turns import joined
from akunu_py.types import Message, ToolCall

_SEAL = "akunu."  # in front of thinking that a client carries for us without reading it


def messages_of(body: ResponsesBody) -> list[Message]:
    """Raises RequestError, which names the item that no model here can read."""
    found = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, Message("user", body.input)]
    names: dict[str, str] = {}  # of tools, by the id of the call
    found += [_message(item, f"input.{number}", names) for number, item in enumerate(body.input)]
    turns = joined(found)
    if not any(turn.role != "system" for turn in turns):
        raise RequestError("input: there is nothing to answer", param="input")
    return turns


def _message(item: InputItem, place: str, names: dict[str, str]) -> Message:
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        return Message(role, _text(item.content, f"{place}.content"))
    if isinstance(item, FunctionCallItem | CustomToolCallItem):
        name = names[item.call_id] = known_name(item.name, item.namespace)
        if isinstance(item, FunctionCallItem):
            arguments = item.arguments
        else:
            arguments = as_arguments(item.input)
        return Message("assistant", "", tool_calls=(ToolCall(name, arguments, item.call_id),))
    if isinstance(item, OutputItem):
        text = _text(item.output, f"{place}.output")
        return Message("tool", text, tool_call_id=item.call_id, name=names.get(item.call_id, ""))
    if isinstance(item, ReasoningItem):
        return Message("assistant", "", thinking=_thinking(item))
    if item.type == "item_reference":
        message = f"{place}: responses are not kept here, so send the whole item"
        raise RequestError(message, param=place)
    message = f"{place}: items of the type {item.type[:100]} are not supported"
    raise RequestError(message, param=f"{place}.type")


def _text(content: str | Sequence[TextPart | RefusalPart | OtherPart], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, OtherPart):
            where = f"{place}.{number}"
            message = f"{where}: {part.type[:100]} is not supported, only text is"
            raise RequestError(message, param=where)
        texts.append(part.text if isinstance(part, TextPart) else part.refusal)
    return "\n\n".join(text for text in texts if text)


def _thinking(item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    return unsealed(item.encrypted_content or "")


def sealed(thinking: str) -> str:
    """Thinking as clients carry it from one request to the next."""
    return _SEAL + base64.b64encode(thinking.encode()).decode()


def unsealed(text: str) -> str:
    """The thinking; none where another server sealed it."""
    if not text.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(text[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
