"""Why a prompt is read again: every way that a text which was read can be lost, and the reason that
the answer's statistics give, with how many tokens were known."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from akunu_py import paths
from akunu_py.decoding.generate.disk_prompt_caches import DiskPromptCaches
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.prompt_cache_store import (
    DiskLimits,
    PromptCacheStore,
    all_files,
)
from akunu_py.types import GenerateOptions, NotCached
from tests.support.engines import altered
from tests.support.families import build
from tests.support.targets import some
from tests.support.tiny_fim import load_tiny

pytestmark = pytest.mark.usefixtures("own_directories")

OPTIONS = GenerateOptions(max_tokens=2, draft="off")
PRIVATE = replace(OPTIONS, may_store=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])
    model = build("llama", head_dim=32)
    return altered(
        engine, model=model, vocabulary=96, context_length=4096, prompt_cache_memory=1 << 30
    )


@dataclass
class Case:
    """A text that was read in one session, and a prompt that has its first `shared` tokens."""

    engine: Engine
    text: list[int]
    shared: int
    patch: pytest.MonkeyPatch
    session: Session | None = None

    @property
    def prompt(self) -> list[int]:
        return [*self.text[: self.shared], *([95 - self.text[self.shared]] * 20)]

    def open(self, **changes: object) -> Session:
        self.engine = altered(self.engine, **changes)
        caches = PromptCacheStore(self.engine.path, DiskLimits(reserve=0))
        state = LearnedState(paths.cache_dir(), "t", "l", answer_cache=False, caches=caches)
        self.session = Session(self.engine, state)
        return self.session

    def read(self, options: GenerateOptions = OPTIONS, **changes: object) -> Session:
        session = self.open(**changes)
        session.generate(self.text, options).answer()
        return session

    def saved(self, **changes: object) -> Path:
        """Where it is on disk, after a restart."""
        assert self.read(OPTIONS, **changes).save_idle()
        (path,) = all_files()
        self.session = None
        return path


def nothing_read(case: Case) -> None:
    case.open()


def changed(case: Case) -> None:
    case.read()


def changed_on_disk(case: Case) -> None:
    case.saved()


def evicted(case: Case) -> None:
    session = case.read()
    session.target.reuse_prefix(some(300, 99))
    session.target.caches.make_room(session.target.caches.limit)


def no_memory_at_all(case: Case) -> None:
    session = case.read(prompt_cache_memory=0)
    session.generate(some(300, 99), OPTIONS).answer()


def cut_without_memory(case: Case) -> None:
    """The end of a text went for another one that parted from it."""
    session = case.read(prompt_cache_memory=0)
    session.generate(case.text[:10], OPTIONS).answer()


def evicted_from_disk(case: Case) -> None:
    case.saved().unlink()


def damaged(case: Case) -> None:
    path = case.saved()
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def cut_off(case: Case) -> None:
    path = case.saved()
    os.truncate(path, path.stat().st_size // 2)


def other_width(case: Case) -> None:
    case.saved(kv_bits=8)
    case.open(kv_bits=None)


def quantized_now(case: Case) -> None:
    case.saved()
    case.open(kv_bits=8)


def fetched_again(case: Case) -> None:
    case.saved()
    case.open(identity="another")


def laid_out_otherwise(case: Case) -> None:
    case.saved()
    case.open(weights="other")


def other_tokenizer(case: Case) -> None:
    case.saved()
    case.open(digest="other")


def smaller_context(case: Case) -> None:
    case.saved()
    case.open(context_length=len(case.text))


def read_faster(case: Case) -> None:
    case.saved()
    case.patch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: tokens * 1e-9)


def private(case: Case) -> None:
    assert not case.read(PRIVATE).save_idle()
    case.session = None


def window(case: Case) -> None:
    case.read(model=build("llama-sliding"))


def window_on_disk(case: Case) -> None:
    case.saved(model=build("llama-sliding"))


WAYS: dict[Callable[[Case], None], tuple[NotCached, bool]] = {  # and whether it is known
    nothing_read: ("", False),
    changed: ("changed", True),
    changed_on_disk: ("changed", True),
    evicted: ("evicted", True),
    no_memory_at_all: ("evicted", True),
    cut_without_memory: ("evicted", True),
    evicted_from_disk: ("", False),
    damaged: ("damaged file", True),
    cut_off: ("", False),  # what it held cannot be told
    other_width: ("other KV width", True),
    quantized_now: ("other KV width", True),
    fetched_again: ("other weights", True),
    laid_out_otherwise: ("other weights", True),
    other_tokenizer: ("", False),  # the same numbers are another text
    smaller_context: ("other context", True),
    read_faster: ("slow disk", True),
    private: ("", False),
    window: ("no checkpoint", True),
    window_on_disk: ("no checkpoint", True),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_to_lose_a_text_has_its_reason(
    way: Callable[[Case], None], tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: float(tokens))
    draw = random.Random(way.__name__)
    length = draw.randrange(400, 600)
    case = Case(tiny, some(length, length), draw.randrange(300, length - 50), monkeypatch)
    way(case)
    session = case.session or case.open()
    generation = session.generate(case.prompt, OPTIONS)
    tokens = generation.answer().tokens
    reason, known = WAYS[way]
    stats = generation.stats
    assert stats.not_cached == reason
    assert stats.known_tokens == (case.shared if known else 0)
    assert (stats.cached_tokens < stats.known_tokens) == (reason not in ("", "changed"))
    assert tokens == Session(case.engine).generate(case.prompt, OPTIONS).answer().tokens


def test_memory_switched_off_knows_nothing_of_the_disk(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: float(tokens))
    case = Case(tiny, some(400, 1), 300, monkeypatch)
    case.saved()
    generation = case.open().generate(case.prompt, PRIVATE)
    generation.answer()
    assert (generation.stats.known_tokens, generation.stats.not_cached) == (0, "")
