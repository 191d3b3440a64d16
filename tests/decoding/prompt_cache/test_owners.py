"""Only stored requests of existing conversations reach the disk.

Random requests, cancellations, deletions, restarts and memory shortage. After each of them, every
file contains the beginning of a text that may be on disk, and no draft a text of another owner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from akunu_py.decoding.events import Event, Failed, Finished
from akunu_py.decoding.generate import session as session_module
from akunu_py.decoding.generate.answer_jobs import AnswerEvents, text_job
from akunu_py.decoding.generate.disk_prompt_caches import DiskPromptCaches
from akunu_py.decoding.generate.job import Job, JobHandle
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache import cache_file, prompt_cache_store
from akunu_py.decoding.prompt_cache.prompt_cache_store import (
    DiskLimits,
    PromptCacheStore,
    all_files,
    forget_conversation,
)
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.types import GenerateOptions
from tests.support.engines import altered
from tests.support.slow import slow
from tests.support.targets import some
from tests.support.tiny_fim import load_tiny

pytestmark = pytest.mark.usefixtures("own_directories", "all_worth_storing")

CONVERSATIONS = ["", "a", "b", "c"]
LEG = 40  # answer tokens between two reservations of memory
LEAST = 16  # tokens of a file
UNDELIVERED = 2  # tokens of a cancelled answer in the cache, after the delivered ones


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])
    return altered(engine, context_length=4096, stop_tokens=frozenset())


@pytest.fixture
def all_worth_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill seems slow, and short texts count too."""
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: tokens * 1e3)
    for module in (prompt_cache_store, "akunu_py.decoding.generate.disk_prompt_caches"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.LEAST", LEAST)
    monkeypatch.setattr("akunu_py.decoding.prompt_cache.memory.LEAST", LEAST)
    monkeypatch.setattr("akunu_py.decoding.target.LEAST", LEAST)
    monkeypatch.setattr(session_module, "_RESERVED_TOKENS", LEG)


@dataclass
class Asked:
    """A request, and whether its text may be on disk."""

    conversation: str
    may_store: bool
    prompt: list[int]
    count: int
    deleted: bool = False  # its conversation, after the request
    answering: AnswerEvents | None = None

    @property
    def job(self) -> Job:
        options = GenerateOptions(
            self.count, conversation=self.conversation, may_store=self.may_store
        )
        begin = text_job(self.prompt, options)

        def start(session: Session) -> AnswerEvents:
            answering = begin(session)
            assert isinstance(answering, AnswerEvents)
            self.answering = answering
            return answering

        return start

    @property
    def text(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prompt, *(self.answering.request.tokens if self.answering else [])]


@dataclass
class World:
    """A server that is restarted now and then, and all its requests."""

    engine: Engine
    draw: random.Random
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        store = PromptCacheStore(self.engine.path, DiskLimits(reserve=0))
        learned = LearnedState(self.engine.path, "t", "l", answer_cache=True, caches=store)
        self.loop = StepLoop(Session(self.engine, learned), 3)

    def new_request(self) -> Asked:
        draw = self.draw
        before = [each.text for each in self.asked if each.answering] or [[]]
        start = draw.choice([draw.choice(before), some(60, draw.randrange(3)), []])
        start = start[: draw.choice([len(start), len(start), 50, 20])]
        prompt = [*start[:600], *some(draw.randrange(20, 60), draw.randrange(1 << 30))]
        return Asked(
            draw.choice(CONVERSATIONS), draw.random() < 0.5, prompt, draw.choice([3, 3 * LEG])
        )

    def serve(self, count: int) -> None:
        """Run some requests at the same time, and cancel some of them."""
        handles: dict[int, int] = {}
        for _ in range(count):
            asked = self.new_request()
            self.asked.append(asked)
            handle = JobHandle(asked.job, lambda event: None, "", lambda: None, short=False)
            handles[id(handle)] = self.draw.choice([2, 9, 1000, 1000])  # steps before cancelling
            self.loop.begin(handle)
        while handles:
            for handle, events in self.loop.step():
                handles[id(handle)] -= 1
                if not handles[id(handle)]:
                    handle.cancel()
                if ended(events):
                    del handles[id(handle)]

    def delete(self, conversation: str) -> None:
        forget_conversation(conversation)
        for each in self.asked:
            each.deleted |= each.conversation == conversation

    def check(self) -> None:
        allowed = [each.text for each in self.asked if each.may_store and not each.deleted]
        for path in all_files():
            metadata = cache_file.read(path).metadata
            text = [*metadata.tokens, *metadata.pending]
            shared = max(common_prefix(each, text) for each in [*allowed, []])
            assert shared >= len(text) - UNDELIVERED, metadata.conversation


def ended(events: list[Event]) -> bool:
    assert not events or not isinstance(events[-1], Failed), events[-1]
    return bool(events) and isinstance(events[-1], Finished)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, *slow(0, 1)])
