"""From a body of Messages to a conversation, tools and the choice of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from akunu_py.serve.errors import RequestError
from akunu_py.serve.messages.bodies import (
    Block,
    DocumentBlock,
    ImageBlock,
    PromptBody,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolBody,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from akunu_py.serve.turns import BETWEEN, joined
from akunu_py.types import Constraint, Message, Tool, ToolCall, ToolChoice


def messages_of(body: PromptBody) -> list[Message]:
    """Raises RequestError, which names the block that no model here can read."""
    found = [Message("system", _text(body.system, "system"))] if body.system else []
    tools: dict[str, str] = {}  # by the id of the call
    for number, turn in enumerate(body.messages):
        found += _of_turn(turn, f"messages.{number}.content", tools)
    turns = joined(found)
    if not any(turn.role != "system" for turn in turns):
        raise RequestError("messages: there is nothing to answer", param="messages")
    return turns


def _of_turn(turn: Turn, place: str, tools: dict[str, str]) -> Iterator[Message]:
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


def _only(role: Any, turn: Turn, block: Block, where: str) -> Any:
    if turn.role != role:
        raise RequestError(f"{where}: {block.type} is a block of the {role}'s turns", param=where)
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
        raise RequestError(f"{where}: images are not supported, only text is", param=where)
    return _document_text(block, where)


def _document_text(block: DocumentBlock, where: str) -> str:
    data = block.source.get("data")
    if block.source.get("type") != "text" or not isinstance(data, str):
        raise RequestError(f"{where}: a document must be a plain text", param=f"{where}.source")
    return BETWEEN.join(text for text in (block.title, block.context, data) if text)


def tools_of(body: PromptBody) -> list[Tool]:
    """Raises RequestError for tools that only Anthropic's servers have, or its models know."""
    return [_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools or [])]


def _tool(tool: ToolBody, place: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{place}: tools of the type {tool.type[:100]} are not supported, only those with an "
            "input_schema are",
            param=f"{place}.type",
        )
    if tool.model_extra:
        name = f"{place}.{next(iter(tool.model_extra))}"
        raise RequestError(f"unsupported parameter: {name}", param=name)
    if tool.input_schema is None:
        raise RequestError(f"{place}.input_schema: field required", param=f"{place}.input_schema")
    return Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))


def choice_of(body: PromptBody, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """Whether tools are called, and whether there may be several calls. Raises RequestError."""
    asked = body.tool_choice
    if asked is None:
        return ToolChoice(), True
    if asked.type == "tool" and asked.name not in [tool.name for tool in tools]:
        message = f"tool_choice: there is no tool {(asked.name or '')[:100]!r}"
        raise RequestError(message, param="tool_choice.name")
    if asked.type == "any" and not tools:
        raise RequestError("tool_choice: there are no tools", param="tool_choice")
    modes: dict[str, Literal["auto", "required", "named", "none"]] = {
        "auto": "auto",
        "any": "required",
        "tool": "named",
        "none": "none",
    }
    return ToolChoice(modes[asked.type], asked.name or ""), not asked.disable_parallel_tool_use


def constraint_of(body: PromptBody) -> Constraint | None:
    """What the answer must match."""
    wanted = body.output_config.format if body.output_config else None
    return Constraint("json_schema", json.dumps(wanted.schema_)) if wanted else None
