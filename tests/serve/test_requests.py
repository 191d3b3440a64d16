"""Recorded requests of real clients (`requests/`, by `record.py`) get valid replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.support.recorded import recorded_requests
from tests.support.serving import Reply, Served, ask, served, write_long_model
from tests.support.sse_reader import named_events

RECORDED = [
    pytest.param(request, id=f"{client}-{number}")
    for client, requests in recorded_requests().items()
    for number, request in enumerate(requests)
]
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


@pytest.fixture(scope="module")
def long(starter: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose context fits an agent's first prompt."""
    directory = write_long_model(tmp_path_factory.mktemp("long") / "tiny", starter.path)
    with served(directory, "tiny") as model:
        yield model


@pytest.mark.parametrize("request_", RECORDED)
async def test_recorded_client_requests_are_answered(
    long: Served, request_: dict[str, Any]
) -> None:
    body = request_["body"]
    body |= {name: min(body[name], 8) for name in _LIMITS if name in body}
    reply = await ask(long.app, request_["path"], body, headers=request_["headers"])
    assert reply.status == 200, reply.body
    if not body.get("stream"):
        assert reply.json() or body.get("response_fields") == [""]
    elif request_["path"].startswith("/api/"):
        assert json.loads(reply.body.splitlines()[-1])["done"]
    elif request_["path"] == "/v1/messages":
        assert named_events(reply.frames)[-1]["type"] == "message_stop"
    elif request_["path"] == "/v1/responses":
        ended = named_events(reply.frames)[-1]["response"]
        assert ended["usage"]["output_tokens"] > 0
        tools = [each for each in body["tools"] if each["type"] != "web_search"]
        assert len(ended["tools"]) == len(tools)  # we have no web search
    else:
        _check_chunks(reply, body)


def _check_chunks(reply: Reply, body: dict[str, Any]) -> None:
    chunks = reply.chunks()
    if (body.get("stream_options") or {}).get("include_usage"):
        assert chunks.pop()["usage"]["prompt_tokens"] > 0
    assert chunks[-1]["choices"][0]["finish_reason"]
