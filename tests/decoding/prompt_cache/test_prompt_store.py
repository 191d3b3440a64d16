"""The prompt caches on disk: their limits, two processes, and files that are of no use."""

from __future__ import annotations

import fcntl
import os
import queue
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from akunu_py import paths
from akunu_py.decoding.events import Event, Failed, Finished
from akunu_py.decoding.generate.answer_jobs import text_job
from akunu_py.decoding.generate.disk_prompt_caches import DiskPromptCaches
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache import cache_file, prompt_cache_store
from akunu_py.decoding.prompt_cache.prompt_cache_store import (
    DiskLimits,
    PromptCacheStore,
    all_files,
    is_forgotten,
)
from akunu_py.types import GenerateOptions
from tests.support.command import assert_one_line_error, run_here
from tests.support.engines import altered
from tests.support.targets import some
from tests.support.tiny_fim import byte_level, load_tiny, write_model

pytestmark = pytest.mark.usefixtures("own_directories", "kept")

LENGTH = 400
OPTIONS = GenerateOptions(max_tokens=2, draft="off")
PLENTY = DiskLimits(reserve=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])
    return altered(engine, context_length=4096, prompt_cache_memory=1 << 30)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a token with the model takes a second, so that all is worth keeping."""
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: float(tokens))


class Clock:
    """A time of its own, in seconds."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def opened(
    engine: Engine, limits: DiskLimits = PLENTY, clock: Callable[[], float] | None = None
) -> Session:
    caches = PromptCacheStore(engine.path, limits, *([clock] if clock else []))
    state = LearnedState(paths.cache_dir(), "t", "l", answer_cache=False, caches=caches)
    return Session(engine, state)


def read(session: Session, prompt: list[int], options: GenerateOptions = OPTIONS) -> int:
    """How many tokens of it were cached."""
    generation = session.generate(prompt, options)
    generation.answer()
    return generation.stats.cached_tokens


def keep(session: Session, seed: int, length: int = LENGTH) -> bool:
    """Whether a new text of that seed was kept on disk."""
    read(session, some(length, seed))
    return session.save_idle()


def test_what_is_kept_is_for_its_owner_alone_and_found_again(tiny: Engine) -> None:
    mask = os.umask(0)
    try:
        assert keep(opened(tiny), 1)
    finally:
        os.umask(mask)
    (path,) = all_files()
    for there, mode in [(path, 0o600), (path.parent, 0o700), (path.parent.parent, 0o700)]:
        assert stat.S_IMODE(there.stat().st_mode) == mode
    assert read(opened(tiny), [*some(LENGTH, 1), 5]) >= LENGTH
    assert read(opened(tiny), some(LENGTH, 2)) == 0
    for other in ({"kv_bits": 8}, {"digest": "x"}, {"weights": "x"}):
        assert PromptCacheStore(tiny.path).saved(altered(tiny, **other)) == []


def test_what_goes_on_takes_the_place_of_what_it_goes_on_with(tiny: Engine) -> None:
    session = opened(tiny)
    assert keep(session, 1)
    first = all_files()
    assert not session.save_idle()
    read(session, [*some(LENGTH, 1), *some(20, 2)])
    assert not session.save_idle()  # too little is new
    longer = [*some(LENGTH, 1), *some(LENGTH, 2)]
    read(session, longer)
    assert session.save_idle()
    (second,) = all_files()
    assert [second] != first
    # Asked otherwise in the middle, both are kept.
    read(session, [*some(LENGTH, 1)[:100], *some(LENGTH, 3)])
    assert session.save_idle()
    assert len(all_files()) == 2


def test_nothing_is_kept_of_what_is_not_to_be_remembered(tiny: Engine) -> None:
    session = opened(tiny)
    read(session, some(LENGTH, 1), replace(OPTIONS, may_store=False))
    assert not session.save_idle()
    assert keep(opened(tiny), 1)
    private = opened(tiny)
    assert read(private, some(LENGTH, 1), replace(OPTIONS, may_store=False)) == 0
    assert not Session(tiny, LearnedState(Path("x"), "t", "l", answer_cache=False)).save_idle()


def test_what_is_read_of_a_deleted_conversation_goes_and_is_not_written_again(
    tiny: Engine,
) -> None:
    first, second, third = (replace(OPTIONS, conversation=name) for name in ("a", "b", "c"))
    session = opened(tiny)
    read(session, some(LENGTH, 1), first)
    read(session, some(LENGTH, 2), second)
    assert session.save_idle()
    assert session.save_idle()
    read(session, [*some(LENGTH, 2), *some(LENGTH, 3)], third)  # goes on with the second
    assert session.save_idle()
    files = all_files()
    assert sorted(cache_file.read(path).metadata.conversation for path in files) == ["a", "c"]
    prompt_cache_store.forget_conversation("b")
    assert all_files() == files
    prompt_cache_store.forget_conversation("a")
    (left,) = all_files()
    assert cache_file.read(left).metadata.conversation == "c"
    # It is in memory still, here and in a server: neither writes it.
    assert not session.save_idle()
    assert all_files() == [left]
    read(session, [*some(LENGTH, 1), 5], first)  # brought back, and asked for again
    assert session.save_idle()
    assert len(all_files()) == 2
    # Deleted while its file is being written.
    read(session, some(LENGTH, 4), second)

    def deletes() -> bool:
        prompt_cache_store.forget_conversation("b")
        return False

    session.save_idle(deletes)
    assert not session.save_idle()
    assert len(all_files()) == 2


