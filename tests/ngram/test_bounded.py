"""What a drafter learns is bounded, however many texts it sees."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from akunu_py.ngram import auto
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve

LIMIT = 100
FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays


def elements(drafter: AutoDrafter) -> int:
    """The elements of all containers that the drafter holds."""
    seen: set[int] = set()
    found, left = 0, [drafter]
    while left:
        each: Any = left.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        if isinstance(each, list | dict | set | tuple):
            found += len(each)
        left += gc.get_referents(each)
    return found


def converse(drafter: AutoDrafter, draw: random.Random, secret: int | None = None) -> set[int]:
    """A text that is copied with edits; returns the drafted tokens. secret: what edits write."""
    common = [draw.randrange(100, 100_000) for _ in range(30)]
    text = [draw.choice([*common, draw.randrange(100, 100_000)]) for _ in range(60)]
    text += [5, 6, 7, 5, 8, 9]
    drafter.rewind(0)
    drafter.extend([*text, 1, 2])
    drafted: set[int] = set()
    for token in text:
        tokens = [token]
        if token == 7:
            tokens = [secret, secret] if secret else [draw.randrange(100, 100_000)]
        for each in tokens:
            draft = drafter.propose(8)
            drafted.update(draft)
            accepted = int(bool(draft) and draft[0] == each)
            drafter.observe(len(draft), accepted, 1 + len(draft), 1.0)
            drafter.extend([each])
    return drafted


@pytest.mark.long
def test_many_texts_take_no_more_memory_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MAX_OUTCOMES", LIMIT, raising=False)
    draw, drafter = random.Random(1), AutoDrafter(CostCurve(FREE))
    sizes = []
    for number in range(120):
        converse(drafter, draw)
        if number % 10 == 9:
            sizes.append(elements(drafter))
    kinds = 12  # of outcomes, edits and skips
    assert max(sizes) < sizes[0] + 2 * kinds * LIMIT
    assert max(sizes[6:]) <= max(sizes[:6]) * 1.2


def test_a_forgotten_text_is_not_drafted() -> None:
    secret = 99
    for forget in (False, True):
        draw, drafter = random.Random(1), AutoDrafter(CostCurve(FREE))
        for _ in range(8):
            converse(drafter, draw, secret)
        drafter.rewind(0)
        if forget:
            drafter.forget_texts()
        drafted: set[int] = set()
        for _ in range(3):
            drafted |= converse(drafter, draw)
        assert (secret in drafted) == (not forget)
