"""Parts that a text model cannot read become one line of text, in every dialect."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from akunu_py.serve.dialect.unreadable import describe
from akunu_py.serve.messages import MessagesBody
from akunu_py.serve.messages import messages_of as from_messages
from akunu_py.serve.ollama import OllamaChatBody
from akunu_py.serve.ollama import messages_of as from_ollama
from akunu_py.serve.openai.bodies import ChatBody
from akunu_py.serve.openai.bodies import messages_of as from_chat
from akunu_py.serve.responses.bodies import ResponsesBody
from akunu_py.serve.responses.dialect import messages_of as from_responses

DATA = base64.b64encode(bytes(84_000)).decode()
URL = f"data:image/png;base64,{DATA}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
END = ": this model reads text only]"
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image", "source": SOURCE}, "[image, 84 kB"),
    ({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, "[image"),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "[image"),
    ({"type": "image"}, "[image"),
    ({"type": "document", "title": "a\nb.pdf", "source": SOURCE}, "[document a⏎b.pdf, 84 kB"),
    ({"type": "image_url", "image_url": {"url": URL}}, "[image, 84 kB"),
    ({"type": "image_url", "image_url": {"url": "https://x/a,b.png"}}, "[image"),
    ({"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}, "[audio, 84 kB"),
    ({"type": "file", "file": {"filename": "a.pdf", "file_data": URL}}, "[file a.pdf, 84 kB"),
    ({"type": "video_url", "video_url": {"url": "https://x"}}, "[video"),
    ({"type": "input_image", "image_url": URL, "detail": "auto"}, "[image, 84 kB"),
    ({"type": "input_image", "file_id": "f"}, "[image"),
    ({"type": "input_file", "filename": "a.pdf", "file_data": DATA}, "[file a.pdf, 84 kB"),
    ({"type": "search_result", "source": "x", "title": "T"}, "[search_result T"),
]


@pytest.mark.parametrize(("part", "text"), PARTS)
def test_unreadable_part_becomes_one_line_in_every_dialect(part: dict[str, Any], text: str) -> None:
    line = text + END
    assert describe(part) == line
    content = [part, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": content}]
    user = MessagesBody.model_validate({"model": "m", "max_tokens": 1, "messages": turns})
    assert from_messages(user)[0].content == f"{line}\n\nWhat is it?"
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    turns = [{"role": "user", "content": [result]}]
    tool = MessagesBody.model_validate({"model": "m", "max_tokens": 1, "messages": turns})
    assert from_messages(tool)[0].content == f"{line}\n\nWhat is it?"

    items: list[dict[str, Any]] = [
        {"role": "user", "content": content},
        {"type": "function_call_output", "call_id": "c", "output": content},
    ]
    for message in from_responses(ResponsesBody.model_validate({"model": "m", "input": items})):
        assert message.content == f"{line}\n\nWhat is it?"

    chat: list[dict[str, Any]] = [
        {"role": "user", "content": content},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    for message in from_chat(ChatBody.model_validate({"messages": chat}).messages):
        assert message.content == f"{line}\nWhat is it?"


def test_images_of_ollama_become_lines_also_in_results_of_tools() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "What is it?", "images": [DATA, DATA]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "What is it?", "images": [DATA]},
    ]
    user, _, tool = from_ollama(OllamaChatBody.model_validate({"messages": turns}).messages)
    line = f"[image, 84 kB{END}\n"
    assert (user.content, tool.content) == (f"{line}{line}What is it?", f"{line}What is it?")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "abc"}, "T\n\nabc"),
        ({"type": "content", "content": "abc"}, "T\n\nabc"),
        ({"type": "content", "content": [{"type": "text", "text": "abc"}]}, "T\n\nabc"),
        (
            {"type": "content", "content": [{"type": "image", "source": SOURCE}]},
            f"T\n\n[image, 84 kB{END}",
        ),
        ({"type": "url", "url": "https://x/y.pdf"}, f"[document T{END}"),
    ],
)
def test_text_of_documents_is_read(source: dict[str, Any], text: str) -> None:
    block = {"type": "document", "title": "T", "source": source}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    assert from_messages(MessagesBody.model_validate(body))[0].content == text