def test_the_list_of_what_was_deleted_stays_small_and_damage_does_no_harm(tiny: Engine) -> None:
    path = paths.prompt_caches_dir() / "forgotten"
    prompt_cache_store.forget_conversation("a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"rubbish\n\xff \xfe\nx a\n" + b"1 b\n" * 50_000)
    for name in ("c", "d"):
        prompt_cache_store.forget_conversation(name)
    assert path.stat().st_size < 1 << 18
    assert [is_forgotten(name, 2.0) for name in "abcd"] == [False, False, True, True]
    assert is_forgotten("b", 1.0)
    session = opened(tiny)
    read(session, some(LENGTH, 1), replace(OPTIONS, conversation="b"))
    assert session.save_idle()


def test_removed_files_leave_no_tokens_in_memory(tiny: Engine) -> None:
    clock = Clock()
    store = PromptCacheStore(tiny.path, PLENTY, clock)
    state = LearnedState(paths.cache_dir(), "t", "l", answer_cache=False, caches=store)
    session = Session(tiny, state)
    for seed in range(5):
        clock.now += 3600
        assert keep(session, seed)
        for path in all_files()[1:]:
            path.unlink()
        store.saved(tiny)
        assert len(store._metadata) == len(all_files()) == 1


def test_the_limits_hold(tiny: Engine) -> None:
    keep(opened(tiny), 1)
    size = all_files()[0].stat().st_size
    clock = Clock()
    limits = replace(PLENTY, size=3 * size + size // 2, hourly=5 * size + size // 2)
    session = opened(tiny, limits, clock)
    kept = []
    for seed in range(2, 8):
        clock.now += 60
        kept.append(keep(session, seed))
        assert sum(path.stat().st_size for path in all_files()) <= limits.size
    assert sum(kept) in (4, 5)  # by the hourly limit; sizes of histories are estimates
    clock.now += 3600
    assert keep(session, 9)
    assert not keep(opened(tiny, replace(PLENTY, reserve=1 << 60)), 10)
    assert not keep(opened(tiny, replace(PLENTY, size=1000)), 11)
    for path in all_files():
        os.utime(path, (clock.now, clock.now))
    clock.now += limits.age + 1
    read(opened(tiny, limits, clock), some(LENGTH, 1))
    assert all_files() == []


def test_while_another_process_writes_nothing_is_kept_nor_cleared_up(tiny: Engine) -> None:
    assert keep(opened(tiny), 1)
    left = all_files()[0].with_name(f".x{cache_file.SUFFIX}")
    left.write_bytes(b"half")
    with (paths.prompt_caches_dir() / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = opened(tiny)
        assert read(other, [*some(LENGTH, 1), 5]) >= LENGTH
        assert not keep(other, 2)
        assert left.exists()
    assert keep(opened(tiny), 2)
    assert not left.exists()


def test_who_waits_ends_the_writing_at_once(tiny: Engine) -> None:
    session = opened(tiny)
    read(session, some(LENGTH, 1))
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    assert not session.save_idle(stopped)
    assert all_files() == []
    assert [*paths.prompt_caches_dir().rglob(f"*{cache_file.SUFFIX}")] == []
    assert not session.save_idle(seconds=0.0)
    assert session.save_idle()


def test_where_reading_the_prompt_is_faster_the_disk_is_left_alone(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keep(opened(tiny), 1)
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: tokens * 1e-9)
    assert read(opened(tiny), some(LENGTH, 1)) == 0


def test_a_disk_that_was_slow_once_is_tried_again(tiny: Engine) -> None:
    assert keep(opened(tiny), 1)
    (path,) = all_files()
    slow = path.stat().st_size / (2 * LENGTH)  # bytes a second: reading takes half as long
    cached = []
    for others in (0, 9):
        session = opened(tiny)
        session.drafting.curve.load_rate = slow
        for number in range(others):
            read(session, some(LENGTH, 100 + number))
        cached.append(read(session, some(LENGTH, 1)) > 0)
    assert cached == [False, True]
    assert (session.drafting.curve.load_rate or 0) > 10 * slow  # measured


def _of_format(path: Path, number: int) -> None:
    ours, other = (b'\\"format\\": %d' % each for each in (cache_file.FORMAT, number))
    data = path.read_bytes()
    assert ours in data
    path.write_bytes(data.replace(ours, other, 1))


HARMS: dict[str, tuple[Callable[[Path], object], bool]] = {  # and whether the file stays
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), False),
    "empty": (lambda path: os.truncate(path, 0), False),
    "rubbish": (lambda path: path.write_bytes(b"rubbish" * 99), False),
    "flipped": (
        lambda path: path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:]),
        False,
    ),
    "newer": (lambda path: _of_format(path, cache_file.FORMAT + 1), True),
    "older": (lambda path: _of_format(path, cache_file.FORMAT - 1), True),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_of_no_use_is_no_harm(harm: str, tiny: Engine) -> None:
    assert keep(opened(tiny), 1)
    (path,) = all_files()
    do, stays = HARMS[harm]
    do(path)
    done = run_here("cache", "verify")
    assert done.returncode == 1
    assert path.stem in done.stdout
    assert run_here("cache", "list").returncode == 0
    session = opened(tiny)
    assert read(session, some(LENGTH, 1)) == 0
    assert path.exists() == stays
    assert session.save_idle()


