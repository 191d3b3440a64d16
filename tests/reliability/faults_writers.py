"""Processes that only write prompt caches, and are killed at any moment of a write.

`python -m tests.reliability.faults_writers DIRECTORY` is such a process; it prints what is safe.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from akunu_py import paths
from akunu_py.engine.drafters.learned_state import LearnedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.histories import cache_file
from akunu_py.engine.histories.prompt_cache_store import DiskLimits, PromptCacheStore, all_files
from akunu_py.engine.loop import StepLoop
from akunu_py.types import GenerateOptions
from tests.reliability.faults import Outcome, finished
from tests.support.engines import altered
from tests.support.targets import some
from tests.support.tiny_fim import load_tiny

LENGTH = 1000  # tokens of a text in a prompt cache
TEXTS = 2
OPTIONS = GenerateOptions(max_tokens=4, draft="off")
LIMITS = DiskLimits(hourly=1 << 50, reserve=0)


def killed(directory: Path, random: Random, writers: int = 1) -> Outcome:
    """Kill processes that write to one directory; everything reported as safe must be there."""
    seconds = random.uniform(0.0, 0.3)
    outcome = Outcome("SIGKILL", f"{writers} writers: caches", f"after {seconds:.3f} s")
    directory.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(directory)
    tiny(directory)
    words = [sys.executable, "-m", "tests.reliability.faults_writers", str(directory)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(words, stdout=pipe, stderr=pipe) for _ in range(writers)]
    safe: list[str] = []
    for process in started:
        assert process.stdout is not None
        safe.append(process.stdout.readline().decode().strip())  # it is writing from here on
    time.sleep(seconds)
    for process in started:
        process.send_signal(signal.SIGKILL)
    for process in started:
        done = finished(process)
        outcome.check(done.code == -signal.SIGKILL, f"it had ended already: {done.err[-500:]}")
        safe += done.out.split()
    check_caches(tiny(directory), outcome, set(safe))
    outcome.word = f"{len(safe)} writes were safe"
    return outcome


def tiny(directory: Path) -> Engine:
    """Return the engine whose caches are written, the same in every process."""
    model = directory / "model"
    made = (model / "config.json").exists()
    engine = Engine.load(model) if made else load_tiny(model, ["<|end|>"])
    return altered(engine, context_length=2 * LENGTH, prompt_cache_memory=1 << 30)


def write_caches(directory: Path) -> Iterator[str]:
    engine = tiny(directory)
    histories = []
    for seed in range(TEXTS):
        loop = StepLoop(engine)
        loop.answer(some(LENGTH, seed), OPTIONS)
        histories.append(loop.runner.caches.histories()[-1])
    store, draw = PromptCacheStore(engine.path, LIMITS), Random(os.getpid())
    while True:
        seed = draw.randrange(TEXTS)
        if store.save(histories[seed], engine, lambda: False):
            yield str(seed)


def check_caches(engine: Engine, outcome: Outcome, safe: set[str]) -> None:
    """Compare answers with those of fresh sessions; no cache is damaged or unfinished."""
    for seed in range(TEXTS):
        store, prompt = PromptCacheStore(engine.path, LIMITS), [*some(LENGTH, seed), 5]
        learned = LearnedState(paths.cache_dir(), "t", "l", answer_cache=False, caches=store)
        learned.curve.prefill_rate = 1.0
        answer = StepLoop(engine, learned).answer(prompt, OPTIONS)
        tokens, cached = list(answer.tokens), answer.stats.cached_tokens
        outcome.check(
            str(seed) not in safe or cached >= LENGTH, f"text {seed} was safe and is gone"
        )
        fresh = list(StepLoop(engine).answer(prompt, OPTIONS).tokens)
        outcome.check(tokens == fresh, f"another answer to text {seed}")
    left = [path for path in paths.prompt_caches_dir().rglob("*") if path.name.startswith(".")]
    outcome.check(not left, f"left behind: {left}")
    for path in all_files():
        cache_file.verify(path)


if __name__ == "__main__":
    for safe in write_caches(Path(sys.argv[1])):
        print(safe, flush=True)
