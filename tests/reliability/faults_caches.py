"""Prompt caches on disk, hurt: two processes that write them are killed, the disk is full.

`python -m tests.reliability.faults_caches MODEL` is a process that writes, and says what is safe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

from akunu_py import paths
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache import cache_file
from akunu_py.decoding.prompt_cache.prompt_cache_store import (
    DiskLimits,
    PromptCacheStore,
    all_files,
)
from akunu_py.types import GenerateOptions
from tests.reliability.faults import Outcome, fill, finished, small_disk
from tests.support.engines import altered
from tests.support.targets import some
from tests.support.tiny_fim import load_tiny

LENGTH = 1000  # tokens of a text
TEXTS = 2
OPTIONS = GenerateOptions(max_tokens=4, draft="off")
LIMITS = DiskLimits(hourly=1 << 50, reserve=0)


def tiny(directory: Path) -> Engine:
    """The engine whose caches are written: the same for every process."""
    made = directory / "config.json"
    engine = Engine.load(directory) if made.exists() else load_tiny(directory, ["<|end|>"])
    return altered(engine, context_length=2 * LENGTH, prompt_cache_memory=1 << 30)


def killed(directory: Path, random: Random, others: int = 1) -> Outcome:
    """Kills processes that write into one place; what they said is safe must be there, be whole and
    give the answers of a fresh session, and nothing else be there once somebody looks for it."""
    seconds = random.uniform(0.0, 0.3)
    outcome = Outcome("SIGKILL", f"{1 + others} writers of caches", f"after {seconds:.3f} s")
    directory.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(directory)
    engine = tiny(directory / "model")
    words = [sys.executable, "-m", "tests.reliability.faults_caches", str(directory / "model")]
    started = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(1 + others)
    ]
    said = set()
    for process in started:
        assert process.stdout is not None
        said.add(process.stdout.readline().decode().strip())
    time.sleep(seconds)
    for process in started:
        process.send_signal(signal.SIGKILL)
    for process in started:
        done = finished(process)
        outcome.check(done.code == -signal.SIGKILL, f"it had ended already: {done.err[-500:]}")
        said |= set(done.out.split())
    check(engine, outcome, {int(each) for each in said if each.isdigit()})
    return outcome


def check(engine: Engine, outcome: Outcome, said: set[int]) -> None:
    for seed in range(TEXTS):
        prompt = [*some(LENGTH, seed), 5]
        session = opened(engine)
        generation = session.generate(prompt, OPTIONS)
        answer = list(generation.answer().tokens)
        cached = generation.stats.cached_tokens
        outcome.check(seed not in said or cached >= LENGTH, f"text {seed} was safe and is gone")
        fresh = list(Session(engine).generate(prompt, OPTIONS).answer().tokens)
        outcome.check(answer == fresh, f"another answer to text {seed}")
    left = [path for path in paths.prompt_caches_dir().rglob("*") if path.name.startswith(".")]
    outcome.check(not left, f"left behind: {left}")
    for path in all_files():
        cache_file.verify(path)
    outcome.word = f"{len(said)} of {TEXTS} texts were safe"


def full(directory: Path, random: Random) -> Outcome:
    """Writes to a disk that fills up on the way."""
    outcome = Outcome("disk full", "a writer of caches", "on the way")
    with small_disk(directory, 2) as disk:
        os.environ["XDG_CACHE_HOME"] = str(disk)
        engine = tiny(directory.parent / "model")
        filler = fill(disk)
        left = random.randrange(200_000)
        os.truncate(filler, filler.stat().st_size - left)
        session = opened(engine, replace(LIMITS, reserve=-(1 << 40)))
        session.generate(some(LENGTH, 0), OPTIONS).answer()
        store = session.learned.caches
        assert store is not None
        kept = store.save(session.target.history, engine, lambda: False)
        outcome.check(not kept, "it was written to a full disk")
        filler.unlink()
        check(engine, outcome, set())
    return outcome


def opened(engine: Engine, limits: DiskLimits = LIMITS) -> Session:
    """A session as after a start; it takes from disk whatever is there."""
    store = PromptCacheStore(engine.path, limits)
    learned = LearnedState(paths.cache_dir(), "t", "l", answer_cache=False, caches=store)
    learned.curve.prefill_rate = 1.0
    return Session(engine, learned)


def _write(model: Path) -> None:
    engine = tiny(model)
    histories = []
    for seed in range(TEXTS):
        session = opened(engine)
        session.disk_caches = None
        session.generate(some(LENGTH, seed), OPTIONS).answer()
        histories.append(session.target.history)
    store = PromptCacheStore(engine.path, LIMITS)
    draw = Random(os.getpid())
    while True:
        seed = draw.randrange(TEXTS)
        if store.save(histories[seed], engine, lambda: False):
            print(seed, flush=True)


if __name__ == "__main__":
    with closing(sys.stdout):
        _write(Path(sys.argv[1]))
