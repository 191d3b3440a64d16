"""Every dialect says what a plain session says, token for token: greedy and seeded, streamed or
not, with drafts and without, alone and among three other clients of other dialects."""

from __future__ import annotations

import asyncio
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
from akunu_py.serve.http.record import RequestRecords
from akunu_py.types import DraftMode
from tests.support.dialects import DIALECTS, Asked, Spoken, Told
from tests.support.serving import Served, ask

DRAFTS: tuple[DraftMode, ...] = ("off", "fixed", "auto")
SAMPLED = [(0.0, 0), (0.9, 1), (0.9, 2**32 - 1)]
WAYS = [*itertools.product((False, True), DRAFTS)]  # streamed or not, with drafts or without
numbers = itertools.count()


@pytest.fixture(scope="module")
def app_with(tiny: Served) -> Callable[[DraftMode], ASGIApp]:
    """The application on the same model, with other drafts."""

    @cache
    def app(draft: DraftMode) -> ASGIApp:
        backend, service = tiny.model.backend(RequestRecords()), tiny.model.service()
        changed = replace(service, defaults=replace(service.defaults, draft=draft))
        return create_app(replace(backend, service=lambda: changed), AccessRules(), heartbeat_s=60)

    return app


def asked_in(spoken: Spoken, dice: random.Random, draft: DraftMode) -> Asked:
    """A request that nobody asked before, or its answer would be remembered."""
    temperature, seed = dice.choice(SAMPLED) if spoken.seeded else SAMPLED[0]
    said = "".join(dice.choices("ab(\n", k=dice.randrange(1, 30))) * 2
    return Asked((f"{said}x{next(numbers)}",), 12, temperature, seed, draft)


async def held_until(tiny: Served, waiting: int) -> asyncio.Future[int]:
    """Holds the model until so many jobs wait for it. Gives how many ran after their first step."""
    loop, held = asyncio.get_running_loop(), threading.Event()
    ran = loop.create_future()

    def count(engine: object) -> None:
        loop.call_soon_threadsafe(ran.set_result, tiny.scheduler.counts().running)

    def hold(engine: object) -> None:
        held.set()
        while tiny.scheduler.counts().waiting < waiting:
            threading.Event().wait(0.001)
        tiny.scheduler.ask(count)  # between the first two steps

    tiny.scheduler.ask(hold)
    await asyncio.to_thread(held.wait)
    return ran


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", DIALECTS)
async def test_it_is_what_run_says(
    tiny: Served, app_with: Callable[[DraftMode], ASGIApp], name: str
) -> None:
    dice, drafted = random.Random(name), dict.fromkeys(DRAFTS, 0)

    def plain(spoken: Spoken, asked: Asked) -> Told:
        said: Told = tiny.in_thread(partial(spoken.plain, asked))
        return said

    async def say(spoken: Spoken, asked: Asked, *, stream: bool) -> Told:
        app = app_with(asked.draft)
        return spoken.told(await ask(app, spoken.path, spoken.asks(asked, stream=stream)))

    def check(told: Told, expected: Told, draft: DraftMode) -> None:
        assert (told.text, told.prompt) == (expected.text, expected.prompt)
        drafted[draft] += told.drafted

    for stream, draft in WAYS:
        asked = asked_in(DIALECTS[name], dice, draft)
        expected = plain(DIALECTS[name], asked)
        check(await say(DIALECTS[name], asked, stream=stream), expected, draft)
    others = dice.sample([each for each in DIALECTS if each != name], 3)
    together = [
        (DIALECTS[each], asked_in(DIALECTS[each], dice, draft), stream)
        for each, (stream, draft) in zip([name, *others], dice.sample(WAYS, 4), strict=True)
    ]
    alone = [plain(spoken, asked) for spoken, asked, _ in together]
    ran = await held_until(tiny, 4)
    replies = [say(spoken, asked, stream=stream) for spoken, asked, stream in together]
    for (_, asked, _), told, expected in zip(
        together, await asyncio.gather(*replies), alone, strict=True
    ):
        check(told, expected, asked.draft)
    assert await ran == 4
    assert not drafted["off"]
    assert drafted["fixed"]
