"""Recorded requests of real clients (`requests/`, by `record.py`) get valid replies, and every turn
of an agent's session prefills only what is new."""

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.support.dialects import DIALECTS
from tests.support.serving import Served, fetch, served, write_long_model

REQUESTS = Path(__file__).with_name("requests")
_CUT = re.compile(r"\[([0-9]+) characters, ([0-9a-f]{8})\]")
_LONGEST = 200  # characters of a filler; longer ones only take time
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_CLIENTS = {dialect.path: dialect for dialect in DIALECTS.values()}


def recorded_requests() -> dict[str, list[dict[str, Any]]]:
    """Return the recorded requests by client, with fillers in place of long texts."""
    found = {}
    for file in sorted(REQUESTS.iterdir()):
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        found[file.name.split(".json")[0]] = json.loads(_CUT.sub(_filler, text))
    return found


def _filler(match: re.Match[str]) -> str:
    """Return a text as long as the one that was cut; equal texts have equal fillers."""
    pick = random.Random(match[2])
    words = ["the", "file", "is", "in", "a", "folder", "with", "other", "names", "and", "lines"]
    return " ".join(pick.choices(words, k=min(int(match[1]), _LONGEST) // 5))


RECORDED = recorded_requests()
AGENTS = ("claude", "codex", "opencode", "opencode_messages", "pi")
AGAIN = 0.05  # part of a prompt that may be prefilled again


@pytest.fixture(scope="module")
def long(starter: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model whose context fits an agent's first prompt."""
    directory = write_long_model(tmp_path_factory.mktemp("long") / "tiny", starter.path)
    with served(directory, "tiny") as model:
        yield model


@pytest.mark.parametrize("client", RECORDED)
async def test_recorded_client_requests_are_answered(long: Served, client: str) -> None:
    """Also if the billing header of Claude Code changes with each request."""
    prompts: list[int] = []  # tokens of an agent's turns
    for number, request in enumerate(RECORDED[client]):
        body, path = request["body"], request["path"]
        body |= {name: min(body[name], 8) for name in _LIMITS if name in body}
        is_turn = client in AGENTS and bool(body.get("tools"))
        if client == "claude" and is_turn:
            header = body["system"][0]
            assert header["text"].startswith("x-anthropic-billing-header:")
            header["text"] += f" cch={number:05x};"
        reply = await fetch(long.app, path, body, headers=request["headers"])
        assert reply.status == 200, reply.body
        values = reply.values()
        if path == "/infill" and not body.get("stream"):
            names = [name for name in body.get("response_fields", ["content"]) if name]
            assert set(names) <= set(values[0])
            assert "response_fields" not in body or len(values[0]) == len(names)
        elif path not in _CLIENTS or values[-1].get("done_reason") == "load":
            assert values[0]
        elif path.startswith("/v1/") and "completions" in path and body.get("stream"):
            if (body.get("stream_options") or {}).get("include_usage"):
                assert values.pop()["usage"]["prompt_tokens"] > 0
            assert values[-1]["choices"][0]["finish_reason"]
        else:
            data = _CLIENTS[path].parse(reply)
            assert (data.prompt > 0, data.generated > 0) == (True, True)
        if is_turn:
            data = _CLIENTS[path].parse(reply)
            assert data.prompt > (before := max(prompts, default=0))
            assert before - data.cached <= AGAIN * data.prompt
            prompts.append(data.prompt)
        if path == "/v1/responses" and body.get("stream"):
            tools = [each for each in body["tools"] if each["type"] != "web_search"]
            assert len(values[-1]["response"]["tools"]) == len(tools)  # there is no web search
    assert len(prompts) == (4 if client in AGENTS else 0)
