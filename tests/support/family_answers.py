"""The greedy answers of the tiny models of all families, as mlx-lm's own loop gives them.

The loop takes most of the time of a test. So tests/golden/family_answers.json has its tokens, and
an answer from there counts if every token of it is the model's own choice by a clear margin, as one
pass over all of it says. Where it is not (another version of mlx-lm, a machine that rounds
otherwise), the loop is run. Made by

    python -m tests.support.family_answers
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step

from akunu_py.decoding import kv_cache
from tests.support.families import build
from tests.support.family_table import FAMILIES
from tests.support.targets import some

COUNT = 270  # caches grow by 256 tokens
LENGTHS = [1, 2, 3, 5, 9, 17, 33]  # of prompts; the families take turns
CLEAR = 1e-5  # between the best two logits; how many rows a pass has changes them by less
_GOLDEN = Path(__file__).parents[1] / "golden" / "family_answers.json"


def prompt_of(name: str) -> list[int]:
    length = LENGTHS[list(FAMILIES).index(name) % len(LENGTHS)]
    return some(length, length)


@cache
def greedy(name: str) -> list[int]:
    """COUNT tokens after the prompt."""
    prompt, tokens = prompt_of(name), kept().get(name, [])
    return tokens if is_greedy(name, prompt, tokens) else plain(name, prompt, COUNT)


def is_greedy(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each of COUNT tokens is what the model, which has read nothing else, says next."""
    if len(tokens) != COUNT:
        return False
    best, margins = choices(name, prompt, tokens)
    return best == list(tokens) and min(margins) > CLEAR


def choices(
    name: str, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[list[int], list[float]]:
    """At the place of each token: the most likely one, and how far the next is from it."""
    model = build(name)
    logits = model(mx.array([[*prompt, *tokens[:-1]]]), cache=kv_cache.new_cache(model))[0]
    logits = logits[len(prompt) - 1 :].astype(mx.float32)
    two = mx.sort(logits, axis=-1)[:, -2:]
    return logits.argmax(-1).tolist(), (two[:, 1] - two[:, 0]).tolist()


def plain(name: str, prompt: Sequence[int], count: int) -> list[int]:
    """Tokens of mlx-lm's own loop."""
    model = build(name)
    entries = kv_cache.new_cache(model)
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=entries)
    return [int(token) for token, _ in steps]


@cache
def kept() -> dict[str, list[int]]:
    answers: dict[str, str] = json.loads(_GOLDEN.read_text("utf-8"))["answers"]
    return {name: [*base64.b64decode(text)] for name, text in answers.items()}


def main() -> None:
    mx.disable_compile()
    answers = {
        name: base64.b64encode(bytes(plain(name, prompt_of(name), COUNT))).decode()
        for name in FAMILIES
    }
    made = {"made_by": "python -m tests.support.family_answers", "answers": answers}
    _GOLDEN.write_text(json.dumps(made, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
