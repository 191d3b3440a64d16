"""Tools as servers list them, and their results as text for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from akunu_py.text import human_size

if TYPE_CHECKING:  # a second of CPU time
    from mcp.types import CallToolResult

MAX_CHARACTERS = 50_000
_MIN_CHARACTERS = 2_000
_TAIL = 5  # one part in this many comes from the end of a long output


@dataclass(frozen=True, slots=True)
class ListedTool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON Schema


@dataclass(frozen=True, slots=True)
class ToolOutput:
    text: str
    is_error: bool = False


def output_of(result: CallToolResult) -> ToolOutput:
    """Return a result as text; a line stands for each image, sound and binary file."""
    parts = [_text_of(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolOutput("\n".join(parts), bool(result.is_error))


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return _placeholder(block.type, block.mime_type, block.data)
    if block.type == "resource_link":
        return f"[link: {block.uri}]"
    resource = block.resource
    if (text := getattr(resource, "text", None)) is not None:
        return str(text)
    return _placeholder("file", resource.mime_type or str(resource.uri), resource.blob)


def _placeholder(kind: str, about: str, data: str) -> str:
    """Return a line in place of Base64 data, which a language model cannot see."""
    return f"[{kind} not shown: {about}, {human_size(len(data) * 3 // 4)}]"


def limit_for(context_length: int) -> int:
    """Return the characters of one output: about a quarter of the context."""
    return max(_MIN_CHARACTERS, min(context_length, MAX_CHARACTERS))


def shorten(text: str, limit: int) -> str:
    """Return a long text without its middle, with a line that says so."""
    if len(text) <= limit:
        return text
    tail = limit // _TAIL
    omitted = len(text) - limit
    return f"{text[: limit - tail]}\n[{omitted:,} characters left out]\n{text[-tail:]}"
