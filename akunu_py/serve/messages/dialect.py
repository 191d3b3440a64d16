"""Messages: endpoints, and jobs from bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from akunu_py.decoding.chat_format.effort import thinking_variables
from akunu_py.decoding.scheduling.job import chat_job
from akunu_py.serve.dialect.bodies import BETWEEN, check_tool, joined, refuse_extra
from akunu_py.serve.dialect.errors import RequestError, invalid
from akunu_py.serve.dialect.interface import Dialect, Endpoint, Prepared
from akunu_py.serve.dialect.sampling import SamplingBody, generate_options, schema_constraint
from akunu_py.serve.dialect.service import Service, check_model
from akunu_py.serve.messages.bodies import (
    Block,
    CountBody,
    ImageBlock,
    MessagesBody,
    MessagesTool,
    MessagesTurn,
    PromptBody,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingBody,
    ToolResultBlock,
    ToolUseBlock,
)
from akunu_py.serve.messages.reply import MessageEncoder, error_body, whole_message
from akunu_py.types import Message, Tool, ToolCall, ToolChoice

_CHOICES: dict[str, Literal["auto", "required", "named", "none"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


def prepare_message(body: MessagesBody, service: Service) -> Prepared:
    """Return the job and the encoder. Raises RequestError."""
    check_model(body.model, service.names)
    sampling = SamplingBody(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=body.stop_sequences,
    )
    format = body.output_config.format if body.output_config else None
    constraint = schema_constraint(format.schema_) if format else None
    options = generate_options(sampling, service, body.max_tokens, constraint)
    tools = tools_of(body)
    choice, parallel = choice_of(body, tools)
    job = chat_job(
        service.engine,
        messages_of(body),
        options,
        tools,
        choice,
        parallel=parallel,
        variables=variables_of(body, service),
    )
    shown = shows_thinking(body.thinking)
    return Prepared(
        [job],
        lambda answers: whole_message(service.name, answers, shows_thinking=shown),
        MessageEncoder(service.name, shows_thinking=shown) if body.stream else None,
    )


def count_tokens(body: CountBody, service: Service) -> Mapping[str, Any]:
    """Return the number of prompt tokens. Raises RequestError."""
    check_model(body.model, service.names)
    variables = variables_of(body, service)
    prompt = service.engine.tokens.encode_chat(messages_of(body), tools_of(body), variables)
    return {"input_tokens": len(prompt)}


def variables_of(body: PromptBody, service: Service) -> dict[str, Any]:
    """Return the chat template's variables for thinking, if it has any.

    Anthropic's clients request thinking from any model.
    """
    asked = body.thinking.type if body.thinking else None
    known = thinking_variables(service.engine.tokens.tokenizer)
    if asked == "disabled":
        return known.off() or {}
    effort = body.output_config.effort if body.output_config else None
    return (known.on(effort) or {}) if asked or effort else {}


def shows_thinking(asked: ThinkingBody | None) -> bool:
    """Return True if the reply includes thinking, which some models cannot turn off."""
    return asked is None or not (asked.type == "disabled" or asked.display == "omitted")


def messages_of(body: PromptBody) -> list[Message]:
    """Return the conversation. Raises RequestError for an unsupported block."""
    found = [Message("system", _text(body.system, "system"))] if body.system else []
    tools: dict[str, str] = {}  # names by the ids of the calls
    for number, turn in enumerate(body.messages):
        found += _of_turn(turn, f"messages.{number}.content", tools)
    return joined(found, "messages")


def _of_turn(turn: MessagesTurn, place: str, tools: dict[str, str]) -> Iterator[Message]:
    blocks = turn.content
    if isinstance(blocks, str):
        yield Message(turn.role, blocks)
        return
    for number, block in enumerate(blocks):
        where = f"{place}.{number}"
        if isinstance(block, ToolUseBlock):
            tools[block.id] = block.name
            call = ToolCall(block.name, json.dumps(block.input, ensure_ascii=False), block.id)
            yield Message(_only("assistant", turn, block, where), "", tool_calls=(call,))
        elif isinstance(block, ToolResultBlock):
            _only("user", turn, block, where)
            text = _text(block.content or "", f"{where}.content")
            yield Message(
                "tool",
                f"Error: {text}" if block.is_error else text,
                tool_call_id=block.tool_use_id,
                name=tools.get(block.tool_use_id, ""),
            )
        elif isinstance(block, ThinkingBlock):
            yield Message(_only("assistant", turn, block, where), "", thinking=block.thinking)
        elif not isinstance(block, RedactedThinkingBlock):
            yield Message(turn.role, _block_text(block, where))


def _only(role: Any, turn: MessagesTurn, block: Block, where: str) -> Any:
    if turn.role != role:
        raise invalid(where, f"{block.type} is only allowed in {role} messages")
    return role


def _text(content: str | Sequence[ResultBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = (_block_text(block, f"{place}.{number}") for number, block in enumerate(content))
    return BETWEEN.join(text for text in texts if text)


def _block_text(block: ResultBlock, where: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        raise invalid(where, "images are not supported; send text")
    data = block.source.get("data")
    if block.source.get("type") != "text" or not isinstance(data, str):
        message = f"{where}: documents must be plain text"
        raise RequestError(message, param=f"{where}.source")
    return BETWEEN.join(text for text in (block.title, block.context, data) if text)


def tools_of(body: PromptBody) -> list[Tool]:
    """Return the tools. Raises RequestError for tools that Anthropic defines."""
    return [_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools or [])]


def _tool(tool: MessagesTool, place: str) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"{place}: unsupported tool type {tool.type[:100]}; use one with input_schema"
        raise RequestError(message, param=f"{place}.type")
    refuse_extra(tool, place)
    if tool.input_schema is None:
        raise invalid(f"{place}.input_schema", "field required")
    return Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))


def choice_of(body: PromptBody, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """Return the choice, and whether several calls are allowed. Raises RequestError."""
    asked = body.tool_choice
    if asked is None:
        return ToolChoice(), True
    if asked.type == "tool":
        check_tool(asked.name or "", [tool.name for tool in tools], "tool_choice.name")
    if asked.type == "any" and not tools:
        raise invalid("tool_choice", "requires tools")
    return ToolChoice(_CHOICES[asked.type], asked.name or ""), not asked.disable_parallel_tool_use


MESSAGES = Dialect(
    "messages",
    (
        Endpoint("/v1/messages", MessagesBody, prepare_message, "Answer a conversation."),
        Endpoint("/v1/messages/count_tokens", CountBody, count_tokens, "Count its tokens."),
    ),
    error_body,
)
