"""MTP heads: the head's cache follows the target's, and memory for it is planned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from akunu_py.decoding import kv_cache
from akunu_py.decoding.drafting.neural import HiddenStates, MtpDrafter
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from akunu_py.models.load.mlx_loader import open_model
from akunu_py.models.mtp import HEAD_FILE, Head, load_head
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import DraftMode, GenerateOptions, LoadOptions, SamplingOptions
from tests.support.decoding import decode
from tests.support.identity import plain_tokens
from tests.support.targets import read
from tests.support.tiny_mtp import (
    CONFIGS,
    VOCABULARY,
    perfect_weights,
    write_checkpoint,
    write_tokenizer,
)

FAMILIES = [
    pytest.param(family, marks=() if family in ("qwen3_5", "mimo") else pytest.mark.slow)
    for family in CONFIGS
]
COUNT = 40
PROMPT = [random.Random(7).randrange(VOCABULARY) for _ in range(40)]
FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays
GREEDY = SamplingOptions()


@cache
def loaded(family: str) -> tuple[Any, Head]:
    with TemporaryDirectory() as name:
        write_checkpoint(Path(name), family)
        opened = open_model(Path(name))
        model, config = opened.model, opened.config
        head = load_head(Path(name), model, config)
        assert head is not None
        mx.eval(model.parameters(), head.parameters())
    return model, head


class Scripted(MtpDrafter):
    """Drafts `whole`, and from some place on wrong tokens.

    Compares its hidden states with those of a head that processes everything at once.
    """

    def __init__(self, head: Head, target: Target, whole: Sequence[int], kept: int) -> None:
        super().__init__(head, target, 1e-6, kept)
        self.whole, self.begun, self.compared = whole, 0, 0
        cache = kv_cache.new_cache(target.model)
        self.hidden = self._trunk.forward(mx.array([list(whole)]), cache)[1]

    def start_draft(self, known: Sequence[int]) -> bool:
        self.right = len(known) + self.begun % (MtpDrafter.longest + 1)
        self.begun += 1
        return super().start_draft(known)

    def draft_token(self) -> tuple[int, float]:
        known = list(self._known)
        token, sure = super().draft_token()
        if token < 0:
            return token, sure
        self.compare(known)
        token = self.whole[len(known)] if len(known) < len(self.whole) else 0
        token = self._known[-1] = (token + (len(known) >= self.right)) % VOCABULARY
        return token, 0.99

    def compare(self, known: list[int]) -> None:
        assert self._state is not None
        first, own = self._first, self._head.make_cache()
        verified = len(self._target.tokens) + len(self._target.pending)
        tokens = self._trunk.embed(mx.array([known[first + 1 :]]))
        real = verified - 1 - first
        state = self._head(tokens[:, :real], self.hidden[:, first : verified - 1], own)[:, -1:]
        for row in range(real, tokens.shape[1]):
            state = self._head(tokens[:, row : row + 1], state, own)
        np.testing.assert_allclose(np.array(self._state), np.array(state), atol=5e-3)
        self.compared += 1

    def clock(self) -> float:
        return 0.0  # no time is measured, so its stated share of a step counts


@pytest.mark.long
@pytest.mark.parametrize("kept", [512, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_cache_follows_the_targets(family: str, kept: int) -> None:
    """After any number of rejected tokens, also if it never saw the beginning of the prompt.

    kept: see `MtpDrafter`.
    """
    model, head = loaded(family)
    truth = plain_tokens(model, PROMPT, COUNT)
    target = Target(model)
    drafts = Scripted(head, target, [*PROMPT, *truth], kept)
    drafter = AutoDrafter(CostCurve(FREE), neural_drafters=[drafts], ngrams=False)
    target.reuse_prefix(PROMPT)
    read(target)
    drafter.extend(PROMPT)
    pieces = list(decode(target, drafter, COUNT, ()))
    assert [token for piece in pieces for token in piece.tokens] == truth
    assert drafts.compared > COUNT // 2
    assert {piece.accepted for piece in pieces} >= set(range(MtpDrafter.longest))
    assert drafts._first == (0 if kept == 512 else len(PROMPT) - 1 - kept)


def test_hidden_states_are_those_of_the_last_pass_at_each_position() -> None:
    randomly, states = random.Random(3), HiddenStates()
    truth: dict[int, int] = {}
    for step in range(300):
        end = states.end
        position = max(0, end - randomly.randrange(6)) if randomly.random() < 0.97 else end + 3
        rows = randomly.choice([1, 1, 3, 9, 200])
        if position > end:  # others were read elsewhere
            truth = {}
        truth = {at: value for at, value in truth.items() if at < position}
        truth |= {position + row: 1000 * step + row for row in range(rows)}
        states.write(position, mx.array([[[truth[position + row]] for row in range(rows)]]))
        assert states.end == position + rows
        assert states.end - states.start >= min(len(truth), 512)
        begin = randomly.randrange(states.start, states.end)
        stop = randomly.randrange(begin + 1, states.end + 1)
        wanted = [truth[at] for at in range(begin, stop)]
        assert states.read(begin, stop)[0, :, 0].tolist() == wanted


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def run(engine: Engine, mode: DraftMode, sampling: SamplingOptions = GREEDY) -> Any:
    options = GenerateOptions(max_tokens=24, draft=mode, sampling=sampling)
    head = replace(engine.mtp_head, relative_cost=1e-6) if engine.mtp_head else None
    session = Session(replace(engine, mtp_head=head))
    session.drafting.curve = CostCurve(FREE)
    first = session.generate(PROMPT, options).answer()
    again = [*PROMPT, *first.tokens, 5, 6, 7]  # the next turn
    return [first, session.generate(again, options).answer()]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5", "mimo"])
def test_a_perfect_head_drafts_for_a_session(
    family: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers with and without it, in far fewer passes: its model looks at the last token
    only, and so does the head."""
    monkeypatch.setattr(MtpDrafter, "clock", lambda neural_drafter: 0.0)
    published = perfect_weights(directory, family)
    engine = Engine.load(directory)
    assert engine.mtp_head is not None
    for sampling in (SamplingOptions(temperature=0.8, seed=4), GREEDY):
        bare, drafted = run(engine, "off", sampling), run(engine, "mtp", sampling)
        assert [each.tokens for each in drafted] == [each.tokens for each in bare]
        for each in drafted:
            assert each.stats.tokens_per_pass > 1.5
            assert each.stats.acceptance_rate > 0.9
    turned = {name: -weight for name, weight in published.items()}
    mx.save_safetensors(str(directory / HEAD_FILE), turned)
    drafted = run(Engine.load(directory), "auto")
    assert [each.tokens for each in drafted] == [each.tokens for each in bare]


def test_its_memory_counts_and_what_has_none_says_so(directory: Path) -> None:
    write_checkpoint(directory, "qwen3_5", head=False)
    without = Engine.load(directory)
    with pytest.raises(UsageError, match="no MTP head"):
        Session(without).generate(PROMPT, GenerateOptions(draft="mtp"))
    write_checkpoint(directory, "qwen3_5")
    engine = Engine.load(directory)
    assert engine.mtp_head is not None
    head = engine.mtp_head.head
    size = sum(value.nbytes for _, value in tree_flatten(head.parameters()))
    more = engine.plan.fit.needs.weights - without.plan.fit.needs.weights
    assert more == size == engine.mtp_head.needs.weights
    cache = head.make_cache()
    rows = mx.zeros((1, 256, head.width))
    head(rows, rows, cache)
    grown = engine.plan.fit.needs.cache.at(256) - without.plan.fit.needs.cache.at(256)
    assert grown == kv_cache.nbytes(cache)
    least = without.plan.fit.needs.at(512).total
    tight = Engine.load(directory, LoadOptions(memory_limit=least + size // 2))
    assert tight.mtp_head is None
    assert "not enough memory" in tight.no_mtp_head_reason
