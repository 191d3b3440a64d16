"""Every dialect returns the tokens of a session without drafts: greedy and seeded, streamed or not,
with and without drafts, alone and in a batch with three clients of other dialects."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
from starlette.types import ASGIApp

from akunu_py.serve.http.asgi import create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool
from akunu_py.serve.http.record import RequestRecords
from akunu_py.types import DraftMode
from tests.support.dialects import DIALECTS, DialectClient, DialectRequest, ReplyData
from tests.support.jobs import open_jobs
from tests.support.serving import Served, ask

DRAFTS: tuple[DraftMode, ...] = ("off", "fixed", "auto")
SEEDS = [(0.0, 0), (0.9, 1), (0.9, 2**32 - 1)]
MODES = [*itertools.product((False, True), DRAFTS)]  # streamed or not, with drafts or without


@pytest.fixture(scope="module")
def app_with(tiny: Served) -> Callable[[DraftMode], ASGIApp]:
    """Applications on the same model, by draft mode."""

    @cache
    def app(draft: DraftMode) -> ASGIApp:
        backend, service = tiny.backend(RequestRecords()), tiny.model.service()
        changed = replace(service, defaults=replace(service.defaults, draft=draft))
        model = copy.copy(tiny.model)
        model.service = lambda: changed  # type: ignore[method-assign]
        backend = replace(backend, pool=ModelPool([model]))
        return create_app(backend, AccessRules(), heartbeat_s=60)

    return app


def new_request(dialect: DialectClient, rng: random.Random, draft: DraftMode) -> DialectRequest:
    """Return a request that no other test sends; the answer cache would answer it."""
    temperature, seed = rng.choice(SEEDS) if dialect.seeded else SEEDS[0]
    text = "".join(rng.choices("ab(\n", k=rng.randrange(1, 30))) * 2
    return DialectRequest((f"{text}x{rng.random()}",), 24, temperature, seed, draft)


async def hold_model(tiny: Served, waiting: int) -> asyncio.Future[int]:
    """Hold the model until `waiting` jobs wait; then count the running jobs after one step."""
    loop, held = asyncio.get_running_loop(), threading.Event()
    running = loop.create_future()

    def count(engine: object) -> None:
        loop.call_soon_threadsafe(running.set_result, open_jobs(tiny.scheduler)[1])

    def hold(engine: object) -> None:
        held.set()
        while open_jobs(tiny.scheduler)[0] < waiting:
            threading.Event().wait(0.001)
        tiny.scheduler.call(count)  # between the first two steps

    tiny.scheduler.call(hold)
    await asyncio.to_thread(held.wait)
    return running


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize("name", DIALECTS)
async def test_text_equals_run_without_drafts(
    tiny: Served, app_with: Callable[[DraftMode], ASGIApp], name: str
) -> None:
    rng, drafted = random.Random(f"{name} 1"), dict.fromkeys(DRAFTS, 0)

    def expected_reply(dialect: DialectClient, request: DialectRequest) -> ReplyData:
        text: ReplyData = tiny.in_thread(partial(dialect.expected, request))
        return text

    async def send(dialect: DialectClient, request: DialectRequest, *, stream: bool) -> ReplyData:
        app = app_with(request.draft)
        return dialect.parse(
            await ask(app, dialect.path, dialect.request_body(request, stream=stream))
        )

    def check(reply: ReplyData, expected: ReplyData, draft: DraftMode) -> None:
        assert (reply.text, reply.prompt) == (expected.text, expected.prompt)
        drafted[draft] += reply.drafted

    for stream, draft in MODES:
        request = new_request(DIALECTS[name], rng, draft)
        expected = expected_reply(DIALECTS[name], request)
        check(await send(DIALECTS[name], request, stream=stream), expected, draft)
    others = rng.sample([each for each in DIALECTS if each != name], 3)
    requests = [
        (DIALECTS[each], new_request(DIALECTS[each], rng, draft), stream)
        for each, (stream, draft) in zip([name, *others], rng.sample(MODES, 4), strict=True)
    ]
    expected_replies = [expected_reply(dialect, request) for dialect, request, _ in requests]
    running = await hold_model(tiny, 4)
    replies = [send(dialect, request, stream=stream) for dialect, request, stream in requests]
    for (_, request, _), reply, expected in zip(
        requests, await asyncio.gather(*replies), expected_replies, strict=True
    ):
        check(reply, expected, request.draft)
    assert await running == 4
    assert not drafted["off"]
    assert drafted["fixed"] or name == "infill"  # completions may end before their first draft
