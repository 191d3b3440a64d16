"""Measure latencies and throughput of akunu's server and of mlx-lm's own.

Both servers get the same requests: clients that return to a conversation, also after a restart or a
disconnect; an answer during another client's prefill; several clients at once. Both run a few
layers of the model in float32, with a longer context, so that a long prompt takes seconds anywhere.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

from akunu_py.bench import command
from akunu_py.bench.tables import to_text
from akunu_py.bench.workloads import Workload, load_workloads
from akunu_py.errors import AkunuError
from akunu_py.models.store import model_store
from akunu_py.parser import add_format
from tests.measure.tool import run_tool

WORKLOADS = ("chat", "edit", "json")
_TURN_WORDS = 1900  # of the agent: 20,000 tokens in ten turns
_MESSAGE_WORDS = 30
CONTEXT = 32_768
# mlx-lm's server gets the same BLAS, so that only the servers differ.
_MAIN_WITH_BLAS = (
    "from akunu_py.workarounds.openblas import load_openblas; load_openblas(); "
    "from mlx_lm.server import main; main()"
)
SERVERS = {
    "akunu": [sys.executable, "-m", "akunu_py", "serve", "--quiet", "--no-answer-cache"],
    "mlx-lm": [sys.executable, "-c", _MAIN_WITH_BLAS],
}
_START_S, _ANSWER_S = 180.0, 900.0
_WORDS = ("river", "stone", "light", "paper", "north", "seven", "glass", "early", "field", "voice")


def add_options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser, weights=False)
    command.add_count(parser, "--layers", 4, "Maximum number of the model's layers to keep")
    command.add_count(parser, "--words", 5000, "Length of a long prompt in words")
    command.add_count(parser, "--turns", 10, "Turns of the agent")
    command.add_count(parser, "--max-tokens", 128, "Maximum tokens of an answer")
    what = "Numbers of concurrent clients (default: 1,2,4)"
    command.add_lengths(parser, "--clients", default=[1, 2, 4], what=what)
    command.add_count(parser, "--repeats", 3, "Repetitions of the clients; the median counts")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as work:
        write_float32_model(model_store.resolve(options.model).path, Path(work), options.layers)
        found = {}
        for name in SERVERS:
            with contextlib.closing(Server(name, Path(work))) as server:
                found[name] = measure_server(server, options)
    as_json = {name: asdict(each) for name, each in found.items()}
    command.show(options, as_json, lambda: print_servers(found))
    return 0


def write_float32_model(source: Path, directory: Path, layers: int) -> None:
    """Write the first layers of a model in float32 into an empty directory."""
    model, config = load_model(source)
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    model.model.layers = model.model.layers[:layers]
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    kept = {k: v for k, v in config.items() if not k.startswith("quantization")}
    kept |= {"num_hidden_layers": len(model.model.layers), "max_position_embeddings": CONTEXT}
    (directory / "config.json").write_text(json.dumps(kept), "utf-8")
    for path in (*source.glob("tokenizer*"), *source.glob("*.jinja")):
        shutil.copyfile(path, directory / path.name)


@dataclass(slots=True)
class Reply:
    """A timed answer; counts are in tokens, -1 if the server does not report them."""

    times: list[float] = field(default_factory=list)  # seconds from the request to each text
    prompt: int = -1
    cached: int = -1
    tokens: int = -1

    @property
    def ttft(self) -> float:
        """Return the time to first token in seconds, 0 for an empty answer."""
        return self.times[0] if self.times else 0.0

    @property
    def token_s(self) -> float:
        """Return the mean seconds between tokens."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1) if self.times else 0.0

    @property
    def worst_gap(self) -> float:
        """Return the longest time between two pieces of text in seconds."""
        return max((after - before for before, after in pairwise(self.times)), default=0.0)


