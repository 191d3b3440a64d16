"""Several models that share a memory limit: each answers as if it was alone, and none is lost."""

import argparse
import asyncio
import gc
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from starlette.types import ASGIApp

from akunu_py.commands import serve
from akunu_py.engine.model import device
from akunu_py.errors import UnknownModel, UsageError
from akunu_py.models.store import model_store
from akunu_py.serve.http.asgi import Backend, create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.http.server import ServeOptions
from akunu_py.settings import ServeSettings, serve_settings, settings_file
from akunu_py.types import GenerateOptions
from tests.support.command import until
from tests.support.dialects import DIALECTS, DialectRequest
from tests.support.jobs import open_jobs
from tests.support.serving import Reply, fetch, write_served_model
from tests.support.tiny import write_tiny_llama

CLIENTS = {DIALECTS[name].path: DIALECTS[name] for name in ("chat", "messages", "completions")}
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
NAMES = ("a", "b", "c")
OPTIONS = ServeOptions(AccessRules(), GenerateOptions(), temperature=0.0, max_tokens=6)
pytestmark = pytest.mark.usefixtures("own_directories", "own_memory")


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not count the models that other tests of this process hold."""
    gc.collect()
    before, memory_left = mx.get_active_memory(), device.memory_left

    def left(limit: int | None = None) -> int:
        return memory_left(None if limit is None else limit + before)

    monkeypatch.setattr(device, "memory_left", left)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("pool")
    return [write_served_model(parent / name, seed) for seed, name in enumerate(NAMES)]


@contextmanager
def pool_of(
    directories: list[Path], *words: str, embedding: Path | None = None, idle_s: float | None = None
) -> Iterator[ModelPool]:
    """Make the pool of `akunu serve` with these models and options."""
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    models = [word for path in directories for word in ("--model", str(path))]
    args = parser.parse_args([*models, "--no-answer-cache", *words])
    found = serve.served_models(args, ServeSettings())
    embedder = model_store.resolve(str(embedding)) if embedding else None
    pool = serve._pool(args, found, OPTIONS, idle_s, [], lambda *_: None, embedder)
    yield pool
    assert pool.close()


def app_of(pool: ModelPool, records: RequestRecords | None = None, **more: Any) -> ASGIApp:
    backend = Backend(pool, records or RequestRecords())
    return create_app(replace(backend, **more), AccessRules(), heartbeat_s=60)


@pytest.fixture(scope="module")
def size(directories: list[Path]) -> int:
    """Return the bytes that one model needs with its whole context."""
    with pool_of(directories[:1]) as pool:
        return pool.models[0].service().engine.plan.fit.estimate.total


def body_of(path: str, model: str, text: str = "x") -> dict[str, Any]:
    return CLIENTS[path].request_body(DialectRequest((text,), 6), stream=False) | {"model": model}


def text_of(path: str, reply: Reply) -> tuple[str, str]:
    """Return the model that answered, and its text."""
    return reply.json()["model"], CLIENTS[path].parse(reply).text


def answering(reply: Reply) -> str:
    return text_of(CHAT, reply)[0]


@pytest.fixture(scope="module")
def alone(directories: list[Path]) -> dict[tuple[str, str, str], str]:
    """Return the answer of each model alone to each path and text."""
    found = {}
    for directory in directories:
        with pool_of([directory]) as pool:
            app = app_of(pool)
            for path, text in itertools.product(CLIENTS, "xy"):
                reply = asyncio.run(fetch(app, path, body_of(path, directory.name, text)))
                name, found[path, directory.name, text] = text_of(path, reply)
                assert name == directory.name
    assert len(set(found.values())) > 6
    return found


@pytest.mark.long
@pytest.mark.parametrize(("room", "seed"), [(1.2, 0), (2.6, 1), (20, 2)])  # one model, two, all
async def test_each_model_answers_as_if_it_was_alone(
    directories: list[Path], alone: dict[tuple[str, str, str], str], size: int, room: float,
    seed: int,
) -> None:  # fmt: skip
    """Requests arrive in any order, some clients disconnect, and the limit always holds."""
    choose = random.Random(seed)
    limit = int(room * size)
    with pool_of(directories, "--memory-limit", f"{limit / 1e9:.9f}GB") as pool:
        app = app_of(pool)

        async def one() -> None:
            for _ in range(choose.randint(0, 9)):
                await asyncio.sleep(0)
            path, model, text = (choose.choice(each) for each in ([*CLIENTS], NAMES, "xy"))
            leaves = choose.random() < 0.2
            left = asyncio.Event()
            if leaves:
                asyncio.get_running_loop().call_later(choose.random() / 20, left.set)
            reply = await fetch(app, path, body_of(path, model, text), left=left)
            if not leaves:
                assert text_of(path, reply) == (model, alone[path, model, text])
            assert sum(each.memory for each in pool.models) <= limit

        for count in (1, 2, 8):
            await asyncio.gather(*(one() for _ in range(count)))
        assert [model.requests for model in pool.models] == [0, 0, 0]
        assert sum(model.memory > 0 for model in pool.models) <= (room if room < 3 else 3)
        if room == 20:
            assert max(model.loads for model in pool.models) == 1


async def chat_with(app: ASGIApp, model: str, **options: Any) -> Reply:
    return await fetch(app, CHAT, body_of(CHAT, model), **options)


@contextmanager
def two_models(
    directories: list[Path], size: int
) -> Iterator[tuple[ModelPool, ASGIApp, ServedModel, ServedModel]]:
    """Serve two models with memory for one."""
    with pool_of(directories[:2], *limited(size)) as pool:
        yield pool, app_of(pool), *pool.models  # type: ignore[misc]


def limited(size: int) -> tuple[str, str]:
    """Return the option for the memory of one model."""
    return "--memory-limit", f"{1.2 * size / 1e9:.9f}GB"


async def test_the_least_recently_used_idle_model_is_unloaded(
    directories: list[Path], size: int
) -> None:
    with pool_of(directories, "--memory-limit", f"{2.6 * size / 1e9:.9f}GB") as pool:
        app, (a, b, c) = app_of(pool), pool.models
        for name in ("a", "b", "a", "c"):
            await chat_with(app, name)
        assert [model.memory > 0 for model in pool.models] == [True, False, True]
        async with pool.use(a):  # used longest ago, but busy
            await chat_with(app, "b")
        assert [model.memory > 0 for model in pool.models] == [True, True, False]
        assert (a.loads, b.loads, c.loads) == (1, 2, 1)


async def test_a_model_that_answers_is_not_unloaded(directories: list[Path], size: int) -> None:
    """The next model waits for it; new requests wait behind that, so it comes to an end."""
    with two_models(directories, size) as (pool, app, a, b):
        async with pool.use(a):
            second = asyncio.create_task(chat_with(app, "b"))
            await asyncio.to_thread(until, lambda: a.unloading)
            third = asyncio.create_task(chat_with(app, "a"))
            await asyncio.to_thread(until, lambda: pool.metrics()["a"]["model_requests"] == 2)
            assert (a.memory > 0, b.loads) == (True, 0)
            text = (await fetch(app, "/metrics")).body.decode()
            assert 'akunu_model_loaded{model="a"} 1' in text
            assert 'akunu_model_batched{model="a"} 1' in text
            assert 'akunu_model_requests{model="a"} 2' in text
            assert 'akunu_model_requests{model="b"} 1' in text
        assert [answering(await each) for each in (second, third)] == ["b", "a"]
        assert (a.loads, b.loads) == (2, 1)


async def test_a_model_stays_when_the_client_of_the_next_one_disconnects(
    directories: list[Path], size: int
) -> None:
    """Ending a request waits for no model, and reaches all of them."""
    left = asyncio.Event()
    with two_models(directories, size) as (pool, app, a, b):
        async with pool.use(a):
            second = asyncio.create_task(chat_with(app, "b", left=left))
            await asyncio.to_thread(until, lambda: a.unloading)
            third = asyncio.create_task(chat_with(app, "a"))
            await asyncio.to_thread(until, lambda: pool.metrics()["a"]["model_requests"] == 2)
            reply = await asyncio.wait_for(fetch(app, "/akunu/end", {"id": "first"}), 30)
            assert reply.status == 200
            assert "first" in a.service().ending
            left.set()
            assert (await second).status == 0
            assert answering(await third) == "a"
        assert (a.loads, b.loads, a.requests, b.requests) == (1, 0, 0, 0)
        async with pool.use(b):
            assert "first" in b.service().ending


@pytest.mark.parametrize("idle_s", [600.0, None])
async def test_ollamas_clients_unload_a_model_with_keep_alive(
    directories: list[Path], idle_s: float | None
) -> None:
    """After the last request that uses it. `--idle 0` and `--hosts` keep it loaded."""
    with pool_of(directories[:1], idle_s=idle_s) as pool:
        app, (model,) = app_of(pool), pool.models
        body = {"messages": [{"role": "user", "content": "x"}], "stream": False}
        for loads, zero in enumerate((0, "0", "0s"), 1):
            requests = [fetch(app, "/api/chat", body | {"keep_alive": zero}) for _ in range(3)]
            async with pool.use(model):
                replies = asyncio.gather(*requests)
                all_wait = model.host.call(lambda _: until(lambda: sum(open_jobs(model.host)) == 3))
                await asyncio.wrap_future(all_wait)
            assert [reply.status for reply in await replies] == [200] * 3
            await asyncio.gather(*filter(None, [pool._loader]))
            assert (model.loads, model.memory > 0) == (
                (1, True) if idle_s is None else (loads, False)
            )
        for keep, path, reason in (  # an unloaded model stays unloaded
            (0, "chat", "unload"), (0, "generate", "unload"),
            ("5m", "generate", "load"), (-1, "generate", "load"),
        ):  # fmt: skip
            reply = await fetch(app, f"/api/{path}", {"keep_alive": keep})
            assert reply.json()["done_reason"] == reason
            await asyncio.gather(*filter(None, [pool._loader]))
            assert model.loads == (1 if idle_s is None else 3 + (reason == "load"))
        assert model.memory
        assert (await fetch(app, "/api/show", {"model": "none"})).status == 404


async def test_the_embedding_model_shares_the_memory_limit(
    directories: list[Path], size: int
) -> None:
    """It is unloaded for the others, and they for it."""
    texts = {"input": ["x", "a b c"]}
    with pool_of(directories[2:], embedding=directories[1]) as pool:  # no limit: all fit
        alone = (await fetch(app_of(pool), EMBEDDINGS, texts)).json()
        await fetch(app_of(pool), CHAT, body_of(CHAT, "c"))
        assert all(model.memory for model in pool.all_models)
    with pool_of(directories[:1], *limited(size), embedding=directories[1]) as pool:
        app, (chat, embedding) = app_of(pool), pool.all_models
        for loads in range(1, 3):
            assert answering(await chat_with(app, "a")) == "a"
            assert (chat.memory > 0, embedding.memory) == (True, 0)
            assert (await fetch(app, EMBEDDINGS, texts)).json() == alone
            assert (chat.memory, embedding.memory > 0) == (0, True)
            assert (chat.loads, embedding.loads) == (loads, loads)
        metrics = (await fetch(app, "/metrics")).body.decode()
        assert 'akunu_model_loads_total{model="b"} 2' in metrics
        listed = (await fetch(app, "/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["a", "b"]
        assert (await fetch(app, "/health")).json()["models"] == {"a": "unloaded", "b": "ready"}


async def test_a_model_that_cannot_be_loaded_leaves_the_others_alone(
    directories: list[Path], size: int, tmp_path: Path
) -> None:
    broken, large = (write_served_model(tmp_path / name) for name in ("broken", "large"))
    write_tiny_llama(large, vocab_size=200_000, hidden_size=8)
    with pool_of([directories[0], large], *limited(size)) as pool:
        app = app_of(pool)
        replies = [await chat_with(app, name) for name in ("a", "large", "a")]
        assert replies[1].status == 503
        assert "needs about" in replies[1].json()["error"]["message"]
        assert (answering(replies[2]), pool.models[0].loads) == ("a", 1)
    with pool_of([directories[0], broken]) as pool:
        app = app_of(pool)
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
        replies = [await chat_with(app, name) for name in ("broken", "a")]
        assert replies[0].status == 503
        assert "cannot load broken: " in replies[0].json()["error"]["message"]
        assert answering(replies[1]) == "a"
        states = (await fetch(app, "/health")).json()["models"]
        assert states == {"a": "ready", "broken": "failed"}
        listed = (await fetch(app, "/v1/models")).json()
        assert [each["state"] for each in listed["data"]] == ["ready", "failed"]
        assert (listed["first_id"], listed["last_id"]) == ("a", "broken")


@pytest.mark.parametrize("path", CLIENTS)
async def test_unknown_names_are_answered_by_the_first_model(
    directories: list[Path], path: str
) -> None:
    """Agents request names such as claude-haiku; a strict server refuses them."""
    seen: list[RequestRecord] = []
    with pool_of(directories[:2], "--alias", "gpt-4o", "--alias", "claude-haiku=b") as pool:
        app = app_of(pool, RequestRecords(seen.append))
        names = {"gpt-4o": "a", "claude-haiku": "b", "b": "b", "b:latest": "b", "gpt-9": "a"}
        for name, model in names.items():
            assert text_of(path, await fetch(app, path, body_of(path, name)))[0] == model
        assert [record.model for record in seen] == list(names.values())
        assert f"{path} 200 · b · " in seen[1].line()
        strict = app_of(pool, strict=True)
        reply = await fetch(strict, path, body_of(path, "gpt-9"))
        assert reply.status == 404
        assert "serves a, b, not 'gpt-9'" in reply.json()["error"]["message"]
        assert text_of(path, await fetch(strict, path, body_of(path, "b")))[0] == "b"


def test_wrong_lists_are_named(directories: list[Path], tmp_path: Path) -> None:
    a, b = directories[:2]
    same = write_served_model(tmp_path / "a")
    for words, message in (
        (("--alias", "x=z"), "unknown model 'z'; models: a, b"),
        (("--model", str(same)), "two of the models have the same name: a"),
        (("--hosts", "2"), "--hosts serves one model"),
    ):
        with pytest.raises(UsageError, match=message), pool_of([a, b], *words):
            pass
    with pytest.raises(UnknownModel, match="nothing-here"), pool_of([a], "--model", "nothing-here"):
        pass
    with pool_of([a, b, a], "--context", "64", embedding=directories[2]) as pool:
        assert [model.context_length for model in pool.all_models] == [64] * 3  # not loaded
        assert [model.name for model in pool.all_models] == ["a", "b", "c"]


def test_settings_and_environment_list_models(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separated by commas; --model takes their place."""
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    a, b, c = map(str, directories)

    def names(*words: str) -> list[str]:
        args = parser.parse_args(words)
        return [model.name for model in serve.served_models(args, serve_settings())]

    settings_file().parent.mkdir(parents=True, exist_ok=True)
    settings_file().write_text(f"[serve]\nmodel = '{a}, {b}'\n")
    assert names() == ["a", "b"]
    monkeypatch.setenv("AKUNU_MODEL", f"{c},{a}")
    assert names() == ["c", "a"]
    assert names("--model", b) == ["b"]
