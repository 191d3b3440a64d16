"""Two streams of requests with evictions, which panicked macOS with too much wired memory.

Source: mlx issue 3186, where unique prompts of 12,000 to 16,000 tokens and answers of mixed lengths
overflowed the prompt caches of a server; the kernel panicked after 102 to 108 seconds.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from dataclasses import dataclass

from akunu_py.decoding.events import Event, Failed, Finished
from akunu_py.decoding.generate.answer_jobs import text_job
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import GenerateOptions

_STREAMS = 2
_ANSWERS = 8, 200  # tokens
_CACHED_PROMPTS = 2  # that fit into the prompt caches


@dataclass(slots=True)
class Soak:
    """What two streams did."""

    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    error: Exception | None = None


def run_soak(engine: Engine, seconds: float, length: int) -> Soak:
    """Send prompts of up to `length` tokens in two streams for that many seconds."""
    length = max(2, min(length, engine.plan.context_length - max(_ANSWERS) - 1))

    def load() -> StepLoop:
        session = Session(engine)
        prompt = engine.plan.fit.needs.cache.at(length)
        session.target.caches.limit = (_STREAMS + _CACHED_PROMPTS) * prompt
        return StepLoop(session)

    found, started, host = Soak(), time.monotonic(), ModelHost(load)
    host.start()

    def stream(seed: int) -> None:
        dice = random.Random(seed)
        while found.error is None:
            tokens = dice.choices(
                range(engine.tokens.vocabulary), k=dice.randint(length // 2, length)
            )
            options = GenerateOptions(dice.choice(_ANSWERS), may_store=False)
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            host.submit(text_job(tokens, options), events.put)
            while not isinstance(end := events.get(), Finished | Failed):
                pass
            if isinstance(end, Failed):
                found.error = end.error
            found.requests += 1
            found.prompt_tokens += len(tokens)
            if time.monotonic() >= started + seconds:
                return

    threads = [
        threading.Thread(target=stream, args=(seed,), daemon=True) for seed in range(_STREAMS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.monotonic() - started
    host.close()
    return found
