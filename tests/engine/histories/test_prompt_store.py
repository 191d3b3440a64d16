"""Prompt caches on disk: what is saved, loaded, refused and deleted, and whose text it is."""

import fcntl
import itertools
import json
import os
import random
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache

from akunu_py import paths
from akunu_py.engine import engine as engine_module
from akunu_py.engine.drafters.learned_state import LearnedState
from akunu_py.engine.engine import Engine, model_digest
from akunu_py.engine.events import Finished
from akunu_py.engine.histories import cache_file, disk, prompt_cache_store
from akunu_py.engine.histories.prompt_cache_store import (
    DiskLimits,
    PromptCacheStore,
    all_files,
    forget_conversation,
    is_forgotten,
)
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.target import Target
from akunu_py.errors import AkunuError, DamagedCache, StoreError, UsageError
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import GenerateOptions, NotCached
from tests.support.command import assert_one_line_error, run_here
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.full_disk import full_disk
from tests.support.identity import Served, Submitted
from tests.support.slow import slow
from tests.support.targets import answer, fresh, last_tokens, some
from tests.support.tiny import VOCABULARY, write_tiny_llama
from tests.support.tiny_fim import byte_level, write_chat_model, write_model

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_directories")]

LENGTH = 400
OPTIONS = GenerateOptions(max_tokens=2, draft="off")
PRIVATE = replace(OPTIONS, may_store=False)
NO_LIMITS = DiskLimits(reserve=0)


@pytest.fixture(scope="module")
def tiny(tiny: Engine) -> Engine:
    return altered(
        tiny, model=build("llama", head_dim=32), vocabulary=VOCABULARY, context_length=4096,
        prompt_cache_memory=1 << 30, stop_tokens=frozenset(),
    )  # fmt: skip


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


