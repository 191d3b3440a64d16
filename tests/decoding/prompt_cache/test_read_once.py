"""Read once: five conversations in turn, edits in the middle, templates that rewrite earlier
turns, a restart. Each turn reads what is new, and its answer is that of a session that never held
anything else."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.decoding.generate.disk_prompt_caches import DiskPromptCaches
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.prompt_cache_store import DiskLimits, PromptCacheStore
from akunu_py.decoding.sampling import Sampler
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.support.engines import altered
from tests.support.families import build
from tests.support.slow import slow
from tests.support.targets import Counting, some
from tests.support.tiny_fim import load_tiny

pytestmark = pytest.mark.usefixtures("own_directories")

# Plain, sliding window, chunked, recurrent hybrid, latent attention, quantized.
QUICK_KINDS = ["llama-sliding", "qwen3_next", "llama-kv8"]
SLOW_KINDS = ["llama", "llama4", "deepseek_v3"]
LIMITS = DiskLimits(reserve=0)
GREEDY = GenerateOptions(max_tokens=6)
SEEDED = GenerateOptions(
    max_tokens=6, sampling=SamplingOptions(temperature=0.8, seed=3), draft="fixed"
)
ASKS = some(5, 99)  # what a template adds for an answer
KEPT = 2  # of them, with which the next turn begins where the template rewrites the turn
NEW = 30  # tokens that a user adds
CHUNK = 512
# One head and as few layers as have the kind: 16,000 tokens are read dozens of times.
SMALL = {"num_attention_heads": 1, "num_key_value_heads": 1}
LAYERS = {"llama": 1, "llama-kv8": 1, "deepseek_v3": 1}


class Plain:
    """A text as mlx-lm reads it, from the first token to the last and each once; answers are made
    with copies of its cache."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.tokens = model, make_prompt_cache(model), list[int]()

    def answer(self, prompt: list[int], stable: int, options: GenerateOptions) -> list[int]:
        """stable: how many tokens of the prompt the next one begins with."""
        assert prompt[: len(self.tokens)] == self.tokens
        self._read(prompt[len(self.tokens) : stable], self.cache)
        self.tokens = prompt[:stable]
        ahead, sampler, known = copy.deepcopy(self.cache), Sampler(options.sampling), list(prompt)
        logits = self._read(prompt[stable:], ahead)
        while True:
            token = sampler.sample(logits, mx.array([], mx.int32), len(known)).item()
            known.append(int(token))
            if len(known) == len(prompt) + options.max_tokens:
                return known[len(prompt) :]
            logits = self._read(known[-1:], ahead)

    def _read(self, tokens: list[int], cache: list[Any]) -> mx.array:
        """The logits [1, vocab] behind them."""
        for start in range(0, len(tokens), CHUNK):
            logits = self.model(mx.array([tokens[start : start + CHUNK]]), cache=cache)[0, -1:]
            mx.eval(logits)
        return logits


@dataclass
class Talk:
    """A conversation, as its template renders it. rewrites: whether that puts the end of a turn
    otherwise in the next one, so that the answer has to be read again."""

    known: list[int]
    plain: Plain
    rewrites: bool = True
    turns: int = 0
    asked: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)

    def ask(self, session: Session, options: GenerateOptions) -> int:
        """How many tokens of the next turn's prompt the model read."""
        self.turns += 1
        self.asked = [*self.known, *some(NEW, 7 * len(self.known) + self.turns), *ASKS]
        stable = len(self.asked) - (len(ASKS) - KEPT if self.rewrites else 0)
        model = session.engine.model
        model.rows = 0
        generation = session.generate(self.asked, options, stable=stable)
        self.said = list(generation.answer().tokens)
        rows = model.rows
        assert self.said == self.plain.answer(self.asked, min(stable, len(self.asked) - 1), options)
        stats = generation.stats
        read = stats.prompt_tokens - stats.cached_tokens
        # Passes verify the drafts, and where state is recurrent the accepted ones run again; what a
        # pass costs is measured once.
        assert read <= rows <= read + 2 * (stats.drafted + stats.target_passes + 1) + 16
        self.known = [*self.asked[:stable], *self.said]
        return read

    def most(self, session: Session) -> int:
        """Tokens that a turn may read where its text goes on: what is new, and what a cache with
        few ways back leaves to the first pass."""
        again = len(self.said) + session.target.prompt_tail if self.rewrites else 1
        return NEW + len(ASKS) + again


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a token with the model takes a second, so that all is worth keeping."""
    monkeypatch.setattr(DiskPromptCaches, "_prefill_s", lambda self, tokens: float(tokens))


def engine_of(tiny: Engine, name: str) -> Engine:
    sizes = SMALL | ({"num_hidden_layers": LAYERS[name]} if name in LAYERS else {})
    return altered(
        tiny,
        model=Counting(build(name, **sizes)),
        weights=name,
        vocabulary=96,
        context_length=40_000,
        prompt_cache_memory=4 << 30,
        kv_bits=None,
    )


def opened(engine: Engine, path: Path) -> Session:
    """A session as after a start."""
    store = PromptCacheStore(engine.path, LIMITS)
    return Session(engine, LearnedState(path, "t", "l", answer_cache=False, caches=store))


def hold(engine: Engine, path: Path, length: int, switches: int, checked: Collection[int]) -> None:
    """Five conversations of so many tokens, and switches between them. checked: the turns that a
    fresh session answers, too; mlx-lm's own reading answers them all."""
    session = opened(engine, path)
    talks = [
        Talk(some(length, seed), Plain(engine.model), rewrites=seed % 2 == 0) for seed in range(5)
    ]
    turns = itertools.count()

    def turn(talk: Talk, most: int) -> None:
        number = next(turns)
        options = SEEDED if number % 2 else GREEDY
        read = talk.ask(session, options)
        assert read <= most, number
        if number in checked:
            fresh = Session(engine).generate(talk.asked, options)
            assert talk.said == list(fresh.answer().tokens), number

    for talk in talks:
        turn(talk, length + NEW + len(ASKS))
    for number in range(switches):
        turn(talks[number * 3 % 5], talks[number * 3 % 5].most(session))
    while session.save_idle():
        pass
    session = opened(engine, path)
    for talk in talks:
        turn(talk, talk.most(session))
    # Edits: back to the end of an earlier turn and to the middle of a long prompt, or to the
    # checkpoint before; and on with what it was before the edit.
    apart = 2048 if session.target.history.needs_checkpoints else NEW
    for talk, back in ((talks[4], 2 * (NEW + KEPT + 6)), (talks[3], len(talks[3].known) // 2)):
        edited = replace(talk, known=talk.known[:-back], plain=Plain(engine.model))
        turn(edited, edited.most(session) + 2 * apart)
        turn(talk, talk.most(session))


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", [*QUICK_KINDS, *slow(*SLOW_KINDS)])
def test_five_conversations(name: str, tiny: Engine, tmp_path: Path) -> None:
    hold(engine_of(tiny, name), tmp_path, 300, 7, (6, 15, 19))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", [*QUICK_KINDS, *SLOW_KINDS])
def test_five_conversations_of_16000_tokens(name: str, tiny: Engine, tmp_path: Path) -> None:
    hold(engine_of(tiny, name), tmp_path, 16_000, 20, (9, 26, 33))
