"""Long conversations and many completions leak no memory, open files or threads.

The model has random weights and a small KV cache, so growth means a leak. In the slow form there
are hundreds of turns.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py import paths
from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.engine.drafters.learned_state import LearnedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Finished
from akunu_py.engine.histories.prompt_cache_store import DiskLimits
from akunu_py.engine.host import ModelHost
from akunu_py.engine.loop import StepLoop
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.status import StatusLine
from akunu_py.tui.workers.chat_client import ChatClient
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import GenerateOptions, LoadOptions, Message, SamplingOptions
from tests.support.complete import complete
from tests.support.jobs import chat_answer, end_of, submit, text_job
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


Run = Callable[[Path, int, int], list[Sample]]  # with a model, a count of steps, and max_tokens


class Watch:
    """Takes SAMPLES samples of a run of `total` steps."""

    def __init__(self, total: int) -> None:
        self.samples: list[Sample] = []
        self._every = max(1, total // SAMPLES)

    def step(self, done: int) -> None:
        if done % self._every:
            return
        gc.collect()
        files, threads = len(os.listdir("/dev/fd")), threading.active_count()
        give_back()
        command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
        resident = int(subprocess.run(command, capture_output=True).stdout) << 10
        self.samples.append(Sample(resident, mx.get_active_memory(), files, threads))


def give_back() -> None:
    """Return freed memory to the system, with glibc."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def tiny_model(directory: Path) -> Path:
    """Write a model with bytes as tokens and a context of 300 turns."""
    tokenizer, end = byte_level(MARKERS), MARKERS[0]
    return write_model(directory, tokenizer, end=end, template=TEMPLATE, context=32_768)


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
        watch.step(number)
        if length and number % length == 0:
            messages.clear()
    return watch.samples


async def chat_in_the_app(model: Path, turns: int, tokens: int) -> list[Sample]:
    """Type into the chat with its threads and its database."""
    client = ChatClient(
        model.name, lambda name: StepLoop(Engine.load(model, LOAD, name=name), slots=1)
    )
    store_thread = StoreThread(paths.conversations_file())
    app = ChatApp(ChatConfig(model.name, options(tokens), client, store_thread))
    watch = Watch(turns)
    async with app.run_test(size=(80, 24)) as pilot:
        status, box = app.query_one(StatusLine), app.query_one(PromptBox)
        for number, prompt in enumerate(prompts(turns), 1):
            box.insert(prompt)
            await pilot.press("enter")
            async with asyncio.timeout(120):
                while len(app.conversation.tree) < 2 * number or status.phase not in ENDED:
                    await asyncio.sleep(0.01)  # the pilot would look at every widget
            watch.step(number)
    store_thread.close(60)
    assert client.close(60)
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
        complete(completer, request)
        watch.step(number)
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
            watch.step(number)
    return watch.samples


def reloads(model: Path, loads: int, tokens: int) -> list[Sample]:
    """Answer and cancel requests, then load the model again."""

    def load() -> StepLoop:
        learned = LearnedState(model, "t", "l", answer_cache=True, disk_limits=DiskLimits())
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
        watch.step(number)
    assert host.close()
    return watch.samples


RUNS: dict[str, tuple[Run, int]] = {
    "chat": (chat, 300), "chats": (partial(chat, length=3), 300),
    "app": (lambda *run: asyncio.run(chat_in_the_app(*run)), 300),
    "completions": (completions, 5000), "serving": (serving, 2000), "reloads": (reloads, 300),
}  # fmt: skip


MEGABYTE = 1_000_000
LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
CACHE = 256  # bytes of a token in the tiny model's KV cache, which grows in steps of 256 tokens
A_TURN = 64  # tokens at most, of a prompt and its answer
# MB that a run may allocate after the warm-up, and for each turn of a conversation: a kilobyte a
# token, in the app 0.6 MB.
GROWTH = {"chat": (6, 0.06), "chats": (4, 0), "app": (10, 0.6)}


@pytest.mark.usefixtures("own_directories")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, 0.01) for name in ("app", "completions", "serving", "reloads")),
        *(pytest.param(name, 1, marks=LONG) for name in RUNS),
    ],
)
def test_long_runs_leave_nothing(name: str, part: float, tmp_path: Path) -> None:
    run, count = RUNS[name]
    count = max(6, int(count * part))
    allowed, a_turn = GROWTH.get(name, (4, 0))
    samples = run(tiny_model(tmp_path / "tiny"), count, 12)
    first, last = samples[1], samples[-1]
    assert last.files <= first.files
    assert last.threads <= first.threads + (name == "serving")  # one may still end
    arrays = 10_000 if name == "reloads" else CACHE_MEMORY
    caches = CACHE * (512 + (A_TURN * count if a_turn else 0)) + arrays
    assert last.active - first.active <= caches
    assert last.used - first.used < MEGABYTE * (allowed + a_turn * count)