class FixedRate(CostCurve):
    """Costs with a constant prefill rate, in tokens per second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        super().__init__()

    @property
    def prefill_rate(self) -> float:
        return self._rate

    @prefill_rate.setter
    def prefill_rate(self, rate: float | None) -> None:
        pass


def learned(limits: DiskLimits = NO_LIMITS, rate: float = 1.0) -> LearnedState:
    """Return the state of a new process. At a token a second, all prompts are worth saving."""
    found = LearnedState(paths.cache_dir(), "t", "l", answer_cache=True, disk_limits=limits)
    found.curve = FixedRate(rate)
    return found


def opened(engine: Engine, *arguments: Any, clock: Clock | None = None, **options: Any) -> StepLoop:
    loop = StepLoop(engine, learned(*arguments, **options))
    if clock is not None:
        assert loop.runner.disk_caches is not None
        loop.runner.disk_caches._clock = clock
    return loop


def prompt(loop: StepLoop, tokens: list[int], options: GenerateOptions = OPTIONS) -> int:
    """Answer a prompt and return the number of cached tokens."""
    return loop.answer(tokens, options).stats.cached_tokens


def save(loop: StepLoop, seed: int) -> bool:
    """Prompt with a text of this seed; return whether it was saved."""
    prompt(loop, some(LENGTH, seed))
    return loop.idle_step()


def test_saved_caches_are_private_to_the_user_and_found_again(tiny: Engine) -> None:
    mask = os.umask(0)
    try:
        assert save(opened(tiny), 1)
    finally:
        os.umask(mask)
    (path,) = all_files()
    for each, mode in [(path, 0o600), (path.parent, 0o700), (path.parent.parent, 0o700)]:
        assert stat.S_IMODE(each.stat().st_mode) == mode
    assert prompt(opened(tiny), [*some(LENGTH, 1), 5]) >= LENGTH
    assert prompt(opened(tiny), some(LENGTH, 2)) == 0
    stats = opened(tiny).answer(some(LENGTH, 1), PRIVATE).stats
    assert (stats.cached_tokens, stats.known_tokens, stats.not_cached) == (0, 0, "")
    for other in ({"kv_bits": 8}, {"digest": "x"}, {"weights": "x"}):
        assert PromptCacheStore(altered(tiny, **other), NO_LIMITS, CostCurve()).saved() == []


def test_longer_texts_replace_their_prefix_and_branches_do_not(tiny: Engine) -> None:
    loop = opened(tiny)
    assert save(loop, 1)
    first = all_files()
    assert not loop.idle_step()
    prompt(loop, [*some(LENGTH, 1), *some(20, 2)])
    assert not loop.idle_step()  # too few new tokens
    prompt(loop, [*some(LENGTH, 1), *some(LENGTH, 2)])
    assert loop.idle_step()
    (second,) = all_files()
    assert [second] != first
    prompt(loop, [*some(LENGTH, 1)[:100], *some(LENGTH, 3)])
    assert loop.idle_step()
    assert len(all_files()) == 2


@dataclass
class Loss:
    """A text that one loop prefilled, and a way to lose it."""

    engine: Engine
    text: list[int]
    loop: StepLoop | None = None

    def open(self, rate: float = 1.0, **changes: Any) -> StepLoop:
        self.engine = altered(self.engine, **changes)
        self.loop = opened(self.engine, rate=rate)
        return self.loop

    def prefilled(self, options: GenerateOptions = OPTIONS, **changes: Any) -> StepLoop:
        loop = self.open(**changes)
        prompt(loop, self.text, options)
        return loop

    def saved(self, **changes: Any) -> Path:
        assert self.prefilled(**changes).idle_step()
        (path,) = all_files()
        self.loop = None
        return path

    def prompt_other(self, memory: int) -> None:
        loop = self.prefilled(prompt_cache_memory=memory)
        prompt(loop, some(300, 99))
        loop.runner.caches.make_room(loop.runner.caches.limit)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


WAYS: dict[str, tuple[Callable[[Loss], object], NotCached, bool]] = {  # and whether it is known
    "never prefilled": (lambda loss: loss.open(), "", False),
    "changed": (lambda loss: loss.prefilled(), "changed", True),
    "changed on disk": (lambda loss: loss.saved(), "changed", True),
    "evicted": (lambda loss: loss.prompt_other(1 << 30), "evicted", True),
    "no memory": (lambda loss: loss.prompt_other(0), "evicted", True),
    "deleted file": (lambda loss: loss.saved().unlink(), "", False),
    "damaged file": (lambda loss: flip(loss.saved()), "damaged file", True),
    "was quantized": (lambda loss: (loss.saved(kv_bits=8), loss.open(kv_bits=None)),
                      "other KV width", True),
    "other model": (lambda loss: (loss.saved(), loss.open(identity="x")), "other weights", True),
    "other layout": (lambda loss: (loss.saved(), loss.open(weights="x")), "other weights", True),
    "other tokenizer": (lambda loss: (loss.saved(), loss.open(digest="x")), "", False),
    "smaller context": (lambda loss: (loss.saved(), loss.open(context_length=len(loss.text))),
                        "other context", True),
    "fast prefill": (lambda loss: (loss.saved(), loss.open(rate=1e9)), "slow disk", True),
    "window": (lambda loss: loss.prefilled(model=build("llama-sliding")), "no checkpoint", True),
    "window on disk": (lambda loss: loss.saved(model=build("llama-sliding")),
                       "no checkpoint", True),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_statistics_explain_why_a_prefix_is_not_cached(way: str, tiny: Engine) -> None:
    draw = random.Random(way)
    loss = Loss(tiny, some(draw.randrange(400, 600), 1))
    shared = draw.randrange(300, len(loss.text) - 50)
    lose, reason, is_known = WAYS[way]
    lose(loss)
    loop = loss.loop or loss.open()
    tokens = [*loss.text[:shared], *([95 - loss.text[shared]] * 20)]
    answer = loop.answer(tokens, OPTIONS)
    assert answer.stats.not_cached == reason
    assert answer.stats.known_tokens == (shared if is_known else 0)
    assert (answer.stats.cached_tokens < answer.stats.known_tokens) == (
        reason not in ("", "changed")
    )
    assert answer.tokens == StepLoop(loss.engine).answer(tokens, OPTIONS).tokens


def test_deleted_conversations_leave_no_file_and_are_not_saved_again(tiny: Engine) -> None:
    first, second, third = (replace(OPTIONS, conversation=name) for name in ("a", "b", "c"))
    loop = opened(tiny)
    prompt(loop, some(LENGTH, 1), first)
    prompt(loop, some(LENGTH, 2), second)
    assert loop.idle_step()
    assert loop.idle_step()
    prompt(loop, [*some(LENGTH, 2), *some(LENGTH, 3)], third)  # continues the second
    assert loop.idle_step()
    files = all_files()
    assert sorted(cache_file.read(path)[0].conversation for path in files) == ["a", "c"]
    forget_conversation("b")
    assert all_files() == files
    forget_conversation("a")
    (left,) = all_files()
    assert cache_file.read(left)[0].conversation == "c"
    assert not loop.idle_step()  # although it is still in memory
    assert all_files() == [left]
    prompt(loop, [*some(LENGTH, 1), 5], first)  # restored by the user
    assert loop.idle_step()
    assert len(all_files()) == 2
    prompt(loop, some(LENGTH, 4), second)

    def delete() -> bool:
        forget_conversation("b")
        return False

    loop.idle_step(delete)  # deleted while its file is being written
    assert not loop.idle_step()
    assert len(all_files()) == 2


def test_a_branch_of_a_deleted_conversation_is_saved_without_its_end(tiny: Engine) -> None:
    loop = opened(tiny)
    prompt(loop, some(600, 1), replace(OPTIONS, conversation="a"))
    assert loop.idle_step()
    loop = opened(tiny)
    branch = [*some(600, 1)[:200], *some(200, 2)]
    prompt(loop, branch, replace(OPTIONS, conversation="b"))
    forget_conversation("a")
    assert loop.idle_step()
    assert not loop.idle_step()
    (path,) = all_files()
    assert cache_file.read(path)[0].tokens[:400] == branch


def test_marks_of_deleted_conversations_are_private_and_bounded(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache_store, "_MAX_FORGOTTEN", 2)
    for name in ("a", "../b", "c"):
        forget_conversation(name)
    marks = [*(paths.prompt_caches_dir() / "deleted").iterdir()]
    assert [stat.S_IMODE(mark.stat().st_mode) for mark in marks] == [0o600] * 3
    assert not is_forgotten("a", time.time())
    assert save(opened(tiny), 1)  # and drops the oldest mark
    assert [is_forgotten(name, 2.0) for name in ("a", "../b", "c", "")] == [0, 1, 1, 0]
    assert run_here("cache", "rm", "--all").returncode == 0
    assert is_forgotten("c", 2.0)


def test_a_side_request_leaves_only_the_prefix_of_its_conversation(tiny: Engine) -> None:
    """Neither prompt cache nor answer cache keeps its text."""
    loop, options = opened(tiny), GenerateOptions(8, conversation="a")
    turn = [*some(600, 1), *loop.answer(some(600, 1), options).tokens]
    answers = loop.learned.answer_cache
    assert answers is not None
    total = answers.total
    aside = replace(options, side_request=True)
    side = [*turn, *some(20, 2)]
    assert loop.answer(side, aside, stable=len(turn)).tokens
    assert answers.total == total
    assert loop.idle_step()
    (path,) = all_files()
    metadata = cache_file.read(path)[0]
    assert (metadata.tokens, metadata.conversation) == (turn, "a")
    assert prompt(loop, [*turn, *some(20, 3)], options) == len(turn)


def test_files_stay_within_the_limits(tiny: Engine) -> None:
    save(opened(tiny), 1)
    size = all_files()[0].stat().st_size
    clock = Clock()
    limits = replace(NO_LIMITS, size=3 * size + size // 2, hourly=5 * size + size // 2)
    loop = opened(tiny, limits, clock=clock)
    saved = 0
    for seed in range(2, 8):
        clock.now += 60
        saved += save(loop, seed)
        assert sum(path.stat().st_size for path in all_files()) <= limits.size
    assert saved in (4, 5)  # by the hourly limit; sizes of histories are estimates
    clock.now += 3600
    assert save(loop, 9)
    assert not save(opened(tiny, replace(NO_LIMITS, reserve=1 << 60)), 10)
    assert not save(opened(tiny, replace(NO_LIMITS, size=1000)), 11)
    for path in all_files():
        os.utime(path, (clock.now, clock.now))
    clock.now += limits.age + 1
    prompt(opened(tiny, limits, clock=clock), some(LENGTH, 1))
    assert all_files() == []


def test_only_the_process_with_the_lock_writes_and_cleans_up(tiny: Engine) -> None:
    assert save(opened(tiny), 1)
    ledger = paths.prompt_caches_dir() / ".written.json-x.json"
    unfinished = [all_files()[0].with_name(f".x{cache_file.SUFFIX}"), ledger]
    for path in unfinished:
        path.write_bytes(b"half")
    with (paths.prompt_caches_dir() / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = opened(tiny)
        assert prompt(other, [*some(LENGTH, 1), 5]) >= LENGTH
        assert not save(other, 2)
        assert all(path.exists() for path in unfinished)
    assert save(opened(tiny), 2)
    assert not any(path.exists() for path in unfinished)


def test_a_request_aborts_the_save_at_once(tiny: Engine) -> None:
    loop = opened(tiny)
    prompt(loop, some(LENGTH, 1))
    polls = iter([False, False, True])
    assert not loop.idle_step(lambda: next(polls))
    assert all_files() == []
    assert [*paths.prompt_caches_dir().rglob(f"*{cache_file.SUFFIX}")] == []
    assert not loop.idle_step(seconds=0.0)
    assert loop.idle_step()


@pytest.mark.parametrize("way", ["loads", "is cancelled", "is damaged", "comes twice"])
def test_other_requests_decode_while_a_prompt_cache_is_loaded(
    way: str, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(opened(tiny), 1)
    (path,) = all_files()
    monkeypatch.setattr(disk, "_STEP_BYTES", path.stat().st_size // 8)
    if way == "is damaged":
        flip(path)
    load = create_autospec(disk.load_in_steps, side_effect=disk.load_in_steps)
    monkeypatch.setattr(disk, "load_in_steps", load)
    ticks = itertools.count()  # all steps take the same time
    served = Served(tiny, learned=learned(), clock=lambda: float(next(ticks)))
    other = Submitted(some(20, 2), GenerateOptions(60, "off"))
    loads = Submitted([*some(LENGTH, 1), 5], OPTIONS, after=2)
    again = Submitted([*some(LENGTH, 1), 6], OPTIONS, after=3)
    loads.cancel_after = 2 if way == "is cancelled" else None
    served.serve([other, loads, *([again] if way == "comes twice" else [])])
    assert len(other.tokens) == 60
    before = served.steps.index([loads])
    between = served.steps[before : before + 14]
    if way == "is cancelled":
        assert loads.tokens == []
        assert loads.events[-1] is not None
        assert served.loop.runner.caches.in_use == []
        return
    assert between.count([loads]) >= 3
    assert between.count([other]) >= 3
    reused = way != "is damaged"
    assert (loads.stats.cached_tokens >= LENGTH) == reused
    assert path.exists() == reused
    assert loads.tokens == [*StepLoop(tiny).answer(loads.prompt, OPTIONS).tokens]
    if way == "comes twice":
        assert again.stats.cached_tokens >= LENGTH
        assert load.call_count == 1  # by the first; the second waits for it


def test_a_disk_that_was_slow_once_is_tried_again(tiny: Engine) -> None:
    assert save(opened(tiny), 1)
    (path,) = all_files()
    slow_rate = path.stat().st_size / (2 * LENGTH)  # loading takes twice as long as prefill
    cached = []
    for others in (0, 9):
        loop = opened(tiny, rate=0.75)
        curve = loop.learned.curve
        curve.load_rate = slow_rate
        for number in range(others):
            prompt(loop, some(LENGTH, 100 + number))
        cached.append(prompt(loop, some(LENGTH, 1)) > 0)
    assert cached == [False, True]
    assert (curve.load_rate or 0) > 10 * slow_rate  # measured


def test_a_full_disk_is_tried_again_after_ten_minutes(tiny: Engine) -> None:
    clock = Clock()
    loop = opened(tiny, clock=clock)
    with full_disk(1000):
        assert not save(loop, 1)
    clock.now += 599
    assert not loop.idle_step()
    clock.now += 2
    assert loop.idle_step()


def set_newer_format(path: Path) -> None:
    ours, other = (b'\\"format\\": %d' % (cache_file.FORMAT + each) for each in (0, 1))
    assert ours in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(ours, other, 1))


def test_unusable_files_are_deleted_but_newer_ones_stay(tiny: Engine) -> None:
    harms = (lambda path: os.truncate(path, 999), False), (flip, False), (set_newer_format, True)
    for do, stays in harms:
        assert save(opened(tiny), 1)
        (path,) = all_files()
        do(path)
        loop = opened(tiny)
        assert prompt(loop, some(LENGTH, 1)) == 0
        assert path.exists() == stays
        assert loop.idle_step()
        run_here("cache", "rm", "--all")


def test_files_of_replaced_weights_are_deleted(tmp_path: Path) -> None:
    """The model was replaced and loaded again, in the same process."""
    engines = []
    for seed in (0, 1):
        write_model(tmp_path, byte_level(["<|end|>"]), end="<|end|>", seed=seed)
        engines.append(altered(Engine.load(tmp_path), prompt_cache_memory=1 << 30))
    assert save(opened(engines[0]), 1)
    assert prompt(opened(engines[1]), [*some(LENGTH, 1), 5]) == 0
    assert all_files() == []


def test_commands_list_verify_and_delete_files(tiny: Engine) -> None:
    none = run_here("cache", "list")
    assert (none.returncode, none.stdout) == (0, "")
    for seed in (1, 2, 3):
        assert save(opened(tiny), seed)
    names = [path.stem for path in all_files()]
    listed = run_here("cache", "list").stdout
    assert all(name in listed for name in [*names, str(LENGTH + 1)])
    assert len(run_here("cache", "verify").stdout.splitlines()) == 3
    flip(all_files()[0])
    verified = run_here("cache", "verify")
    assert (verified.returncode, names[0] in verified.stdout) == (1, True)
    assert run_here("cache", "rm", names[0][:8]).returncode == 0
    assert [path.stem for path in all_files()] == names[1:]
    assert_one_line_error(run_here("cache", "rm"), 2, "--all")
    assert_one_line_error(run_here("cache", "rm", "nothing"), 2, "akunu cache list")
    assert run_here("models", "forget", str(tiny.path)).returncode == 0
    assert all_files() == []


RESERVED = 40  # answer tokens for which memory is reserved at once
UNDELIVERED = 2  # tokens of a cancelled answer in the cache, after the delivered ones


@dataclass(eq=False)
class Sent(Submitted):
    """A request whose conversation may be deleted later."""

    deleted: bool = False

    @property
    def text(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prompt, *self.tokens]


def check_files(sent: list[Sent]) -> None:
    """Check that every file contains only the beginning of a text that may be on disk."""
    allowed = [each.text for each in sent if each.options.may_store and not each.deleted]
    for path in all_files():
        metadata = cache_file.read(path)[0]
        text = [*metadata.tokens, *metadata.pending]
        shared = max(common_prefix(each, text) for each in [*allowed, []])
        assert shared >= len(text) - UNDELIVERED, metadata.conversation


def random_request(draw: random.Random, sent: list[Sent]) -> Sent:
    before = [each.text for each in sent] or [[]]
    start = draw.choice([draw.choice(before), some(60, draw.randrange(3)), []])
    end = some(draw.randrange(260, 330), draw.randrange(1 << 30))
    options = GenerateOptions(
        draw.choice([3, 3 * RESERVED]),
        conversation=draw.choice(["", "a", "b", "c"]),
        may_store=draw.random() < 0.5,
    )
    prompt = [*start[: draw.choice([600, 600, 50, 20])], *end]
    return Sent(prompt, options, cancel_after=draw.choice([2, 9, None, None]))


@pytest.mark.parametrize("seed", [2, *slow(0, 1)])
def test_only_stored_requests_of_existing_conversations_reach_the_disk(
    tiny: Engine, seed: int
) -> None:
    """Random requests, cancellations, deletions, restarts and memory shortage."""
    draw = random.Random(seed)
    memory = draw.choice([1 << 30, tiny.plan.fit.needs.cache.at(800) * 2])
    engine = altered(tiny, prompt_cache_memory=memory)

    def restarted() -> Served:
        return Served(engine, 3, learned=learned(), reserved_tokens=RESERVED)

    served, sent, found = restarted(), list[Sent](), 0
    for _ in range(5):
        requests = [random_request(draw, sent) for _ in range(draw.choice([1, 1, 3]))]
        served.serve(requests)
        assert all(isinstance(each.last, Finished) for each in requests)
        sent += requests
        if draw.random() < 0.3:
            deleted = draw.choice("abc")
            forget_conversation(deleted)
            for each in sent:
                each.deleted |= each.options.conversation == deleted
        while draw.random() < 0.8 and served.loop.idle_step(lambda: False, None):
            check_files(sent)
        if draw.random() < 0.3:
            served = restarted()
        check_files(sent)
        found += len(all_files())
    assert found


PROMPT = some(40, 1)


@pytest.fixture(scope="module")
def saved(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a loop with one answer."""
    loop = StepLoop(tiny)
    loop.answer(PROMPT, OPTIONS)
    path = tmp_path_factory.mktemp("saved") / "session.safetensors"
    disk.save(loop.runner.caches.last, loop.engine, path)
    return path


