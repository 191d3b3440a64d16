"""`akunu bench serve`: latencies of akunu's server and of mlx-lm's own.

Both servers get the same requests: clients that return to a conversation, also after a restart and
after a disconnect; an answer during the prefill of another client; several clients at once. Both
run a few layers of the given model, in float32 and with a longer context, so that a long prompt
takes seconds on any machine.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from akunu_py.bench import command
from akunu_py.errors import AkunuError

SUMMARY = "Compare the latencies of akunu serve and of mlx-lm's own server"

SERVERS = ("akunu", "mlx-lm")
_TURN_WORDS, _TURNS = 1900, 10  # of the agent: twenty thousand tokens in all
_SAY_WORDS = 30
_IDLE_S = 6.0  # between two answers and a restart: a user who reads
_HEALTH = 200
CONTEXT = 32_768
_AKUNU = [sys.executable, "-m", "akunu_py", "serve", "--quiet"]
# With the BLAS that akunu finds too: it is the caches that are compared.
_WITH_BLAS = (
    "from akunu_py.decoding.blas import load_openblas; load_openblas(); "
    "from mlx_lm.server import main; main()"
)
_MLX_LM = [sys.executable, "-c", _WITH_BLAS]
_START_S, _ANSWER_S = 180.0, 900.0
_WORDS = ("river", "stone", "light", "paper", "north", "seven", "glass", "early", "field", "voice")


def add_options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser, weights=False)
    command.add_count(parser, "--layers", 4, "Number of the model's layers to keep")
    command.add_count(parser, "--words", 5000, "Length of a long prompt in words")
    command.add_count(parser, "--max-tokens", 128, "Maximum tokens of an answer")
    parser.add_argument(
        "--clients",
        type=command.lengths,
        default=[1, 2, 4],
        metavar="N,...",
        help="Numbers of concurrent clients (default: 1,2,4)",
    )
    command.add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.models import store

    found = compare_servers(
        store.resolve(options.model).path,
        options.layers,
        options.words,
        options.max_tokens,
        options.clients,
        command.progress,
    )
    as_json = {name: asdict(each) for name, each in found.items()}
    command.show(options, as_json, lambda: print_servers(found))
    return 0


@dataclass(slots=True)
class Reply:
    """A timed answer; counts are -1 if the server does not report them."""

    times: list[float] = field(default_factory=list)  # of each piece of text, since the request
    prompt: int = -1  # tokens
    cached: int = -1  # tokens of the prompt
    tokens: int = -1  # of the answer

    @property
    def ttft(self) -> float:
        """Seconds to the first token; 0 where none came."""
        return self.times[0] if self.times else 0.0

    @property
    def token_s(self) -> float:
        """Seconds from one token to the next, on the average."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1) if self.times else 0.0

    @property
    def worst_gap(self) -> float:
        """Seconds of the longest wait between two pieces of text."""
        return max((after - before for before, after in pairwise(self.times)), default=0.0)


@dataclass(slots=True)
class Talk:
    """A conversation over HTTP."""

    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, words: int) -> None:
        """Adds a message of so many words."""
        draw = random.Random(f"{self.seed} {len(self.messages)}")
        text = " ".join(draw.choice(_WORDS) for _ in range(words))
        self.messages.append({"role": "user", "content": text})


