"""`python -m tests.reliability.endurance [PART]`: long conversations and many completions, watched.

The model has random weights and a small KV cache, so growth means a leak. PART of 0.01 is quick.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

from akunu_py import paths
from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.engine.answer import text_job
from akunu_py.engine.drafters.learned_state import LearnedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Finished
from akunu_py.engine.histories.prompt_cache_store import PromptCacheStore
from akunu_py.engine.host import ModelHost
from akunu_py.engine.loop import StepLoop
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.status import StatusLine
from akunu_py.tui.workers.chat_client import ChatClient
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import GenerateOptions, LoadOptions, Message, SamplingOptions
from tests.support.complete import complete
from tests.support.jobs import chat_answer, end_of, submit
from tests.support.serving import fetch, served
from tests.support.tiny_fim import byte_level, write_model

MARKERS = ("<|end|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
SAMPLES = 6
CACHE_MEMORY = 1 << 20  # bytes for the KV caches of several texts, which would be kept else
LOAD = LoadOptions(prompt_cache_memory=CACHE_MEMORY)
ENDED = ("ready", "cut off", "stopped", "failed")  # phases of the chat
CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n"


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a run."""

    used: int  # bytes of the process, without freed memory that malloc keeps
    active: int  # bytes of MLX
    files: int
    threads: int
    passes: int  # per second of CPU time, since the last sample


Run = Callable[[Path, int, int], list[Sample]]  # with a model, a count of steps, and max_tokens


class Watch:
    """Takes SAMPLES samples of a run of `total` steps."""

    def __init__(self, total: int) -> None:
        self.samples: list[Sample] = []
        self._every = max(1, total // SAMPLES)
        self._passes, self._since = 0, time.process_time()

    def step(self, done: int, passes: int) -> None:
        self._passes += passes
        if done % self._every:
            return
        gc.collect()
        speed = self._passes / (time.process_time() - self._since)
        files, threads = len(os.listdir("/dev/fd")), threading.active_count()
        give_back()
        command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
        resident = int(subprocess.run(command, capture_output=True).stdout) << 10
        self.samples.append(Sample(resident, mx.get_active_memory(), files, threads, int(speed)))
        self._passes, self._since = 0, time.process_time()


def give_back() -> None:
    """Return freed memory to the system, with glibc."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def tiny_model(directory: Path) -> Path:
    """Write a model with bytes as tokens and a context of 300 turns."""
    write_model(directory, byte_level(MARKERS), end=MARKERS[0])
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace("4096", "32768"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def prompts(count: int) -> Iterator[str]:
    """Yield short prompts that differ a little."""
    words = ("red", "green", "blue", "one", "two", "three", "north", "south")
    for number in range(count):
        yield f"{number} {words[number % 8]} {words[number * 5 % 7]}?"


def options(tokens: int) -> GenerateOptions:
    return GenerateOptions(max_tokens=tokens, sampling=SamplingOptions(temperature=0.8, seed=1))


def chat(model: Path, turns: int, tokens: int, length: int = 0) -> list[Sample]:
    """One loop. length: of each conversation in turns, 0 for a single one."""
    engine = Engine.load(model, LOAD)
    learned = LearnedState(model, engine.tokens.digest, "x", answer_cache=True)
    loop, messages, watch = StepLoop(engine, learned), list[Message](), Watch(turns)
    for number, prompt in enumerate(prompts(turns), 1):
        messages.append(Message("user", prompt))
        answer = chat_answer(loop, messages, options(tokens))
        messages.append(Message("assistant", answer.text or "."))
        learned.flush()  # no file is open while files are counted
        watch.step(number, answer.stats.target_passes)
        if length and number % length == 0:
            messages.clear()
    return watch.samples


async def chat_in_the_app(model: Path, turns: int, tokens: int) -> list[Sample]:
    """Type into the chat with its threads and its database."""
    client = ChatClient(
        model.name, lambda name: StepLoop(Engine.load(model, LOAD, name=name), slots=1)
    )
    store_thread = StoreThread(paths.conversations_file())
    app = ChatApp(ChatConfig(model.name, options(tokens), session=client, store=store_thread))
    watch = Watch(turns)
    async with app.run_test(size=(80, 24)) as pilot:
        status, box = app.query_one(StatusLine), app.query_one(PromptBox)
        for number, prompt in enumerate(prompts(turns), 1):
            box.insert(prompt)
            await pilot.press("enter")
            async with asyncio.timeout(120):
                while len(app.conversation.tree) < 2 * number or status.phase not in ENDED:
                    await asyncio.sleep(0.01)  # the pilot would look at every widget
            stats = app.conversation.tree.active_branch()[-1].stats
            watch.step(number, stats.target_passes if stats else 0)
    store_thread.close(10)
    assert client.close(10)
    return watch.samples


def completions(model: Path, requests: int, tokens: int) -> list[Sample]:
    """Complete a buffer after every few typed letters, as an editor does."""
    completer = Completer(Engine.load(model, LOAD))
    watch = Watch(requests)
    for number in range(1, requests + 1):
        typed = CODE[: 1 + number * 7 % len(CODE)]
        request = CompletionRequest(
            f"# {number // 50}\n{typed}", CODE[len(typed) :], "a.py", max_tokens=tokens
        )
        watch.step(number, complete(completer, request).stats.target_passes)
    return watch.samples


def serving(model: Path, requests: int, tokens: int) -> list[Sample]:
    """Send requests to a server; some are invalid, some clients disconnect."""
    watch, path = Watch(requests), "/v1/chat/completions"
    with served(model) as server:
        for number, prompt in enumerate(prompts(requests), 1):
            limit = tokens if number % 3 else -9
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": limit}
            leaves = number % 4 == 0
            asyncio.run(fetch(server.app, path, body | {"stream": leaves}, leave=lambda _: leaves))  # noqa: B023
            watch.step(number, 1)
    return watch.samples


def reloads(model: Path, loads: int, tokens: int) -> list[Sample]:
    """Answer and cancel requests, then load the model again."""

    def load() -> StepLoop:
        caches = PromptCacheStore(model)
        learned = LearnedState(model, "t", "l", answer_cache=True, caches=caches)
        return StepLoop(Engine.load(model, LOAD), learned, slots=4)

    host, watch = ModelHost(load), Watch(loads)
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    host.on_state = states.put
    host.start()
    for number in range(1, loads + 1):
        jobs = [text_job([number % 200, each], options(tokens)) for each in range(4)]
        answers = [submit(host, job) for job in jobs]
        host.submit(jobs[0], lambda event: None).cancel()
        assert all(isinstance(end_of(events), Finished) for events in answers)
        host.reload()
        while states.get(timeout=60) != "unloaded":
            pass
        while states.get(timeout=60) != "ready":
            pass
        watch.step(number, 1)
    assert host.close()
    return watch.samples


RUNS: dict[str, tuple[Run, int]] = {
    "chat": (chat, 300), "chats": (partial(chat, length=3), 300),
    "app": (lambda *run: asyncio.run(chat_in_the_app(*run)), 300),
    "completions": (completions, 5000), "serving": (serving, 2000), "reloads": (reloads, 300),
}  # fmt: skip


def main() -> None:
    part = float(sys.argv[1]) if sys.argv[1:] else 1
    with tempfile.TemporaryDirectory() as directory:
        for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
            os.environ[variable] = directory
        model = tiny_model(Path(directory) / "tiny")
        for name, (run, count) in RUNS.items():  # what a run leaves behind shows in the next
            print(name, *run(model, int(count * part), 12), sep="\n", flush=True)


if __name__ == "__main__":
    main()