@families_of_each_kind("deepseek_v41", quick=("llama", "llama-kv8", "llama-sliding", "falcon_h1"))
def test_every_family_continues_from_a_file(name: str, tiny: Engine, tmp_path: Path) -> None:
    """mlx-lm loads the file too; other prompts return to the checkpoints."""
    file, prompt = tmp_path / "cache.safetensors", some(70, 1)
    target = Target(build(name))
    target.reuse_prefix(prompt)
    answer(target, prompt, [])
    engine = altered(tiny, model=build(name), vocabulary=VOCABULARY)
    disk.save(target.history, engine, file)
    kinds = [type(entry) for entry in load_prompt_cache(str(file))]
    assert kinds == [type(entry) for entry in target.cache]
    again = Target(build(name))
    again.history = disk.load(engine, file)
    places = [each.length for each in target.history.checkpoints]
    assert [each.length for each in again.history.checkpoints] == places
    assert again.history.nbytes <= target.history.nbytes
    other = [*prompt, *some(30, 3)]
    assert again.reuse_prefix(other).cached >= len(prompt) - target.prompt_tail
    assert answer(again, other, []) == fresh(name, other)


def test_a_family_that_mlx_lm_cannot_save_is_refused(tiny: Engine, tmp_path: Path) -> None:
    loop = StepLoop(altered(tiny, model=build("deepseek_v41"), vocabulary=VOCABULARY))
    path = tmp_path / "x.safetensors"
    with pytest.raises(UsageError, match="nothing to save"):
        disk.save(loop.runner.caches.last, loop.engine, path)
    loop.answer(PROMPT, GenerateOptions(2))
    with pytest.raises(UsageError, match="LayerCache"):
        disk.save(loop.runner.caches.last, loop.engine, path)
    assert list(tmp_path.iterdir()) == []


