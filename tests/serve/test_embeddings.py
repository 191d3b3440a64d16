"""/v1/embeddings: last hidden states of an embedding model, normalized, in both encodings."""

import base64
import math
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from starlette.types import ASGIApp

from akunu_py.engine.engine import Engine
from akunu_py.serve.http.model_pool import ModelPool
from tests.support.serving import Served, fetch, served, write_served_model

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_served_model(tmp_path_factory.mktemp("embedding") / "model")
    with served(directory, "embedding") as model:
        yield model


@pytest.fixture
def app(tiny: Served, embedding: Served) -> ASGIApp:
    return tiny.application(pool=ModelPool([tiny.model], embedding.model))


def expected(engine: Engine, text: str) -> list[float]:
    """Return the normalized last hidden state, by plain mlx-lm."""
    hidden = engine.model.model(mx.array([engine.tokens.encode(text)]))[0, -1].astype(mx.float32)
    return [float(value) for value in (hidden / mx.linalg.norm(hidden)).tolist()]


async def test_embeddings_are_normalized_last_hidden_states(
    app: ASGIApp, embedding: Served
) -> None:
    texts = ["a cat", "a dog and a bird"]
    reply = (await fetch(app, PATH, {"model": "embedding", "input": texts})).json()
    assert [each["index"] for each in reply["data"]] == [0, 1]
    for text, each in zip(texts, reply["data"], strict=True):
        found = each["embedding"]
        truth = embedding.in_thread(partial(expected, text=text))
        assert found == pytest.approx(truth, abs=1e-4)
        assert math.hypot(*found) == pytest.approx(1, abs=1e-4)
    tokens = embedding.in_thread(lambda engine: [*map(engine.tokens.encode, texts)])
    assert reply["usage"]["prompt_tokens"] == sum(map(len, tokens))

    whole = {"encoding_format": "base64", "input": tokens}
    in_base64 = (await fetch(app, PATH, whole)).json()["data"]
    for each, other in zip(in_base64, reply["data"], strict=True):
        data = base64.b64decode(each["embedding"])
        values = struct.unpack(f"<{len(data) // 4}f", data)
        assert [*values] == pytest.approx(other["embedding"], abs=1e-6)
    ollama = {"model": "embedding:latest", "input": texts}
    lists = (await fetch(app, "/api/embed", ollama)).json()["embeddings"]
    assert lists == [each["embedding"] for each in reply["data"]]
    old = {"model": "embedding", "prompt": texts[0]}
    assert (await fetch(app, "/api/embeddings", old)).json() == {"embedding": lists[0]}
    long = (await fetch(app, "/api/embed", {"input": "a" * 20_000})).json()
    assert long["prompt_eval_count"] == 4096  # without the end, which does not fit
    for single in ("a cat", tokens[0]):
        (one,) = (await fetch(app, PATH, {"input": single})).json()["data"]
        assert one["embedding"] == pytest.approx(reply["data"][0]["embedding"], abs=1e-6)
    (short,) = (await fetch(app, PATH, {"input": "a cat", "dimensions": 8})).json()["data"]
    assert len(short["embedding"]) == 8
    assert math.hypot(*short["embedding"]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("more", "status", "names"), [
    ({"input": []}, 400, "1 to 2048 texts"), ({"input": ""}, 400, "expected a text"),
    ({"input": [-1]}, 400, "token ids"), ({"input": "a" * 20_000}, 400, "too long"),
    ({"dimensions": 99_999}, 400, "dimensions"), ({"dimensions": 0}, 400, "dimensions"),
])  # fmt: skip
async def test_invalid_requests_for_embeddings_are_named(
    app: ASGIApp, more: dict[str, Any], status: int, names: str
) -> None:
    reply = await fetch(app, PATH, {"input": "x"} | more)
    assert reply.status == status
    assert names in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["embedding", "embedding:latest", " ", "text-embedding-3-small"])
async def test_the_embedding_model_is_matched_and_listed_as_the_others(
    app: ASGIApp, tiny: Served, embedding: Served, name: str
) -> None:
    strict = tiny.application(pool=ModelPool([tiny.model], embedding.model), strict=True)
    listed = (await fetch(app, "/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == [tiny.model.name, "embedding"]
    tags = (await fetch(app, "/api/tags")).json()["models"]
    assert [each["name"] for each in tags] == [tiny.model.name, "embedding"]
    shown = (await fetch(app, "/api/show", {"model": "embedding"})).json()
    assert shown["capabilities"] == ["embedding"]
    unknown = name.startswith("text")
    assert (await fetch(app, "/v1/models/embedding:latest")).json()["id"] == "embedding"
    reply = await fetch(app, PATH, {"model": name, "input": "x"})
    assert (reply.status, reply.json()["model"]) == (200, "embedding")
    refused = await fetch(strict, PATH, {"model": name, "input": "x"})
    assert refused.status == (404 if unknown else 200)


async def test_a_server_without_an_embedding_model_names_the_option(tiny: Served) -> None:
    reply = await fetch(tiny.app, PATH, {"input": "x"})
    assert reply.status == 404
    assert "--embedding-model NAME" in reply.json()["error"]["message"]
