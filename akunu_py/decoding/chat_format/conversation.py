"""A conversation as the model reads it: its messages and tools, laid out as its template wants.

Templates differ in what they take: arguments as an object or as text, ids of a certain shape,
several calls in a message or one. What a template does is found out by rendering a short
conversation with it (`abilities`). One that does not show tools gets them as text: a system message
describes them and the format of a call, calls are written in that format, and results are
messages of the user.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

from akunu_py.decoding.chat_format import chat_template
from akunu_py.errors import UnsupportedModel
from akunu_py.types import Message, Tool, ToolCall

_THINKING = re.compile(r"""(?:\.|\[\s*['"]|\(\s*['"])(reasoning_content|thinking|reasoning)\b""")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_KIMI_ID = re.compile(r"functions\..+:\d+")
Notation = Literal["python", "list", "tags"]
_PROBE = Tool(
    "probe_name", "probe", {"type": "object", "properties": {"probe_key": {"type": "string"}}}
)
_PROBE_CALL = ToolCall("probe_name", '{"probe_argument": "probe_value"}', "proberabc")
_PROBED = (
    Message("user", "probe_user"),
    Message("assistant", "", tool_calls=(_PROBE_CALL,)),
    Message("tool", "probe_result", tool_call_id=_PROBE_CALL.id, name=_PROBE.name),
)

_INSTRUCTIONS = """\
# Tools

You can call these functions. Each line describes one, with the JSON Schema of its arguments:

<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments between these tags, and \
nothing after it; write one such block for each call:

<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>

The results come between <tool_response> and </tool_response>. Call a function only where it helps \
to answer."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a chat template does. tools: shows them, calls of them and their results.
    arguments_as_text: takes arguments as JSON text, not as an object. system: shows a system
    message. written: how calls are written into the text of a message by us, "" where the template
    does it. thinking: what it calls the thinking of a message, "" where it shows none."""

    template: str
    tools: bool = False
    arguments_as_text: bool = False
    system: bool = True
    written: Notation | Literal[""] = ""
    thinking: str = ""


_known: WeakKeyDictionary[Any, Abilities] = WeakKeyDictionary()


def abilities(tokenizer: Any) -> Abilities:
    """Found out once for a tokenizer."""
    if tokenizer not in _known:
        _known[tokenizer] = _abilities(tokenizer)
    return _known[tokenizer]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    model: str,
    variables: Mapping[str, Any] = {},
) -> str:
    """The text that the model reads, up to where its answer starts. variables: see `effort`. Raises
    UnsupportedModel."""
    plain = not tools and not any(
        message.tool_calls or message.role == "tool" or message.thinking for message in messages
    )
    if plain:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return chat_template.render(tokenizer, turns, model, variables=variables)
    known = abilities(tokenizer)
    if not known.tools:
        messages, tools = _as_text(messages, tools, known), ()
    try:
        return _render(tokenizer, messages, tools, model, known, variables)
    except UnsupportedModel:
        alone = _one_call_each(messages)
        if alone == list(messages):
            raise
        return _render(tokenizer, alone, tools, model, known, variables)


def _render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    model: str,
    known: Abilities,
    variables: Mapping[str, Any] = {},
) -> str:
    turns, told = _turns(messages, known), [definition(tool) for tool in tools]
    return chat_template.render(tokenizer, turns, model, told, variables)


def definition(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    parameters = {"type": "object", "properties": {}, **tool.parameters}
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": parameters,
        },
    }


def _abilities(tokenizer: Any) -> Abilities:
    if not tokenizer.has_chat_template:
        return Abilities("")
    template = ""
    if not tokenizer.has_own_renderer:
        template = str(tokenizer.get_chat_template(tools=[definition(_PROBE)]))
    named = set(_THINKING.findall(template)) if template else {"reasoning_content"}
    order = ("reasoning_content", "thinking", "reasoning")
    known = Abilities(template, thinking=next((name for name in order if name in named), ""))

    def shows(messages: Sequence[Message], known: Abilities, *texts: str) -> str:
        """What is rendered, "" where one of `texts` is not part of it."""
        try:
            text = _render(tokenizer, messages, [_PROBE], "", known)
        except UnsupportedModel:
            return ""
        return text if all(each in text for each in texts) else ""

    system = bool(shows([Message("system", "probe_system"), _PROBED[0]], known, "probe_system"))
    known = replace(known, system=system)
    if shows(_PROBED[:1], known, _PROBE.name):
        for as_text in (False, True):
            tried = replace(known, tools=True, arguments_as_text=as_text)
            text = shows(_PROBED, tried, "probe_value", "probe_result")
            # As Python writes a dictionary, or as JSON in a string of JSON.
            if text and "'probe_argument'" not in text and '\\"probe_argument' not in text:
                return tried
        tried = replace(known, tools=True, written=_notation(tokenizer))
        if shows(_PROBED, tried, "probe_value", "probe_result"):
            return tried
    return known


