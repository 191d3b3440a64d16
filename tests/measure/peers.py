"""`python -m tests.measure.peers`: `akunu bench` with the loops of llama.cpp and transformers.

Each loop runs plain and with prompt lookup. It gets the same text in the same chat template, and
uses its own tokenizer and weights.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from akunu_py.bench import command, speed
from akunu_py.bench.runners import TURN_BREAK, Conditions, Run, Runner
from akunu_py.bench.workloads import Workload
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.types import Message
from tests.measure.tool import run_tool

LOOKUP_TOKENS = 10  # the default of both programs
_CONTEXT = 4096
_UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}

Emit = Callable[[Sequence[int]], None]


class Peer:
    """A loop that emits output tokens.

    generate: (prompt text, conditions, emit) -> the prompt's token ids; `emit` gets one or more
    tokens at a time, up to and with the end token.
    """

    foreign = True

    def __init__(
        self,
        name: str,
        baseline: str,
        engine: Engine,
        generate: Callable[[str, Conditions, Emit], list[int]],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.name, self.baseline = name, baseline
        self._engine, self._generate, self._decode = engine, generate, decode

    def reference(self, temperature: float) -> str | None:
        """Return the peer's own plain loop at temperature 0."""
        return self.baseline if temperature == 0 and self.name != self.baseline else None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        run = Run()

        def answer(messages: list[Message]) -> str:
            ids = self._engine.tokens.encode_chat(messages)
            text = str(self._engine.tokens.tokenizer.decode(ids, skip_special_tokens=False))
            output: list[int] = []
            arrivals: list[tuple[float, int]] = []

            def emit(tokens: Sequence[int]) -> None:
                output.extend(int(token) for token in tokens)
                arrivals.append((time.perf_counter(), len(output)))

            started = time.perf_counter()
            prompt = self._generate(text, conditions, emit)
            (first, prefilled), (last, _) = arrivals[0], arrivals[-1]
            run.add(prompt, output, first - started, last - first, prefilled)
            return self._decode(output).strip()

        run.text = TURN_BREAK.join(workload.run_turns(answer))
        return run


def _missing(name: str, engine: Engine, reason: str) -> list[Runner]:
    """Return a peer whose run fails with the reason."""

    def fail(text: str, conditions: Conditions, emit: Emit) -> list[int]:
        raise UsageError(reason)

    return [Peer(name, name, engine, fail, str)]


def llama_cpp(engine: Engine, gguf: Path) -> list[Runner]:
    """Return llama.cpp's plain loop and its prompt lookup, with the model file `gguf`."""
    name = "llama.cpp"
    try:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError as error:
        return _missing(name, engine, f"pip install llama-cpp-python ({error})")
    context = min(_CONTEXT, engine.plan.context_length)
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    peers = []
    for peer_name, drafter in ((name, None), (f"{name} + lookup", lookup)):
        options = {"n_ctx": context, "n_gpu_layers": -1, "draft_model": drafter, "verbose": False}
        try:
            peers.append(_llama_peer(peer_name, name, engine, Llama(str(gguf), **options)))
        except (ValueError, OSError) as error:
            return _missing(name, engine, f"cannot load {gguf}: {error}")
    return peers


def _llama_peer(name: str, baseline: str, engine: Engine, model: Any) -> Runner:
    def generate(text: str, conditions: Conditions, emit: Emit) -> list[int]:
        prompt = model.tokenize(text.encode(), add_bos=False, special=True)
        model.reset()
        model.set_seed(conditions.seed)
        steps = model.generate(prompt, temp=conditions.temperature, **_UNFILTERED)
        with contextlib.closing(steps):
            for token in islice(steps, conditions.max_tokens):
                emit([token])
                if token == model.token_eos():
                    break
        return list(prompt)

    def decode(tokens: list[int]) -> str:
        return str(model.detokenize(tokens).decode(errors="replace"))

    return Peer(name, baseline, engine, generate, decode)


def transformers(engine: Engine, directory: Path) -> list[Runner]:
    """Return transformers' plain loop and its prompt lookup, in float32, with a checkpoint."""
    name = "transformers"
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        return _missing(name, engine, f"pip install torch ({error})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        return _missing(name, engine, f"cannot load {directory}: {error}")
    return [
        _transformers_peer(name, name, engine, model, tokenizer, None),
        _transformers_peer(f"{name} + lookup", name, engine, model, tokenizer, LOOKUP_TOKENS),
    ]


def _transformers_peer(
    name: str, baseline: str, engine: Engine, model: Any, tokenizer: Any, lookup: int | None
) -> Runner:
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):  # type: ignore[misc]
        """Emits the output; `put` gets the prompt first, then [1] or [1, tokens]."""

        def __init__(self, emit: Emit) -> None:
            self._emit: Emit | None = None
            self._then = emit

        def put(self, value: Any) -> None:
            if self._emit is not None:
                self._emit(value.flatten().tolist())
            self._emit = self._then

        def end(self) -> None:
            pass

    def generate(text: str, conditions: Conditions, emit: Emit) -> list[int]:
        prompt = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        torch.manual_seed(conditions.seed)
        sampled = conditions.temperature > 0
        unfiltered = {"temperature": conditions.temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=conditions.max_tokens,
            do_sample=sampled,
            prompt_lookup_num_tokens=lookup,
            streamer=Streamer(emit),
            pad_token_id=tokenizer.eos_token_id,
            **(unfiltered if sampled else {}),
        )
        return prompt

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return Peer(name, baseline, engine, generate, decode)


def add_options(parser: argparse.ArgumentParser) -> None:
    command.add_speed_options(parser)
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="GGUF", help="Model file for llama-cpp-python"
    )
    parser.add_argument(
        "--transformers", type=Path, metavar="FOLDER", help="Checkpoint for transformers with torch"
    )


def run(options: argparse.Namespace) -> int:
    def others(engine: Engine) -> list[Runner]:
        return [
            *(llama_cpp(engine, options.llama_cpp) if options.llama_cpp else ()),
            *(transformers(engine, options.transformers) if options.transformers else ()),
        ]

    return speed.run(options, others)


if __name__ == "__main__":
    summary = "Measure tokens per second, compared with mlx-lm, llama.cpp and transformers"
    sys.exit(run_tool("peers", summary, add_options, run))
