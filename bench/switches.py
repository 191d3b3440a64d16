"""How soon a server answers who goes back to a conversation: akunu's, beside mlx-lm's own, with the
same requests over HTTP.

The model is one with few layers of the given one, in float32 and with a longer context, so that
both run it alike on any machine and long texts take seconds, not minutes; what is compared is how
much of a prompt each reads again.
"""

from __future__ import annotations

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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from akunu_py.errors import AkunuError

CONTEXT = 32_768
_AKUNU = [sys.executable, "-m", "akunu_py", "serve", "--quiet"]
# With the BLAS that akunu finds too: it is the caches that are compared.
_WITH_BLAS = (
    "from akunu_py.decoding.blas import load_openblas; load_openblas(); "
    "from mlx_lm.server import main; main()"
)
_MLX_LM = [sys.executable, "-c", _WITH_BLAS]
_START_S, _ANSWER_S = 180.0, 900.0
_IDLE_S = 6.0  # between two answers and a restart: a user who reads
_WORDS = ("river", "stone", "light", "paper", "north", "seven", "glass", "early", "field", "voice")


@dataclass(slots=True)
class Ttft:
    """Of one request: seconds to its first token; tokens of its prompt, -1 where the server does
    not say; how many of them were cached."""

    seconds: float
    prompt: int = -1
    cached: int = -1


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

    def ask(self, talk: Talk) -> Ttft:
        """Asks for the next answer, which joins the conversation. Raises OSError, AkunuError."""
        body = {
            "model": self._model.name if self.name == "akunu" else str(self._model),
            "messages": talk.messages, "max_tokens": 8,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        headers = {"Content-Type": "application/json"}
        started = time.perf_counter()
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise AkunuError(f"{self.name}: {response.read()[:300]!r}")
            first, text = 0.0, ""
            usage: dict[str, Any] = {}
            for chunk in _chunks(response):
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", []):
                    said = choice.get("delta", {}).get("content") or ""
                    first = first or (time.perf_counter() - started if said else 0.0)
                    text += said
        talk.messages.append({"role": "assistant", "content": text})
        details = usage.get("prompt_tokens_details") or {}
        return Ttft(first, usage.get("prompt_tokens", -1), details.get("cached_tokens", -1))


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line.removeprefix(b"data: "))


def measure(server: Server, words: int, progress: Callable[[str], None]) -> dict[str, Ttft]:
    """words: of a conversation that is gone back to; twenty thousand tokens for the agent."""
    found: dict[str, Ttft] = {}

    def ask(name: str, talk: Talk) -> None:
        progress(f"{server.name}: {name}")
        found[name] = server.ask(talk)

    server.start()
    try:
        first, second = Talk(1), Talk(2)
        for talk, name in ((first, "a long prompt"), (second, "another one")):
            talk.say(words)
            ask(name, talk)
        for talk, name in ((first, "back to the first"), (second, "back to the second")):
            talk.say(30)
            ask(name, talk)
        agent = Talk(3)
        for turn in range(10):
            agent.say(1900)
            ask(f"agent, turn {turn + 1}", agent)
        time.sleep(_IDLE_S)
        server.stop()
        server.start()
        first.say(30)
        ask("first after a restart", first)
        agent.say(30)
        ask("agent after a restart", agent)
    finally:
        server.stop()
    return found


def compare_servers(
    source: Path, layers: int, words: int, progress: Callable[[str], None]
) -> dict[str, dict[str, Ttft]]:
    """What was measured, by server. Both start with empty caches."""
    with tempfile.TemporaryDirectory() as work:
        model = Path(work, "model")
        model.mkdir()
        prepare(source, model, layers)
        return {name: measure(Server(name, model), words, progress) for name in ("akunu", "mlx-lm")}


def print_servers(found: dict[str, dict[str, Ttft]]) -> None:
    names = list(found)
    print("seconds to the first token, and tokens of the prompt that were cached\n")
    print(f"{'':<24}{'prompt':>8}", *(f"{name:>20}" for name in names))
    for scenario, ours in found[names[0]].items():
        if scenario.startswith("agent, turn") and not scenario.endswith(" 10"):
            continue
        cells = []
        for name in names:
            each = found[name][scenario]
            cached = f"{each.cached:,}" if each.cached >= 0 else "?"
            cells.append(f"{each.seconds:>10.2f} s {cached:>8}")
        print(f"{scenario:<24}{ours.prompt:>8,}", *cells)
