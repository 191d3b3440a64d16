"""Before a prompt is read there is memory for it: other texts go, or it is refused."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from akunu_py.decoding import device
from akunu_py.decoding.generate import memory_guard
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import DoesNotFit
from akunu_py.models.load.fit import Activations, CacheGrowth, FittedContext, MemoryNeeds
from akunu_py.types import GenerateOptions
from tests.support.engines import altered
from tests.support.targets import some
from tests.support.tiny_fim import load_tiny

OPTIONS = GenerateOptions(max_tokens=4, draft="off")
TOKEN = 256  # bytes of the tiny model's KV cache
WORK = 1000  # bytes that passes need


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's index is larger than the KV cache of the tiny model."""
    monkeypatch.setattr(memory_guard, "INDEX_BYTES", 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])
    needs = MemoryNeeds(0, CacheGrowth(TOKEN), Activations(0, 0, 0, 0), 4096)
    return altered(
        engine,
        context_length=4096,
        prompt_cache_memory=1 << 30,
        fit=FittedContext(needs, 4096, 1 << 40),
    )


def session_with(
    engine: Engine, tokens: int, monkeypatch: pytest.MonkeyPatch, *, forced: bool = False
) -> Session:
    """A session on a machine with memory for so many tokens."""
    session = Session(altered(engine, forced=forced))

    def left(limit: int | None = None) -> int:
        held = session.target.history.nbytes + session.target.caches.nbytes
        return tokens * TOKEN - held

    monkeypatch.setattr(device, "memory_left", left)
    return session


def texts(session: Session) -> int:
    return len(session.target.caches.histories()) + bool(session.target.tokens)


def test_the_bytes_of_a_token_are_those_of_the_model(tiny: Engine) -> None:
    session = Session(tiny)
    session.generate(some(512, 1), OPTIONS).answer()
    assert session.target.history.nbytes == pytest.approx(TOKEN * 768)


@pytest.mark.long
def test_other_texts_go_first(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_with(tiny, 1700, monkeypatch)
    for seed in (1, 2, 3):
        session.generate(some(200, seed), OPTIONS).answer()
    assert texts(session) == 3
    session.generate(some(1000, 4), OPTIONS).answer()
    assert texts(session) == 3  # one is gone, which is enough
    again = session.generate([*some(1000, 4), 5], OPTIONS)
    assert again.answer().stats.cached_tokens >= 1000
    # What is asked for stays, and so does what need not go.
    for length, seed in ((300, 5), (1300, 6)):
        session.generate(some(length, seed), OPTIONS).answer()
    assert texts(session) == 1


def test_what_does_not_fit_is_refused_and_nothing_is_lost(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_with(tiny, 1600, monkeypatch)
    kept = some(300, 1)
    session.generate(kept, OPTIONS).answer()
    with pytest.raises(DoesNotFit) as refused:
        session.generate([*kept, *some(1700, 2)], OPTIONS).answer()
    for word in ("2,000 tokens", "shorten it to", "smaller model", "--force"):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    again = session.generate([*kept, 5], OPTIONS)
    assert again.answer().stats.cached_tokens >= len(kept)


def test_what_is_shortened_to_what_it_says_fits(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_with(tiny, 1600, monkeypatch)
    with pytest.raises(DoesNotFit) as refused:
        session.generate(some(3000, 1), OPTIONS).answer()
    words = str(refused.value).split("shorten it to ")[1]
    session.generate(some(int(words.split()[0].replace(",", "")), 1), OPTIONS).answer()


def test_a_long_answer_that_may_never_come_is_no_reason(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_with(tiny, 800, monkeypatch)
    long = replace(OPTIONS, max_tokens=3000)
    generation = session.generate(some(200, 1), long)
    steps = iter(generation)
    next(steps)
    generation.cancel()
    list(steps)


def test_force_tries_it(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_with(tiny, 100, monkeypatch, forced=True)
    assert session.generate(some(1000, 1), OPTIONS).answer().tokens


def test_a_limit_of_ones_own_counts_all_that_mlx_holds() -> None:
    limit = mx.get_active_memory() + 1000
    assert device.memory_left(limit) <= 1000 < device.memory_left()
