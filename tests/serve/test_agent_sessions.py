"""Recorded sessions of coding agents: every turn prefills only what is new, in every dialect."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.support.recorded import recorded_requests
from tests.support.serving import STRICT_TEMPLATE, Reply, ask, served, write_long_model
from tests.support.sse_reader import named_events

SESSIONS = {
    client: [request for request in requests if request["body"].get("tools")]
    for client, requests in recorded_requests().items()
    if client in ("claude", "codex", "opencode", "opencode_messages", "pi")
}
AGAIN = 0.05  # part of a prompt that may be prefilled again
IMAGE = "iVBORw0KGgo" + "A" * 4000


@pytest.fixture(scope="module")
def models(starter: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny models, whose templates accept late system messages or refuse them."""
    directory = tmp_path_factory.mktemp("long")
    found = {name: write_long_model(directory / name, starter.path) for name in ("late", "strict")}
    file = found["strict"] / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"chat_template": STRICT_TEMPLATE}
    file.write_text(json.dumps(settings))
    return found


def counts(path: str, reply: Reply) -> tuple[int, int]:
    """Return the tokens of the prompt, and how many of them were cached."""
    assert reply.status == 200, reply.body
    if path == "/v1/chat/completions":
        usage = reply.chunks()[-1]["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    events = named_events(reply.frames)
    if path == "/v1/responses":
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    usage = events[0]["message"]["usage"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


async def replay(model: Path, session: list[dict[str, Any]]) -> list[float]:
    """Send the requests of a session; return the parts of the prompts that are prefilled again."""
    parts, before = [], 0
    with served(model, "tiny") as server:
        for request in session:
            body = request["body"] | {"max_tokens": 4}
            if request["path"] == "/v1/responses":
                del body["max_tokens"]
            reply = await ask(server.app, request["path"], body, headers=request["headers"])
            prompt, cached = counts(request["path"], reply)
            assert prompt > before
            parts.append((before - cached) / prompt)
            before = prompt
    return parts


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("client", "model"),
    [*((client, "late") for client in SESSIONS), ("claude", "strict"), ("codex", "strict")],
)
async def test_turns_of_agents_prefill_only_what_is_new(
    client: str, model: str, models: dict[str, Path]
) -> None:
    session = SESSIONS[client]
    assert len(session) == 4
    again = await replay(models[model], session)
    assert all(part <= AGAIN for part in again), again


async def test_billing_header_that_changes_keeps_the_prompt_cached(
    models: dict[str, Path],
) -> None:
    session = copy.deepcopy(SESSIONS["claude"][:2])
    for number, request in enumerate(session):
        header = request["body"]["system"][0]
        assert header["text"].startswith("x-anthropic-billing-header:")
        header["text"] += f" cch={number:05x};"
    again = await replay(models["late"], session)
    assert all(part <= AGAIN for part in again), again


def with_image(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request with an image next to the first question, in its dialect."""
    request, url = copy.deepcopy(request), f"data:image/png;base64,{IMAGE}"
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    parts = {
        "/v1/messages": {"type": "image", "source": source},
        "/v1/responses": {"type": "input_image", "image_url": url},
        "/v1/chat/completions": {"type": "image_url", "image_url": {"url": url}},
    }
    body = request["body"]
    turns = body.get("messages") or body["input"]
    turn = next(each for each in turns if each["role"] == "user")
    if isinstance(turn["content"], str):
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    turn["content"].insert(0, parts[request["path"]])
    return request


@pytest.mark.parametrize("client", ["claude", "codex", "pi"])
async def test_image_in_the_history_does_not_end_a_session(
    client: str, models: dict[str, Path]
) -> None:
    again = await replay(models["late"], [with_image(request) for request in SESSIONS[client][:2]])
    assert again[1] <= AGAIN
