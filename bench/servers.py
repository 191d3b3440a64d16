"""Servers to measure, akunu's and mlx-lm's own, and a client that times what each streams.

The model is one with few layers of the given one, in float32 and with a longer context, so that
both run it alike on any machine and long texts take seconds, not minutes.
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
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from akunu_py.errors import AkunuError

CONTEXT = 32_768
_AKUNU = [sys.executable, "-m", "akunu_py", "serve", "--quiet"]
# With the BLAS that akunu finds too: it is the caches that are compared.
_WITH_BLAS = (
    "from akunu_py.workarounds.openblas import load_openblas; load_openblas(); "
    "from mlx_lm.server import main; main()"
)
_MLX_LM = [sys.executable, "-c", _WITH_BLAS]
_START_S, _ANSWER_S = 180.0, 900.0
_WORDS = ("river", "stone", "light", "paper", "north", "seven", "glass", "early", "field", "voice")


@dataclass(slots=True)
class Reply:
    """What came of a request. times: in seconds since it was made, of each piece of text. prompt,
    cached, tokens: of the prompt, of these the ones that were cached, and of the answer; -1 where
    the server does not say."""

    times: list[float] = field(default_factory=list)
    prompt: int = -1
    cached: int = -1
    tokens: int = -1

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