def test_only_stored_requests_of_existing_conversations_reach_the_disk(
    tiny: Engine, seed: int
) -> None:
    draw = random.Random(seed)
    tight = tiny.plan.fit.needs.cache.at(300) * 2
    engine = altered(tiny, prompt_cache_memory=draw.choice([1 << 30, tight]))
    world = World(engine, draw)
    for _ in range(10):
        world.serve(draw.choice([1, 1, 3]))
        if draw.random() < 0.3:
            world.delete(draw.choice(CONVERSATIONS[1:]))
        while draw.random() < 0.8 and world.loop.save_idle(lambda: False, None):
            world.check()
        if draw.random() < 0.3:
            world.start()
        world.check()
    assert any(each.may_store for each in world.asked)


def test_a_deleted_conversation_that_another_one_branched_from_is_not_stored_again(
    tiny: Engine,
) -> None:
    world = World(altered(tiny, prompt_cache_memory=1 << 30), random.Random(0))
    options = GenerateOptions(2, conversation="a")
    session = world.loop._sessions[0]
    session.generate(some(600, 1), options).answer()
    assert session.save_idle()
    world.start()
    session = world.loop._sessions[0]
    branch = [*some(600, 1)[:200], *some(200, 2)]
    session.generate(branch, replace(options, conversation="b")).answer()
    forget_conversation("a")
    assert session.save_idle()
    assert not session.save_idle()
    (path,) = all_files()
    assert cache_file.read(path).metadata.tokens[:400] == branch


def test_a_side_request_leaves_only_the_prefix_of_its_conversation(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk, too; its answer is no evidence for other conversations."""
    world = World(altered(tiny, prompt_cache_memory=1 << 30), random.Random(0))
    session = world.loop._sessions[0]
    options = GenerateOptions(8, conversation="a")
    prompt = some(600, 1)
    turn = [*prompt, *session.generate(prompt, options).answer().tokens]
    session.release()
    learned: list[object] = []
    monkeypatch.setattr(session.learned, "add_answer", learned.append)
    side = [*turn, *some(20, 2)]
    aside = replace(options, side_request=True)
    assert session.generate(side, aside, stable=len(turn)).answer().tokens
    session.release()
    assert not learned
    assert session.drafting._private is not None
    assert session.drafting._private[0] == "a"
    assert session.save_idle()
    (path,) = all_files()
    metadata = cache_file.read(path).metadata
    assert (metadata.tokens, metadata.conversation) == (turn, "a")
    following = [*turn, *some(20, 3)]
    answer = session.generate(following, options).answer()
    assert answer.stats.cached_tokens == len(turn)
    assert answer.tokens == Session(tiny).generate(following, options).answer().tokens
    assert learned == [answer.tokens] or learned == [list(answer.tokens)]


@pytest.mark.long
def test_a_private_answer_that_loses_its_memory_is_not_stored(tiny: Engine) -> None:
    world = World(
        altered(tiny, prompt_cache_memory=tiny.plan.fit.needs.cache.at(512)), random.Random(0)
    )
    world.asked = [
        Asked("a", may_store=False, prompt=some(200, seed), count=6 * LEG) for seed in (1, 2)
    ]
    handles = [
        JobHandle(each.job, lambda event: None, "", lambda: None, short=False)
        for each in world.asked
    ]
    for each in handles:
        world.loop.begin(each)
    running = len(handles)
    while running:
        running -= sum(ended(events) for _, events in world.loop.step())
    assert all(len(each.text) == len(each.prompt) + each.count for each in world.asked)
    assert not world.loop.save_idle(lambda: False, None)
    assert all_files() == []