def test_unusable_files_are_refused_and_the_session_is_unchanged(
    tiny: Engine, saved: Path, tmp_path: Path
) -> None:
    content, weights = saved.read_bytes(), tiny.path / "model.safetensors"
    cases: list[tuple[Engine, Path, type[AkunuError], str]] = [
        (tiny, weights, DamagedCache, "not a prompt cache"),
        (tiny, tiny.path / "config.json", DamagedCache, "not a prompt cache"),
        (tiny, tmp_path / "none.safetensors", StoreError, "No such file"),
        (altered(tiny, kv_bits=8), saved, UsageError, "--kv-bits"),
        (altered(tiny, identity="x"), saved, UsageError, "belongs to tiny"),
        (altered(tiny, context_length=40), saved, UsageError, "--context"),
    ]
    for part in (0.0, 0.0001, 0.5, 0.99):
        path = tmp_path / f"{part}.safetensors"
        path.write_bytes(content[: int(len(content) * part)])
        cases.append((tiny, path, DamagedCache, str(path)))
    for engine, path, error, words in cases:
        loop = StepLoop(altered(engine, context_length=4096))
        loop.answer(PROMPT, OPTIONS)
        loop.engine = engine
        before = list(last_tokens(loop))
        with pytest.raises(error) as raised:
            loop.runner.caches.release(disk.load(loop.engine, path))
        assert "\n" not in str(raised.value)
        assert words in str(raised.value)
        assert last_tokens(loop) == before


