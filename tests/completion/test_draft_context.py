"""Draft context: texts to draft from that are never prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from akunu_py.decoding.generate.session import Session
from akunu_py.types import GenerateOptions
from tests.support.tiny_fim import load_tiny


def test_only_what_changed_is_learned_again(tmp_path: Path) -> None:
    engine = load_tiny(tmp_path, ["<|endoftext|>"])
    session = Session(engine)
    calls: list[Sequence[int]] = []  # tokens that the session's drafters observe

    def watched(drafter: Any) -> Any:
        extend = drafter.extend
        drafter.extend = lambda tokens: (calls.append(list(tokens)), extend(tokens))
        return drafter

    session.drafting.wrap = watched
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
