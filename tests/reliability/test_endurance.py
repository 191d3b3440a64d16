"""Long runs leak no memory, open files or threads.

The slow form has 300 turns and 5,000 completions. `python -m tests.reliability.endurance` prints
the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.endurance import (
    CACHE_MEMORY,
    Run,
    Sample,
    chat,
    chat_in_the_app,
    completions,
    serving,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("own_directories")

MEGABYTE = 1_000_000
CACHE = 256  # bytes of a token in the tiny model's KV cache, which grows in steps of 256 tokens
A_TURN = 64  # tokens at most, of a prompt and its answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("endurance") / "tiny")


def quick_and_long(quick: int, long: int) -> pytest.MarkDecorator:
    slow = pytest.param(long, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="long")
    return pytest.mark.parametrize("count", [pytest.param(quick, id="quick"), slow])


def nothing_is_left(samples: list[Sample], active: int) -> None:
    """active: bytes that MLX may allocate after the warm-up, without the caches of texts."""
    first, last = samples[1], samples[-1]
    assert last.files <= first.files
    assert last.threads <= first.threads
    assert last.active - first.active <= active + CACHE_MEMORY
    assert sum(sample.passes for sample in samples) > 0


@quick_and_long(18, 300)
def test_one_conversation(count: int, model: Path) -> None:
    samples = chat(model, count, 12)
    nothing_is_left(samples, CACHE * (A_TURN * count + 512))
    # The conversation grows by a kilobyte a token.
    assert samples[-1].used - samples[1].used < 0.06 * MEGABYTE * count + 6 * MEGABYTE


@quick_and_long(18, 300)
def test_many_conversations(count: int, model: Path) -> None:
    samples = chat(model, count, 12, length=3)
    nothing_is_left(samples, CACHE * 512)
    assert samples[-1].used - samples[1].used < 4 * MEGABYTE


@quick_and_long(6, 300)
def test_the_app(count: int, model: Path) -> None:
    samples = chat_in_the_app(model, count, 12)
    nothing_is_left(samples, CACHE * (A_TURN * count + 512))
    assert samples[-1].rss - samples[1].rss < 0.6 * MEGABYTE * count + 10 * MEGABYTE


@pytest.mark.parametrize("run", [completions, serving])
@quick_and_long(120, 5000)
def test_completions_and_requests(run: Run, count: int, model: Path) -> None:
    samples = run(model, count, 12)
    nothing_is_left(samples, CACHE * 512)
    assert samples[-1].used - samples[1].used < 4 * MEGABYTE