def test_models_differ_by_each_tensor_and_by_versions_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = dict(mx.load(str(file)).items())
    mx.eval(weights)
    seen = {model_digest(tmp_path, "float32"), model_digest(tmp_path, "bfloat16")}
    for name, value in weights.items():
        last = mx.arange(value.size).reshape(value.shape) == value.size - 1  # one number
        mx.save_safetensors(str(file), weights | {name: value + last}, {"format": "mlx"})
        seen.add(model_digest(tmp_path, "float32"))
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    assert model_digest(tmp_path, "float32") in seen
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    for part in (*versions, ""):
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "version", (versions | {part: "0"}).__getitem__)
            if not part:
                patch.setattr(device, "device_name", lambda: "another")
            seen.add(model_digest(tmp_path, "float32"))
    assert len(seen) == 2 + len(weights) + 3


def test_a_full_disk_leaves_the_older_file(tiny: Engine, saved: Path) -> None:
    loop = StepLoop(tiny)
    loop.runner.caches.release(disk.load(loop.engine, saved))
    content = saved.read_bytes()
    with full_disk(1000), pytest.raises(StoreError, match="cannot write"):
        disk.save(loop.runner.caches.last, loop.engine, saved)
    assert saved.read_bytes() == content
    assert list(saved.parent.iterdir()) == [saved]
    with pytest.raises(StoreError, match="cannot write"):
        disk.save(loop.runner.caches.last, loop.engine, saved.parent / "none" / "x.safetensors")


@pytest.mark.usefixtures("own_directories")
def test_the_run_command_saves_and_loads_a_prompt_cache(tmp_path: Path) -> None:
    model, file = write_chat_model(tmp_path / "model"), tmp_path / "document.safetensors"
    document = "The owl sat on the old barn and watched the fields. " * 30
    command = ["run", "--model", str(model), "--prompt-cache", str(file), "--raw"]
    left = []
    for question in ("What sat on the barn?", "Who?"):
        done = run_here(*command, "--max-tokens", "4", "--format", "json", document + question)
        stats: dict[str, int] = json.loads(done.stdout)["stats"]
        left.append(stats["prompt_tokens"] - stats["cached_tokens"])
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert left[0] > len(document)
    assert left[1] <= 4
    file.write_bytes(b"something else")
    assert_one_line_error(run_here(*command, "hi"), 1, str(file), "not a prompt cache")
    assert file.read_bytes() == b"something else"