def prepare(source: Path, directory: Path, layers: int) -> None:
    """Writes the model into an empty directory."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model, load_model

    model, config = load_model(source)
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    model.model.layers = model.model.layers[:layers]
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    changed = {"num_hidden_layers": layers, "max_position_embeddings": CONTEXT}
    left = {k: v for k, v in config.items() if not k.startswith("quantization")}
    (directory / "config.json").write_text(json.dumps(left | changed), "utf-8")
    for path in (*source.glob("tokenizer*"), *source.glob("*.jinja")):
        shutil.copyfile(path, directory / path.name)


class Server:
    """A server process on this machine, that can be started again. name: akunu or mlx-lm."""

    def __init__(self, name: str, model: Path) -> None:
        self.name = name
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def start(self) -> None:
        words = _AKUNU if self.name == "akunu" else _MLX_LM
        self._process = subprocess.Popen(
            [*words, "--model", str(self._model), "--port", str(self._port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        end = time.monotonic() + _START_S
        talk = Talk(0)
        talk.say(2)
        while True:  # it listens before it has loaded, or the other way round
            try:
                self.ask(talk)
                return
            except (OSError, http.client.HTTPException, AkunuError) as error:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise AkunuError(
                        f"the server of {self.name} does not answer: {error}"
                    ) from error
            time.sleep(0.5)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def ask(self, talk: Talk, tokens: int = 8, hang_up_s: float | None = None) -> Reply:
        """Asks for the next answer, which joins the conversation. hang_up_s: leaves so many seconds
        after the request instead. Raises OSError, AkunuError."""
        body = {
            "model": self._model.name if self.name == "akunu" else str(self._model),
            "messages": talk.messages, "max_tokens": tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        reply, text = Reply(), ""
        started = time.perf_counter()
        with contextlib.closing(self._connect()) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            if hang_up_s is not None:
                time.sleep(hang_up_s)
                return reply
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise AkunuError(f"{self.name}: {response.read()[:300]!r}")
            for chunk in _chunks(response):
                if usage := chunk.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    reply.prompt, reply.tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    reply.cached = details.get("cached_tokens", -1)
                for choice in chunk.get("choices", []):
                    if said := choice.get("delta", {}).get("content"):
                        reply.times.append(time.perf_counter() - started)
                        text += said
        talk.messages.append({"role": "assistant", "content": text})
        return reply

    def is_well(self, times: int) -> float:
        """Asks so many times, on one connection, whether it is well. Returns the seconds."""
        started = time.perf_counter()
        with contextlib.closing(self._connect()) as connection:
            for _ in range(times):
                connection.request("GET", "/health")
                connection.getresponse().read()
        return time.perf_counter() - started

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line.removeprefix(b"data: "))


@dataclass(slots=True)
class ServerTimes:
    """Measurements of one server."""

    requests: dict[str, Reply] = field(default_factory=dict)  # by scenario
    alone: Reply = field(default_factory=Reply)
    beside: Reply = field(default_factory=Reply)  # during the prefill of another client
    tokens_per_s: dict[int, float] = field(default_factory=dict)  # by number of clients
    health_per_s: float = 0.0  # requests that need no model


def compare_servers(
    source: Path,
    layers: int,
    words: int,
    tokens: int,
    clients: Sequence[int],
    progress: Callable[[str], None],
) -> dict[str, ServerTimes]:
    """Return the measurements by server; each starts with empty caches.

    layers: kept of the model. words: of a long prompt. tokens: of an answer. clients: counts of
    concurrent clients.
    """
    with tempfile.TemporaryDirectory() as work:
        model = Path(work, "model")
        model.mkdir()
        prepare(source, model, layers)
        found = {}
        for name in SERVERS:
            server, times = Server(name, model), ServerTimes()
            server.start()
            try:
                _go_back(server, words, times, progress)
                _interrupt(server, words, times, progress)
                _write_beside(server, words, tokens, times, progress)
                for count in clients:
                    progress(f"{name}: {count} at once")
                    times.tokens_per_s[count] = _at_once(server, count, tokens)
                times.health_per_s = _HEALTH / server.is_well(_HEALTH)
            finally:
                server.stop()
            found[name] = times
        return found


def _go_back(
    server: Server, words: int, times: ServerTimes, progress: Callable[[str], None]
) -> None:
    def ask(name: str, talk: Talk) -> None:
        progress(f"{server.name}: {name}")
        times.requests[name] = server.ask(talk)

    first, second = Talk(1), Talk(2)
    for talk, name in ((first, "a long prompt"), (second, "another one")):
        talk.say(words)
        ask(name, talk)
    for talk, name in ((first, "back to the first"), (second, "back to the second")):
        talk.say(_SAY_WORDS)
        ask(name, talk)
    agent = Talk(3)
    for turn in range(_TURNS):
        agent.say(_TURN_WORDS)
        ask(f"agent, turn {turn + 1}", agent)
    time.sleep(_IDLE_S)
    server.stop()
    server.start()
    for talk, name in ((first, "first after a restart"), (agent, "agent after a restart")):
        talk.say(_SAY_WORDS)
        ask(name, talk)


def _interrupt(
    server: Server, words: int, times: ServerTimes, progress: Callable[[str], None]
) -> None:
    """A client hangs up when about half of its prompt is read, and asks again."""
    progress(f"{server.name}: hung up and asked again")
    talk = Talk(4)
    talk.say(words)
    server.ask(talk, hang_up_s=times.requests["a long prompt"].ttft / 2)
    times.requests["asked again"] = server.ask(talk)


def _write_beside(
    server: Server, words: int, tokens: int, times: ServerTimes, progress: Callable[[str], None]
) -> None:
    """An answer alone, and one that is written while another client's prompt is read."""
    progress(f"{server.name}: an answer beside a prompt")
    writer = Talk(5)
    writer.say(_SAY_WORDS)
    server.ask(writer, tokens)  # reads the prompt
    writer.messages.pop()
    times.alone = server.ask(writer, tokens)
    writer.messages.pop()
    reader = Talk(6)
    reader.say(words)
    other = threading.Thread(target=server.ask, args=(reader,))
    other.start()
    times.beside = server.ask(writer, tokens)
    other.join()


def _at_once(server: Server, count: int, tokens: int) -> float:
    """Tokens a second of so many clients together."""
    talks = [Talk(100 * count + number) for number in range(count)]
    for talk in talks:
        talk.say(_SAY_WORDS)
    started = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(lambda talk: server.ask(talk, tokens), talks))
    return sum(max(0, reply.tokens) for reply in replies) / (time.perf_counter() - started)


def print_servers(found: dict[str, ServerTimes]) -> None:
    """Tables for a terminal."""
    names = list(found)
    print("seconds to the first token, and tokens of the prompt that were cached\n")
    print(f"{'':<24}{'prompt':>8}", *(f"{name:>20}" for name in names))
    for scenario, ours in found[names[0]].requests.items():
        if scenario.startswith("agent, turn") and not scenario.endswith(f" {_TURNS}"):
            continue
        cells = []
        for name in names:
            each = found[name].requests[scenario]
            cached = f"{each.cached:,}" if each.cached >= 0 else "?"
            cells.append(f"{each.ttft:>10.2f} s {cached:>8}")
        print(f"{scenario:<24}{ours.prompt:>8,}", *cells)
    rows: list[tuple[str, Callable[[ServerTimes], str]]] = [
        ("ms a token, alone", lambda each: f"{1000 * each.alone.token_s:.1f}"),
        ("  beside a prompt", lambda each: f"{1000 * each.beside.token_s:.1f}"),
        ("  longest wait, ms", lambda each: f"{1000 * each.beside.worst_gap:.0f}"),
    ]
    rows += [
        (f"tokens/s of {count}", partial(_together, count))
        for count in found[names[0]].tokens_per_s
    ]
    rows.append(("/health a second", lambda each: f"{each.health_per_s:.0f}"))
    print("\nwhat clients have of each other\n")
    for label, cell in rows:
        print(f"{label:<32}", *(f"{cell(found[name]):>20}" for name in names))


def _together(count: int, times: ServerTimes) -> str:
    return f"{times.tokens_per_s[count]:.1f}"
