"""Render conversations with tools by the model's chat template.

Templates differ in the arguments, ids and number of calls that they accept; `template_features`
renders a short conversation to find out. If a template does not show tools, a system message
describes tools and the format of calls, calls are text, and results are user messages.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from akunu_py.engine.template import chat_template
from akunu_py.engine.text import thinking
from akunu_py.engine.tools.formats import FORMATS, HARMONY, HERMES, UNKNOWN, ToolFormat
from akunu_py.errors import UnsupportedModel
from akunu_py.types import Message, Tool, ToolCall
from akunu_py.weak_cache import cached_weakly

_THINKING = re.compile(r"""(?:\.|\[\s*['"]|\(\s*['"])(reasoning_content|thinking|reasoning)\b""")
_PLACEHOLDERS = re.compile('"NAME"|NAME|ARGUMENTS')
_BY_MODULE = {name: each for each in FORMATS.values() for name in (each.name, *each.aliases)}
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

{example}

The results come between <tool_response> and </tool_response>. Call a function only where it helps \
to answer."""
_EXAMPLE = ToolCall("function_name", '{"argument": "value"}', "")


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """The parts of a conversation that a chat template renders."""

    template: str
    tools: bool = False  # tools, calls and results
    arguments_as_text: bool = False  # accepts arguments as JSON text, not as an object
    system: bool = True  # a system message
    late_system: bool = True  # system messages after the first turn, in their place
    fallback_format: ToolFormat | None = None  # format of calls that the template does not render
    thinking: str = ""  # its key for a message's thinking, "" if it shows none


@cached_weakly
def template_features(tokenizer: Any) -> TemplateFeatures:
    """Return the features of a tokenizer's chat template."""
    if not tokenizer.has_chat_template:
        return TemplateFeatures("")
    template = ""
    if not tokenizer.has_own_renderer:
        template = str(tokenizer.get_chat_template(tools=[_definition(_PROBE)]))
    named = set(_THINKING.findall(template)) if template else {"reasoning_content"}
    order = ("reasoning_content", "thinking", "reasoning")
    thinking_key = next((name for name in order if name in named), "")
    features = TemplateFeatures(template, thinking=thinking_key)

    def rendered(messages: Sequence[Message], features: TemplateFeatures, *texts: str) -> str:
        """Return the rendered text, "" if it lacks one of `texts`."""
        try:
            text = _render(tokenizer, messages, [_PROBE], "", features)
        except UnsupportedModel:
            return ""
        return text if all(each in text for each in texts) else ""

    system = Message("system", "probe_system")
    shows_system = bool(rendered([system, _PROBED[0]], features, system.content))
    late = [_PROBED[0], Message("assistant", "probe_answer"), system, _PROBED[0]]
    text = rendered(late, features, system.content)
    in_place = text.find("probe_answer") < text.find(system.content) < text.rfind("probe_user")
    features = replace(features, system=shows_system, late_system=bool(text) and in_place)
    if rendered(_PROBED[:1], features, _PROBE.name):
        for as_text in (False, True):
            tried = replace(features, tools=True, arguments_as_text=as_text)
            text = rendered(_PROBED, tried, "probe_value", "probe_result")
            # Neither a printed Python dictionary nor escaped as JSON within a JSON string.
            if text and "'probe_argument'" not in text and '\\"probe_argument' not in text:
                return tried
        find = tokenizer.backend_tokenizer.token_to_id
        formats = (each for each in FORMATS.values() if each.token and find(each.token) is not None)
        tried = replace(features, tools=True, fallback_format=next(formats, HERMES))
        if rendered(_PROBED, tried, "probe_value", "probe_result"):
            return tried
    return features


def format_of(tokenizer: Any) -> ToolFormat:
    """Return the format in which the model with this tokenizer calls tools."""
    features = template_features(tokenizer)
    if not features.tools:
        return HERMES
    if thinking.channels_of(tokenizer) is thinking.HARMONY:
        return HARMONY
    for part in (tokenizer._chat_template, tokenizer.tool_parser):  # functions of mlx-lm
        module = str(getattr(part, "__module__", "")).rpartition(".")[2]
        if module in _BY_MODULE:
            return _BY_MODULE[module]
    formats = FORMATS.values()
    weak = [(each.weak_signature, each) for each in formats]
    signatures = [*((each.signature, each) for each in formats), *weak]
    return next((each for text, each in signatures if text and text in features.template), UNKNOWN)


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    model: str,
    variables: Mapping[str, Any] = {},
) -> str:
    """Return the prompt for a conversation. variables: see `effort`. Raises UnsupportedModel."""
    if any(message.role == "system" for message in messages[1:]):
        features = template_features(tokenizer)
        messages = messages if features.late_system else fold_late_system(messages)
    if not tools and not any(m.tool_calls or m.role == "tool" or m.thinking for m in messages):
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return chat_template.render(tokenizer, turns, model, variables=variables)
    features = template_features(tokenizer)
    if not features.tools:
        messages, tools = _as_text(messages, tools, features), ()
    try:
        return _render(tokenizer, messages, tools, model, features, variables)
    except UnsupportedModel:
        split = _one_call_each(messages)
        if split == list(messages):
            raise
        return _render(tokenizer, split, tools, model, features, variables)


def text_header(tokenizer: Any, prompt: str) -> str:
    """Return what the model writes before a text, if `prompt` ends with the opener of calls."""
    formats = [each for each in FORMATS.values() if each.opened]
    if not any(prompt.endswith(tuple(each.openers)) for each in formats):
        return ""
    format = format_of(tokenizer)
    return format.layout.text_opener if format.opened else ""


def fold_late_system(messages: Sequence[Message]) -> list[Message]:
    """Move the text of system messages after the first message into the nearest user turn.

    The text joins the message before it, so that earlier prompts remain a prefix of later ones. If
    that is an answer, the text begins the next user turn or result of a tool.
    """
    folded: list[Message] = list(messages[:1])
    waiting = ""  # text for the next user turn or result
    for message in messages[1:]:
        last = folded[-1]
        if message.role == "system" and last.role == "assistant":
            waiting = _joined(waiting, message.content)
        elif message.role == "system" or (message.role == last.role == "user"):
            folded[-1] = replace(last, content=_joined(last.content, message.content))
        elif waiting and message.role != "assistant":
            folded.append(replace(message, content=_joined(waiting, message.content)))
            waiting = ""
        else:
            folded += [Message("user", waiting)] if waiting else []
            folded.append(message)
            waiting = ""
    return [*folded, Message("user", waiting)] if waiting else folded


def _joined(first: str, second: str) -> str:
    return "\n\n".join(filter(None, (first, second)))


def _render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    model: str,
    features: TemplateFeatures,
    variables: Mapping[str, Any] = {},
) -> str:
    turns, definitions = _to_dicts(messages, features), [_definition(tool) for tool in tools]
    return chat_template.render(tokenizer, turns, model, definitions, variables)