Messages = list[dict[str, str]]


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Server:
    """A running server; its name is one of `SERVERS`."""

    def __init__(self, name: str, model: Path) -> None:
        self.name, self._model = name, model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._words = [*SERVERS[name], "--model", str(model), "--port", str(port)]
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.start()

    def start(self) -> None:
        """Start the server and wait for its first answer."""
        null, environment = subprocess.DEVNULL, os.environ | {"HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(self._words, stdout=null, stderr=null, env=environment)
        end = time.monotonic() + _START_S
        while True:  # one server listens before it has loaded the model, the other one after
            try:
                self.answer([user_message("hello")])
                return
            except (OSError, http.client.HTTPException) as error:
                if self._process.poll() is not None or time.monotonic() > end:
                    why = f"the server of {self.name} does not answer: {error}"
                    raise AkunuError(why) from error
            time.sleep(0.5)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def answer(self, chat: Messages, tokens: int = 8, timeout: float = _ANSWER_S) -> Reply:
        """Request the next answer and append it to `chat`. Raises OSError, HTTPException."""
        body = {
            "model": self._model.name if self.name == "akunu" else str(self._model),
            "messages": chat, "max_tokens": tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        reply, text = Reply(), ""
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=timeout) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if usage := chunk.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    reply.prompt, reply.tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    reply.cached = details.get("cached_tokens", -1)
                for choice in chunk.get("choices", []):
                    if piece := choice.get("delta", {}).get("content"):
                        reply.times.append(time.perf_counter() - started)
                        text += piece
        chat.append({"role": "assistant", "content": text})
        return reply


@dataclass(slots=True)
class ServerTimes:
    """Measurements of one server."""

    requests: dict[str, Reply] = field(default_factory=dict)  # by scenario
    alone: Reply = field(default_factory=Reply)
    during_prefill: Reply = field(default_factory=Reply)  # of another client
    tokens_per_s: dict[str, float] = field(default_factory=dict)  # by workload and clients


def measure_server(server: Server, options: argparse.Namespace) -> ServerTimes:
    """Measure a server that starts with empty caches."""
    times, draw = ServerTimes(), random.Random(0)

    def words(count: int) -> dict[str, str]:
        """Return a message of that many random words."""
        return user_message(" ".join(draw.choices(_WORDS, k=count)))

    def send(name: str, chat: Messages, length: int = _MESSAGE_WORDS) -> None:
        command.progress(f"{server.name}: {name}")
        chat.append(words(length))
        times.requests[name] = server.answer(chat)

    # Prompt caching: return to conversations, restart the server, and disconnect.
    first, second, agent = Messages(), Messages(), Messages()
    send("a long prompt", first, options.words)
    send("another long prompt", second, options.words)
    send("back to the first", first)
    send("back to the second", second)
    for turn in range(options.turns):
        send(f"agent, turn {turn + 1}", agent, _TURN_WORDS)
    time.sleep(6.0)  # as if the user were reading
    server.close()
    server.start()
    send("first after a restart", first)
    send("agent after a restart", agent)
    command.progress(f"{server.name}: disconnect, then the same request")
    interrupted = [words(options.words)]
    with contextlib.suppress(TimeoutError):
        server.answer(interrupted, timeout=times.requests["a long prompt"].ttft / 2)
    times.requests["again after a disconnect"] = server.answer(interrupted)

    command.progress(f"{server.name}: an answer during another prefill")
    question, long = words(_MESSAGE_WORDS), words(options.words)
    server.answer([question])  # prefills the prompt
    times.alone = server.answer([question], options.max_tokens)
    other = threading.Thread(target=server.answer, args=([long],))
    other.start()
    times.during_prefill = server.answer([question], options.max_tokens)
    other.join()

    for workload, count in product(load_workloads(WORKLOADS), options.clients):
        name, rates = f"{workload.name}, {count} clients", []
        for number in range(options.repeats):
            command.progress(f"{server.name}: {name}, run {number + 1}")
            # The answers to variants of a prompt are alike, so akunu has no answer cache.
            chats = [_variant(workload, f"{number}.{each}") for each in range(count)]
            server.answer(_variant(workload, "warm"), 2)
            rates.append(_rate(server, chats, options.max_tokens))
        times.tokens_per_s[name] = median(rates)
    return times


def _rate(server: Server, chats: Sequence[Messages], tokens: int) -> float:
    """Return the tokens per second of all answers, requested at the same time."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(chats)) as pool:
        replies = list(pool.map(lambda chat: server.answer(chat, tokens), chats))
    return sum(max(0, reply.tokens) for reply in replies) / (time.perf_counter() - started)


def _variant(workload: Workload, number: str) -> Messages:
    """Return the first prompt of a workload, made unique."""
    chat = Messages()
    for turn in workload.turns:
        chat.append(user_message(turn.user))
        if turn.assistant is None:
            break
        chat.append({"role": "assistant", "content": turn.assistant})
    chat[-1]["content"] += f"\n(Request {number})"
    return chat


def print_servers(found: dict[str, ServerTimes]) -> None:
    """Print the times of all servers side by side, by scenario."""
    cells = []
    for scenario, reply in next(iter(found.values())).requests.items():
        cells.append([scenario, f"{reply.prompt:,}"])
        for each in found.values():
            reply = each.requests[scenario]
            cells[-1] += [f"{reply.ttft:.2f} s", f"{reply.cached:,}" if reply.cached >= 0 else "?"]
    headings = ["request", "prompt", *(word for name in found for word in (name, "cached"))]
    print("time to first token in seconds, and cached tokens of the prompt\n")
    print(to_text((headings, cells)))
    columns = [_shared_figures(each) for each in found.values()]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    print(to_text((["concurrent clients", *found], rows)), end="")


def _shared_figures(times: ServerTimes) -> dict[str, str]:
    return {
        "ms per token, alone": f"{1000 * times.alone.token_s:.1f}",
        "ms per token, during another prefill": f"{1000 * times.during_prefill.token_s:.1f}",
        "longest pause, ms": f"{1000 * times.during_prefill.worst_gap:.0f}",
        **{f"tokens/s, {name}": f"{rate:.1f}" for name, rate in times.tokens_per_s.items()},
    }


main = partial(run_tool, "serve", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(main())
