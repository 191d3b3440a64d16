"""Draft context: texts to draft from that are never prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.ngram.acceptance_model import SharedWeights
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.types import GenerateOptions
from tests.support.tiny_fim import load_tiny


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(Path(tmp_path_factory.mktemp("tiny")), ["<|endoftext|>"])


def record_observed(session: Session) -> list[list[int]]:
    """What the session's drafters observe from here on, a list for each call."""
    calls: list[list[int]] = []

    class Watched:
        def __init__(self, drafter: Any) -> None:
            self.propose, self.observe = drafter.propose, drafter.observe
            self.offer, self.take = drafter.offer, drafter.take
            self._drafter = drafter
            self.pipelines = False

        def extend(self, tokens: Sequence[int]) -> None:
            calls.append(list(tokens))
            self._drafter.extend(tokens)

    session.drafting.wrap = Watched
    return calls


def test_only_what_changed_is_learned_again(engine: Engine) -> None:
    session = Session(engine)
    calls = record_observed(session)
    options = GenerateOptions(max_tokens=8)
    draft_context = [tuple(range(10, 60)), tuple(range(60, 90))]
    prompt = engine.tokens.encode("def compute(first, second):\n    return fir")
    session.generate(prompt, options, draft_context).answer()
    assert sum(map(len, calls)) >= 82 + len(prompt)
    calls.clear()
    typed = [*prompt, *engine.tokens.encode("s")]
    answer = session.generate(typed, options, draft_context).answer()
    # The letter, unless the model had sampled it anyhow, and the answer.
    assert sum(map(len, calls)) <= 1 + len(answer.tokens) + 1
    calls.clear()
    session.generate(typed, options, [draft_context[0], (1, 2, 3)]).answer()
    assert 4 + len(typed) <= sum(map(len, calls)) <= 4 + len(typed) + 9


def test_completions_are_not_remembered(engine: Engine) -> None:
    class Kept:
        answer_cache, curve, caches = None, AutoDrafter().curve, None
        neural_drafters: ClassVar[dict[str, Any]] = {}
        weights = SharedWeights()
        remembered = 0

        def add_answer(self, tokens: Sequence[int]) -> None:
            self.remembered += 1

        def save_costs(self) -> None:
            self.remembered += 1

    kept: Any = Kept()
    session = Session(engine, kept)
    prompt = engine.tokens.encode("a = ")
    session.generate(prompt, GenerateOptions(max_tokens=4, may_store=False)).answer()
    assert kept.remembered == 0
    session.generate(prompt, GenerateOptions(max_tokens=4)).answer()
    assert kept.remembered == 2
