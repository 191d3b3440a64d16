"""Targets of tiny models, and the answers that an adversarial drafter draws from them."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from akunu_py.engine.loop import StepLoop
from akunu_py.engine.prefill import ChunkSizes, prefill
from akunu_py.engine.target import Target
from akunu_py.types import Drafter, Piece
from tests.support.decoding import decode
from tests.support.families import build
from tests.support.tiny import VOCABULARY, Adversary

COUNT = 16  # tokens of an answer


class Counting:
    """A model that counts the rows it is given."""

    def __init__(self, model: Any) -> None:
        self.model, self.rows = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, *args: Any, **options: Any) -> Any:
        self.rows += tokens.shape[1]
        return self.model(tokens, *args, **options)


class Timed(Target):
    """A target that reads so many tokens in a second of its own clock."""

    def __init__(self, model: Any, speed: float) -> None:
        super().__init__(model)
        self.speed, self.now = speed, 0.0

    def forward(self, tokens: mx.array) -> mx.array:
        self.now += tokens.shape[0] / self.speed
        return super().forward(tokens)

    def clock(self) -> float:  # type: ignore[override]
        self.now += 1e-9  # no pass takes no time
        return self.now


class Timeless(Target):
    """No time is measured: the curve that is given stays."""

    @staticmethod
    def clock() -> float:
        return 0.0


def some(count: int, seed: int) -> list[int]:
    randomly = random.Random(seed)
    return [randomly.randrange(VOCABULARY) for _ in range(count)]


def read(target: Target, sizes: ChunkSizes | None = None) -> list[int]:
    """Reads the prompt. Returns how much of it was read at each step."""
    return list(prefill(target, sizes or ChunkSizes()))


def drafted(
    target: Target, drafts: Any, drafter: Drafter, prompt: Sequence[int], count: int = COUNT
) -> list[Piece]:
    """Return the pieces of an answer to `prompt`. drafts: follows the passes, in `drafter`."""
    target.followers = [drafts]
    target.reuse_prefix(prompt)
    read(target)
    drafter.extend(prompt)
    return list(decode(target, drafter, count, ()))


def answer(target: Target, prompt: list[int], truth: list[int], count: int = COUNT) -> list[int]:
    drafter = Adversary(prompt, truth, seed=len(prompt))
    drafter.extend(prompt)
    read(target)
    pieces = decode(target, drafter, count, ())
    return [token for piece in pieces for token in piece.tokens]


def fresh(name: str, prompt: list[int], count: int = COUNT) -> list[int]:
    """The answer of a new target."""
    return [*_fresh(name, tuple(prompt), count)]


@cache
def _fresh(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    target = Target(build(name))
    assert target.reuse_prefix([*prompt]).cached == 0
    return answer(target, [*prompt], [], count)


def last_tokens(loop: StepLoop) -> list[int]:
    """Return the tokens that the last request left in its KV cache."""
    history = loop.runner.caches.last
    return [] if history is None else history.tokens
