"""Read once: five conversations in turn, edits in the middle, templates that rewrite earlier
turns, a restart. Each turn reads what is new, and its answer is that of a session that never held
anything else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from akunu_py.decoding.engine import Engine
from akunu_py.decoding.learned import LearnedState
from akunu_py.decoding.prompt_cache.store import DiskLimits, PromptCacheStore
from akunu_py.decoding.recall import Recall
from akunu_py.decoding.session import Session
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.support.families import build
from tests.support.targets import Counting, some
from tests.support.tiny_fim import load_tiny

pytestmark = pytest.mark.usefixtures("uncompiled", "own_directories")

# Plain, sliding window, chunked, recurrent hybrid, latent attention, quantized.
KINDS = ["llama", "llama-sliding", "llama4", "qwen3_next", "deepseek_v3", "llama-kv8"]
LIMITS = DiskLimits(reserve=0)
GREEDY = GenerateOptions(max_tokens=6)
SEEDED = GenerateOptions(
    max_tokens=6, sampling=SamplingOptions(temperature=0.8, seed=3), draft="fixed"
)
ASKS = some(5, 99)  # what a template adds for an answer; the next turn begins with two of them
KEPT = 2
NEW = 30  # tokens that a user adds


@dataclass
class Talk:
    """A conversation, as its template renders it. stable: of which the next turn will begin."""

    known: list[int]
    turns: int = 0
    asked: list[int] = field(default_factory=list)

    def ask(self, session: Session, options: GenerateOptions) -> tuple[int, list[int]]:
        """How many tokens the model read for the next turn, and its answer."""
        self.turns += 1
        self.asked = [*self.known, *some(NEW, 7 * len(self.known) + self.turns), *ASKS]
        stable = len(self.asked) - len(ASKS) + KEPT
        model = session.engine.model
        model.rows = 0
        generation = session.generate(self.asked, options, stable=stable)
        said = list(generation.answer().tokens)
        read = len(self.asked) - generation.stats.cached_tokens
        assert model.rows >= read  # it was not made up
        self.known = [*self.asked[:stable], *said]
        return read, said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a token with the model takes a second, so that all is worth keeping."""
    monkeypatch.setattr(Recall, "_prefill_s", lambda self, tokens: float(tokens))


def engine_of(tiny: Engine, name: str) -> Engine:
    return replace(
        tiny,
        model=Counting(build(name)),
        weights=name,
        vocabulary=96,
        context_length=40_000,
        cache_memory=4 << 30,
        kv_bits=None,
    )


def opened(engine: Engine, path: Path) -> Session:
    """A session as after a start."""
    store = PromptCacheStore(engine.path, LIMITS)
    return Session(engine, LearnedState(path, "t", "l", memory=False, caches=store))


def most(session: Session) -> int:
    """Tokens that a turn may read, where its text goes on: what is new, and what a cache with few
    ways back leaves to the first pass."""
    return NEW + len(ASKS) + GREEDY.max_tokens + session.target.prompt_tail


def hold(
    tiny: Engine, name: str, tmp_path: Path, length: int, checked: Callable[[int], bool]
) -> None:
    """Five conversations of so many tokens. checked: the turns that a fresh session answers too."""
    engine = engine_of(tiny, name)
    session = opened(engine, tmp_path)
    talks = [Talk(some(length, seed)) for seed in range(5)]
    turns = itertools.count()

    def turn(talk: Talk, most_read: int) -> None:
        number = next(turns)
        options = SEEDED if number % 2 else GREEDY
        read, said = talk.ask(session, options)
        assert read <= most_read, (number, read)
        if checked(number):
            assert said == list(Session(engine).generate(talk.asked, options).answer().tokens)

    for talk in talks:
        turn(talk, length + NEW + len(ASKS))
    for number in range(20):
        turn(talks[number * 3 % 5], most(session))
    while session.save_idle():
        pass
    session = opened(engine, tmp_path)
    for talk in talks:
        turn(talk, most(session))
    # An edit: it goes back to the end of an earlier turn, or to the checkpoint before.
    edited = talks[4]
    edited.known = edited.known[: len(edited.known) - 2 * (NEW + KEPT + 6)]
    turn(edited, max(2048, length // 4) if session.target.history.needs_checkpoints else 3 * NEW)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", KINDS)
def test_five_conversations(name: str, tiny: Engine, tmp_path: Path) -> None:
    hold(tiny, name, tmp_path, 300, lambda number: number in (6, 17, 25, 28, 30))


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", KINDS)
def test_five_conversations_of_16000_tokens(name: str, tiny: Engine, tmp_path: Path) -> None:
    hold(tiny, name, tmp_path, 16_000, lambda number: number in (7, 14, 26, 29, 30))
