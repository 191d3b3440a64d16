"""Loops of other makers, measured where they are installed: llama-cpp-python, and transformers.

Each comes with its own plain loop, which its prompt lookup is compared with: like with like. They
read the same words in the same chat template, with their own tokenizer and their own weights.
Owns the adapters. Whatever a peer raises ends its part of the bench, not the bench.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from akunu_py.bench.runners.ours import TURN_BREAK, Conditions, Contestant, Run
from akunu_py.bench.workloads import Workload
from akunu_py.decoding.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.types import Message

LOOKUP_TOKENS = 10  # what both draft by default
_CONTEXT = 4096
_UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


Tell = Callable[[Sequence[int]], None]


class Peer:
    """A loop that takes a prompt's text and tells its tokens as they come.

    say: (prompt, conditions, tell) -> the prompt's token ids; `tell` gets what is said, one token
    or more at a time, up to and with the end token. decode: token ids -> text.
    """

    foreign = True

    def __init__(
        self,
        name: str,
        baseline: str,
        engine: Engine,
        say: Callable[[str, Conditions, Tell], list[int]],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.name, self.baseline = name, baseline
        self._engine, self._say, self._decode = engine, say, decode

    def reference(self, temperature: float) -> str | None:
        """The peer's own plain loop, where tokens are not drawn."""
        return self.baseline if temperature == 0 and self.name != self.baseline else None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        run = Run()

        def answer(messages: list[Message]) -> str:
            ids = self._engine.encode_chat(messages)
            text = str(self._engine.tokenizer.decode(ids, skip_special_tokens=False))
            said: list[int] = []
            arrivals: list[tuple[float, int]] = []

            def tell(tokens: Sequence[int]) -> None:
                said.extend(int(token) for token in tokens)
                arrivals.append((time.perf_counter(), len(said)))

            started = time.perf_counter()
            prompt = self._say(text, conditions, tell)
            (first, with_it), (last, _) = arrivals[0], arrivals[-1]
            run.add(prompt, said, first - started, last - first, at_first=with_it)
            return self._decode(said).strip()

        run.text = TURN_BREAK.join(workload.talk(answer))
        return run


class Absent:
    """Takes the place of a peer that could not be loaded: fails, and says why."""

    foreign = True

    def __init__(self, name: str, reason: str) -> None:
        self.name = self.baseline = name
        self._reason = reason

    def reference(self, temperature: float) -> str | None:
        return None

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        raise UsageError(self._reason)


def llama_cpp(engine: Engine, gguf: Path) -> list[Contestant]:
    """llama.cpp's plain loop and its prompt lookup, on the model in the file `gguf`."""
    name = "llama.cpp"
    try:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError as error:
        return [Absent(name, f"pip install llama-cpp-python ({error})")]

    def load(drafter: Any) -> Any:
        return Llama(
            str(gguf),
            n_ctx=min(_CONTEXT, engine.context_length),
            n_gpu_layers=-1,
            draft_model=drafter,
            verbose=False,
        )

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    try:
        return [
            _llama_peer(name, name, engine, load(None)),
            _llama_peer(f"{name} + lookup", name, engine, load(lookup)),
        ]
    except (ValueError, OSError) as error:
        return [Absent(name, f"cannot load {gguf}: {error}")]


def _llama_peer(name: str, baseline: str, engine: Engine, model: Any) -> Contestant:
    def say(text: str, conditions: Conditions, tell: Tell) -> list[int]:
        prompt = model.tokenize(text.encode(), add_bos=False, special=True)
        model.reset()
        model.set_seed(conditions.seed)
        steps = model.generate(prompt, temp=conditions.temperature, **_UNFILTERED)
        with contextlib.closing(steps):
            for token in islice(steps, conditions.max_tokens):
                tell([token])
                if token == model.token_eos():
                    break
        return list(prompt)

    def decode(tokens: list[int]) -> str:
        return str(model.detokenize(tokens).decode(errors="replace"))

    return Peer(name, baseline, engine, say, decode)


def transformers(engine: Engine, folder: Path) -> list[Contestant]:
    """transformers' plain loop and its prompt lookup, on the checkpoint in `folder`, in float32."""
    name = "transformers"
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        return [Absent(name, f"pip install torch ({error})")]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        return [Absent(name, f"cannot load {folder}: {error}")]
    return [
        _transformers_peer(name, name, engine, model, tokenizer, None),
        _transformers_peer(f"{name} + lookup", name, engine, model, tokenizer, LOOKUP_TOKENS),
    ]


def _transformers_peer(
    name: str, baseline: str, engine: Engine, model: Any, tokenizer: Any, lookup: int | None
) -> Contestant:
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        """Is given the prompt first, then what is said, as [1] or [1, tokens]."""

        def __init__(self, tell: Tell) -> None:
            self._tell: Tell = lambda prompt: setattr(self, "_tell", tell)

        def put(self, value: Any) -> None:
            self._tell(value.flatten().tolist())

        def end(self) -> None:
            pass

    def say(text: str, conditions: Conditions, tell: Tell) -> list[int]:
        prompt = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        torch.manual_seed(conditions.seed)
        drawn = conditions.temperature > 0
        given = torch.tensor([prompt])
        model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=conditions.max_tokens,
            do_sample=drawn,
            prompt_lookup_num_tokens=lookup,
            streamer=Streamer(tell),
            pad_token_id=tokenizer.eos_token_id,
            **({"temperature": conditions.temperature, "top_k": 0, "top_p": 1.0} if drawn else {}),
        )
        return prompt

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return Peer(name, baseline, engine, say, decode)