def test_a_file_of_other_weights_is_of_no_use(tmp_path: Path) -> None:
    """The files were replaced and the model was loaded again, in the same process."""
    engines = []
    for seed in (0, 1):
        write_model(tmp_path, byte_level(["<|end|>"]), end="<|end|>", seed=seed)
        engines.append(altered(Engine.load(tmp_path), prompt_cache_memory=1 << 30))
    first, second = engines
    assert keep(opened(first), 1)
    assert read(opened(second), [*some(LENGTH, 1), 5]) == 0
    assert all_files() == []


def test_a_disk_that_refuses_is_asked_again_later(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    session = opened(tiny, PLENTY, clock)
    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        assert not keep(session, 1)
    assert not session.save_idle()
    clock.now += prompt_cache_store._RETRY_AFTER + 1
    assert session.save_idle()


def test_they_are_listed_checked_and_deleted(tiny: Engine) -> None:
    none = run_here("cache", "list")
    assert (none.returncode, none.stdout) == (0, "")
    for seed in (1, 2, 3):
        assert keep(opened(tiny), seed)
    names = [path.stem for path in all_files()]
    listed = run_here("cache", "list").stdout
    assert all(name in listed for name in names)
    assert str(LENGTH + 1) in listed
    assert len(run_here("cache", "verify").stdout.splitlines()) == 3
    assert run_here("cache", "rm", names[0][:8]).returncode == 0
    assert [path.stem for path in all_files()] == names[1:]
    assert_one_line_error(run_here("cache", "rm"), 2, "--all")
    assert_one_line_error(run_here("cache", "rm", "nothing"), 2, "akunu cache list")
    assert run_here("models", "forget", str(tiny.path)).returncode == 0
    assert all_files() == []
    assert keep(opened(tiny), 1)
    assert run_here("cache", "rm", "--all").returncode == 0
    assert all_files() == []


def test_other_answers_do_not_wait_while_a_file_is_checked(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tiny)
    assert keep(first, 1)
    answer = list(first.generate(some(LENGTH, 1), OPTIONS).answer().tokens)
    begun, may_end, threads = threading.Event(), threading.Event(), list[str]()
    verify = cache_file.verify

    def slow(path: Path) -> str:
        threads.append(threading.current_thread().name)
        begun.set()
        assert may_end.wait(60)
        return verify(path)

    monkeypatch.setattr(cache_file, "verify", slow)
    host = ModelHost(lambda: StepLoop(opened(tiny)))
    host.start()
    waits: queue.SimpleQueue[Event] = queue.SimpleQueue()
    other: queue.SimpleQueue[Event] = queue.SimpleQueue()
    host.submit(text_job(some(LENGTH, 1), OPTIONS), waits.put)
    assert begun.wait(60)
    host.submit(text_job(some(LENGTH, 2), OPTIONS), other.put)
    assert _end(other).stats.cached_tokens == 0  # answered while the file is checked
    cancelled: queue.SimpleQueue[Event] = queue.SimpleQueue()
    host.submit(text_job(some(LENGTH, 1), OPTIONS), cancelled.put).cancel()
    assert _end(cancelled).reason == "cancelled"
    may_end.set()
    end = _end(waits)
    assert end.stats.cached_tokens >= LENGTH - 1
    assert end.stats.generated_tokens == len(answer)
    assert host.close()
    assert len(threads) == 1
    assert "model" not in threads


def test_a_file_is_checked_again_after_the_request_that_checked_it_was_cancelled(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tiny)
    assert keep(first, 1)
    may_end, verify = threading.Event(), cache_file.verify

    def slow(path: Path) -> str:
        assert may_end.wait(60)
        return verify(path)

    monkeypatch.setattr(cache_file, "verify", slow)
    session, running = opened(tiny), set(threading.enumerate())
    request = session.generate(some(LENGTH, 1), OPTIONS)
    request.step()
    (helper,) = set(threading.enumerate()) - running
    request.cancel()
    request.step()
    may_end.set()
    helper.join()
    (path,) = all_files()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # of the keys or values, which only the digest covers
    path.write_bytes(content)
    again = session.generate(some(LENGTH, 1), OPTIONS).answer()
    assert again.stats.cached_tokens == 0
    assert again.stats.not_cached == "damaged file"


def _end(events: queue.SimpleQueue[Event]) -> Finished:
    while not isinstance(event := events.get(timeout=60), Finished):
        assert not isinstance(event, Failed), event
    return event