def _definition(tool: Tool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, **tool.parameters}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _to_dicts(messages: Sequence[Message], features: TemplateFeatures) -> list[dict[str, Any]]:
    ids = _history_ids(messages, features.template)
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    turns = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        # Harmony has no message with content, calls and thinking.
        all_three = message.content and message.tool_calls and features.thinking == "thinking"
        if message.thinking and features.thinking and not all_three:
            turn[features.thinking] = message.thinking
        if message.tool_calls and features.fallback_format:
            calls = _calls_text(message.tool_calls, features.fallback_format)
            turn["content"] = f"{message.content}\n{calls}" if message.content else calls
        elif message.tool_calls:
            turn["tool_calls"] = [_call(call, ids, features) for call in message.tool_calls]
        if message.role == "tool":
            turn["tool_call_id"] = ids.get(message.tool_call_id, message.tool_call_id)
            turn["name"] = message.name or names.get(message.tool_call_id, "")
        turns.append(turn)
    return turns


def _call(call: ToolCall, ids: Mapping[str, str], features: TemplateFeatures) -> dict[str, Any]:
    arguments = call.arguments if features.arguments_as_text else _as_object(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": ids.get(call.id, call.id), "type": "function", "function": function}


def _as_object(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; wrap any other text that a model wrote."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _calls_text(calls: Sequence[ToolCall], format: ToolFormat) -> str:
    layout = format.layout

    def write(call: ToolCall) -> str:
        arguments = call.arguments or "{}"
        if layout.notation == "python":
            arguments = ", ".join(f"{k}={v!r}" for k, v in _as_object(arguments).items())
            arguments = f"({arguments})"
        values = {'"NAME"': json.dumps(call.name), "NAME": call.name, "ARGUMENTS": arguments}
        return _PLACEHOLDERS.sub(lambda place: values[place[0]], layout.call)

    return layout.prefix + layout.separator.join(map(write, calls)) + layout.suffix


def _history_ids(messages: Sequence[Message], template: str) -> dict[str, str]:
    """Return the ids that a template accepts, by the ids in the conversation."""
    openers = ((next(iter(each.openers)), each.history_id) for each in FORMATS.values())
    convert = next((found for opener, found in openers if found and opener in template), None)
    if convert is None:
        return {}
    calls = [call for message in messages for call in message.tool_calls]
    results = {message.tool_call_id for message in messages if message.tool_call_id}
    ids = {each: convert(each, "", 0) for each in results}
    return ids | {call.id: convert(call.id, call.name, at) for at, call in enumerate(calls)}


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Split messages with several calls, and put each result after its call."""
    results = {message.tool_call_id: message for message in messages if message.role == "tool"}
    split: list[Message] = []
    placed: set[str] = set()
    for message in messages:
        if message.role == "tool" and message.tool_call_id in placed:
            continue
        if len(message.tool_calls) < 2:
            split.append(message)
            continue
        for call in message.tool_calls:
            split.append(replace(message, tool_calls=(call,)))
            message = replace(message, content="", thinking="")
            if call.id in results:
                split.append(results[call.id])
                placed.add(call.id)
    return split


def _as_text(
    messages: Sequence[Message], tools: Sequence[Tool], features: TemplateFeatures
) -> list[Message]:
    """Write tools, calls and results as text, for a template that does not show them."""
    written: list[Message] = []
    for message in messages:
        if message.role != "tool":
            calls = _calls_text(message.tool_calls, HERMES)
            content = "\n".join(filter(None, (message.content, calls)))
            written.append(replace(message, content=content, tool_calls=()))
            continue
        content = f"<tool_response>\n{message.content}\n</tool_response>"
        before = written[-1].content if written and written[-1].role == "user" else ""
        if before.startswith("<tool_response>\n") and before.endswith("\n</tool_response>"):
            content = f"{written.pop().content}\n{content}"
        written.append(Message("user", content))
    if not tools:
        return written
    lines = [json.dumps(_definition(tool)["function"], ensure_ascii=False) for tool in tools]
    text = _INSTRUCTIONS.format(tools="\n".join(lines), example=_calls_text([_EXAMPLE], HERMES))
    if written[0].role == "system":
        text = f"{written.pop(0).content}\n\n{text}"
    if features.system or not written or written[0].role != "user":
        return [Message("system", text), *written]
    return [replace(written[0], content=f"{text}\n\n{written[0].content}"), *written[1:]]
