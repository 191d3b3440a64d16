"""A turn of a long conversation prefills only its new tokens, in every dialect with conversations:
the second turn, a turn after another client disconnected during prefill, a turn after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from akunu_py.decoding import kv_cache
from akunu_py.decoding.events import Event, Finished, PrefillProgress
from akunu_py.decoding.generate.job import Job
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.prompt_cache_store import (
    DiskLimits,
    DiskPromptCaches,
    PromptCacheStore,
)
from akunu_py.models.load.fit import FittedContext
from akunu_py.serve.http.asgi import create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.record import RequestRecords
from akunu_py.serve.http.request_handler import run_job
from akunu_py.types import Stats
from tests.support.dialects import CONVERSATIONS, DIALECTS, DialectClient, DialectRequest, ReplyData
from tests.support.engines import altered
from tests.support.families import build
from tests.support.jobs import scripted
from tests.support.serving import Served, fetch, served, write_served_model

pytestmark = pytest.mark.usefixtures("own_directories", "kept")

CHUNK = 256  # tokens of a prompt
KINDS = {"llama": {"num_attention_heads": 1, "num_key_value_heads": 1}, "qwen3_next": {}}
ANSWER = 12
MORE = "And what came of that?"


class Printable:
    """A model that generates only printable characters, so that its text has the same tokens."""

    def __init__(self, model: Any, known: mx.array) -> None:
        self._model, self._known = model, known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return mx.where(self._known, self._model(*args, **options), -1e9)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save every prompt cache, as if a token took a second to prefill; prefill CHUNK at a time."""
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: float(tokens))
    monkeypatch.setattr(FittedContext, "prefill_rows", CHUNK)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "model")


def session_of(kind: str, engine: Engine) -> Session:
    """Return a new session of a model of this kind with the engine's tokenizer."""
    size = engine.tokens.vocabulary
    texts = [engine.tokens.tokenizer.decode([token]) for token in range(size)]
    known = mx.array([len(text) == 1 and text.isascii() and text.isprintable() for text in texts])
    model = Printable(build(kind, vocab_size=size, **KINDS[kind]), known)
    cache = kv_cache.new_cache(model)
    engine = altered(
        engine,
        model=model,
        context_length=40_000,
        prompt_cache_memory=4 << 30,
        recurrent=kv_cache.is_recurrent(cache),
        no_draft_reason=kv_cache.no_rollback_reason(cache),
        weights=kind,
    )
    store = PromptCacheStore(engine.path, DiskLimits(reserve=0))
    return Session(engine, LearnedState(engine.path, "t", "l", answer_cache=False, caches=store))


async def send(model: Served, dialect: DialectClient, request: DialectRequest) -> ReplyData:
    return dialect.parse(
        await fetch(model.app, dialect.path, dialect.request_body(request, stream=True))
    )


async def disconnect_after(
    model: Served, dialect: DialectClient, request: DialectRequest, after: int
) -> int:
    """Send a request, disconnect once `after` tokens are prefilled; return the prefilled tokens."""
    left, prefilled = asyncio.Event(), 0

    async def run(host: ModelHost, job: Job, **options: Any) -> AsyncGenerator[Event]:
        nonlocal prefilled
        async with contextlib.aclosing(run_job(host, job, **options)) as events:
            async for event in events:
                if isinstance(event, PrefillProgress) and event.done >= after:
                    prefilled = prefilled or event.done
                    left.set()
                yield event

    backend = replace(model.backend(RequestRecords()), run=run)
    app = create_app(backend, AccessRules(), heartbeat_s=60)
    reply = await fetch(app, dialect.path, dialect.request_body(request, stream=True), left=left)
    assert not reply.ended
    return prefilled


def save(model: Served) -> None:
    """Save the prompt caches, as the model's thread does when idle."""
    saved = threading.Event()

    def job(session: Session) -> Iterator[Event]:
        while session.save_idle():
            pass
        yield Finished("stop", Stats())

    model.scheduler.submit(scripted(job), lambda event: saved.set())
    assert saved.wait(60)


def request_of(*turns: str) -> DialectRequest:
    return DialectRequest(turns, ANSWER)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"), [*zip(CONVERSATIONS, itertools.cycle(["qwen3_next", "llama"]), strict=False)]
)
async def test_turn_prefills_only_new_tokens(name: str, kind: str, directory: Path) -> None:
    dialect, session = DIALECTS[name], partial(session_of, kind)
    text = "".join(random.Random(1).choices("abcdefgh .", k=700))
    turns: tuple[str, ...] = (text,)
    known = 0

    async def send_turn(model: Served) -> tuple[int, int]:
        """Send the next turn; return the tokens of its prompt, and how many were prefilled."""
        nonlocal turns, known
        reply = await send(model, dialect, request_of(*turns))
        new_tokens = reply.prompt - reply.cached
        # The last token of an answer is not in the cache yet.
        assert not known or new_tokens == reply.prompt - known + 1 < 60
        turns, known = (*turns, reply.text, MORE), reply.prompt + ANSWER
        return reply.prompt, new_tokens

    with served(directory, session=session) as model:
        prefilled = await disconnect_after(model, dialect, request_of(text), 350)
        prompt, new_tokens = await send_turn(model)
        assert new_tokens <= prompt - prefilled < prompt <= 760
        await send_turn(model)
        await disconnect_after(model, dialect, request_of(text[::-1]), 300)
        await send_turn(model)
        save(model)
    with served(directory, session=session) as model:
        await send_turn(model)  # after a restart
        last = model.in_thread(partial(dialect.expected, request_of(*turns[:-2])))
        assert turns[-2] == last.text