def _notation(tokenizer: Any) -> Notation:
    find = tokenizer.backend_tokenizer.token_to_id
    known: dict[str, Notation] = {"<|tool_call_start|>": "python", "<|tool_call|>": "list"}
    return next((known[text] for text in known if find(text) is not None), "tags")


def _written(calls: Sequence[ToolCall], notation: Notation) -> str:
    """Calls as a model writes them whose template does not."""
    if notation == "python":
        listed = (
            f"{call.name}({', '.join(f'{k}={v!r}' for k, v in as_object(call.arguments).items())})"
            for call in calls
        )
        return f"<|tool_call_start|>[{', '.join(listed)}]<|tool_call_end|>"
    objects = [
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}'
        for call in calls
    ]
    if notation == "list":
        return f"<|tool_call|>[{', '.join(objects)}]"
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def _turns(messages: Sequence[Message], known: Abilities) -> list[dict[str, Any]]:
    ids, names = _ids(messages, known.template), _names(messages)
    turns = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        # Harmony cannot hold all three.
        three = message.content and message.tool_calls and known.thinking == "thinking"
        if message.thinking and known.thinking and not three:
            turn[known.thinking] = message.thinking
        if message.tool_calls and known.written:
            calls = _written(message.tool_calls, known.written)
            turn["content"] = f"{message.content}\n{calls}" if message.content else calls
        elif message.tool_calls:
            turn["tool_calls"] = [_call(call, ids, known) for call in message.tool_calls]
        if message.role == "tool":
            turn["tool_call_id"] = ids.get(message.tool_call_id, message.tool_call_id)
            turn["name"] = message.name or names.get(message.tool_call_id, "")
        turns.append(turn)
    return turns


def _call(call: ToolCall, ids: Mapping[str, str], known: Abilities) -> dict[str, Any]:
    arguments = call.arguments if known.arguments_as_text else as_object(call.arguments)
    return {
        "id": ids.get(call.id, call.id),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call. Those that are no JSON object, which a model may have written and
    a client given back, stand in one."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _names(messages: Sequence[Message]) -> dict[str, str]:
    """The names of the tools that were called, by the ids of the calls."""
    return {call.id: call.name for message in messages for call in message.tool_calls}


def _ids(messages: Sequence[Message], template: str) -> dict[str, str]:
    """The ids of calls as the template wants them, by what they are: Mistral's takes those of nine
    letters and digits, Kimi's prints them in place of the names."""
    calls = [call for message in messages for call in message.tool_calls]
    listed = [call.id for call in calls]
    listed += [message.tool_call_id for message in messages if message.tool_call_id]
    if "[TOOL_CALLS]" in template:
        return {each: each if _SHORT_ID.fullmatch(each) else _digest(each) for each in listed}
    if "<|tool_calls_section_begin|>" in template:
        return {
            call.id: call.id if _KIMI_ID.fullmatch(call.id) else f"functions.{call.name}:{index}"
            for index, call in enumerate(calls)
        }
    return {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:9]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The same with one call in a message at most, each before its result."""
    results = {message.tool_call_id: message for message in messages if message.role == "tool"}
    split: list[Message] = []
    placed: set[str] = set()
    for message in messages:
        if len(message.tool_calls) < 2:
            if not (message.role == "tool" and message.tool_call_id in placed):
                split.append(message)
            continue
        for index, call in enumerate(message.tool_calls):
            first = not index
            split.append(
                replace(
                    message,
                    content=message.content if first else "",
                    thinking=message.thinking if first else "",
                    tool_calls=(call,),
                )
            )
            if call.id in results:
                split.append(results[call.id])
                placed.add(call.id)
    return split


def _as_text(messages: Sequence[Message], tools: Sequence[Tool], known: Abilities) -> list[Message]:
    """For a template that shows no tools."""
    written: list[Message] = []
    for message in messages:
        content = message.content
        if message.role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if written and written[-1].role == "user" and _is_result(written[-1].content):
                written[-1] = Message("user", f"{written[-1].content}\n{content}")
            else:
                written.append(Message("user", content))
            continue
        calls = _written(message.tool_calls, "tags")
        content = "\n".join(filter(None, (content, calls)))
        written.append(replace(message, content=content, tool_calls=()))
    if not tools:
        return written
    lines = [json.dumps(definition(tool)["function"], ensure_ascii=False) for tool in tools]
    text = _INSTRUCTIONS.format(tools="\n".join(lines))
    if written[0].role == "system":
        text = f"{written.pop(0).content}\n\n{text}"
    if known.system or not written or written[0].role != "user":
        return [Message("system", text), *written]
    return [replace(written[0], content=f"{text}\n\n{written[0].content}"), *written[1:]]


def _is_result(content: str) -> bool:
    return content.startswith("<tool_response>\n") and content.endswith("\n</tool_response>")
