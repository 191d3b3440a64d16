"""In every dialect that has conversations, a turn of a long one reads only what is new: the second
one, one behind a client that hung up in the middle of a prompt, one after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from akunu_py.decoding import kv_cache
from akunu_py.decoding.events import Event, Finished, PrefillProgress
from akunu_py.decoding.generate.session import DiskPromptCaches, Session
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.prompt_cache_store import DiskLimits, PromptCacheStore
from akunu_py.decoding.scheduling.job import Job
from akunu_py.models.load.fit import FittedContext
from akunu_py.serve.http.asgi import create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.record import RequestRecords
from akunu_py.types import Stats
from tests.support.dialects import CONVERSATIONS, DIALECTS, Asked, Spoken, Told
from tests.support.engines import altered
from tests.support.families import build
from tests.support.serving import Served, ask, served, write_served_model

pytestmark = pytest.mark.usefixtures("uncompiled", "own_directories", "kept")

CHUNK = 256  # tokens of a prompt
# Few heads: what a CPU computes of 16,000 tokens is attention.
KINDS = {"llama": {"num_attention_heads": 1, "num_key_value_heads": 1}, "qwen3_next": {}}
ANSWER = 12
MORE = "And what came of that?"


class Printable:
    """A model that says printable characters only: its text has the tokens that it wrote."""

    def __init__(self, model: Any, known: mx.array) -> None:
        self._model, self._known = model, known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return mx.where(self._known, self._model(*args, **options), -1e9)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a token with the model takes a second, so that all is worth keeping; and prompts are
    read so many at a time."""
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: float(tokens))
    monkeypatch.setattr(FittedContext, "prefill_rows", CHUNK)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "model")


def session_of(kind: str, engine: Engine) -> Session:
    """A session of that kind of model behind the engine's tokenizer, as after a start."""
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
        no_draft=kv_cache.why_no_rollback(cache),
        weights=kind,
    )
    store = PromptCacheStore(engine.path, DiskLimits(reserve=0))
    return Session(engine, LearnedState(engine.path, "t", "l", memory=False, caches=store))


async def say(model: Served, spoken: Spoken, asked: Asked) -> Told:
    return spoken.told(await ask(model.app, spoken.path, spoken.asks(asked, stream=True)))


async def leave(model: Served, spoken: Spoken, asked: Asked, after: int) -> int:
    """Asks, and hangs up when so many tokens were read. Returns how many those are."""
    loop, hung_up, read = asyncio.get_running_loop(), asyncio.Event(), 0

    async def run(job: Job, client: str, short: bool) -> AsyncGenerator[Event]:
        cancelled = threading.Event()

        def watched(session: Session) -> Iterator[Event | None]:
            nonlocal read
            for event in job(session):
                yield event
                assert isinstance(event, PrefillProgress)
                if event.done >= after:
                    read = event.done
                    loop.call_soon_threadsafe(hung_up.set)
                    assert cancelled.wait(60)

        try:
            async with contextlib.aclosing(model.model.run(watched, client, short)) as events:
                async for event in events:
                    yield event
        finally:
            cancelled.set()

    app = create_app(
        replace(model.model.backend(RequestRecords()), run=run), AccessRules(), heartbeat_s=60
    )
    reply = await ask(app, spoken.path, spoken.asks(asked, stream=True), hung_up=hung_up)
    assert not reply.ended
    return read


def save(model: Served) -> None:
    """What the thread does when nobody asks for a while."""
    saved = threading.Event()

    def job(session: Session) -> Iterator[Event]:
        while session.save_idle():
            pass
        yield Finished("stop", Stats())

    model.scheduler.submit(job, lambda event: saved.set())
    assert saved.wait(60)


@dataclass
class Talk:
    """A conversation. known: how many tokens of it were read or written."""

    spoken: Spoken
    turns: tuple[str, ...]
    known: int = 0

    @property
    def asked(self) -> Asked:
        return Asked(self.turns, ANSWER)

    async def go_on(self, model: Served) -> tuple[int, int]:
        """The next turn: how many tokens its prompt has, and how many of them were read."""
        told = await say(model, self.spoken, self.asked)
        self.turns = (*self.turns, told.text, MORE)
        self.known = told.prompt + ANSWER
        return told.prompt, told.prompt - told.cached


def text(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh .", k=length))


async def hold(name: str, kind: str, length: int, directory: Path) -> dict[str, tuple[int, int]]:
    """Talks about a text of so many tokens. Returns the counts of each turn."""
    spoken, session = DIALECTS[name], partial(session_of, kind)
    talk, other = Talk(spoken, (text(length, 1),)), Talk(spoken, (text(2000, 2),))
    counts: dict[str, tuple[int, int]] = {}

    async def turn(model: Served, when: str) -> None:
        known = talk.known
        counts[when] = prompt, read = await talk.go_on(model)
        # The last token of an answer was not read yet.
        assert read == prompt - known + 1, (when, counts)
        assert read < 60

    with served(directory, session=session) as model:
        left = await leave(model, spoken, talk.asked, length // 2)
        counts["asked again"] = prompt, read = await talk.go_on(model)
        assert read <= prompt - left < prompt <= length + 60
        await turn(model, "second turn")
        await leave(model, spoken, other.asked, 1000)
        await turn(model, "behind one that hung up")
        save(model)
    with served(directory, session=session) as model:
        await turn(model, "after a restart")
        if length <= 2000:  # or a CPU takes a minute for it
            last = replace(talk.asked, turns=talk.turns[:-2])
            assert talk.turns[-2] == model.in_thread(partial(spoken.plain, last)).text
    return counts


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(CONVERSATIONS, itertools.cycle(["qwen3_next", "llama"]), strict=False)]
)
async def test_a_turn_reads_what_is_new(name: str, kind: str, directory: Path) -> None:
    await hold(name, kind, 1200, directory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_turn_of_16000_tokens_reads_what_is_new(
    name: str, kind: str, directory: Path
) -> None:
    print(name, kind, await hold(name, kind, 16_000, directory))  # with -rP they are shown
