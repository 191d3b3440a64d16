"""Predictions chained into drafts, after the history and after the tokens of a neural drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.trace import TraceItem
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.chain import Continuation
from akunu_py.ngram.cost import CostCurve
from tests.measure.neural_drafters import DrafterFigures, SimulatedDrafters, replay_mixture

FREE = {1: 1.0, 33: 1.001}
RIGHT = DrafterFigures("mtp", 0.06, (0.99,))  # its first token, and no more


class Script:
    """A `DraftGuide` that allows one text and forces its even tokens."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.done = text, 0
        self.place: int | None = None

    def begin_draft(self) -> None:
        assert self.place is None
        self.place = self.done

    def forced(self) -> tuple[list[int], bool]:
        assert self.place is not None
        following = self.text[self.place : self.place + 1]
        return [token for token in following if token % 2 == 0], True

    def ending(self) -> tuple[list[int], int]:
        return [], 0

    def advance(self, token: int) -> bool:
        assert self.place is not None
        allowed = [token] == list(self.text[self.place : self.place + 1])
        self.place += allowed
        return allowed

    def end_draft(self) -> None:
        assert self.place is not None
        self.place = None


def drafter_of(text: Sequence[int], **options: object) -> AutoDrafter:
    drafter = AutoDrafter(CostCurve(FREE), **options)  # type: ignore[arg-type]
    drafter.extend(text[:-1])
    drafter.extend(text[-1:])
    return drafter


@settings(max_examples=32)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.booleans(), st.data())
def test_predictions_after_a_predicted_token_stay_the_same(
    text: list[int], guided: bool, data: st.DataObject
) -> None:
    drafter = drafter_of(text)
    guide = None
    chain, longest = drafter.chain, 20
    if guided:
        whole = [prediction.token for prediction in chain.after_history(0, longest, None)]
        guide = Script([token for token in whole if token >= 0])
    predictions = chain.after_history(0, longest, guide)
    found = [prediction.token for prediction in predictions if prediction.token >= 0]
    begins = data.draw(st.integers(0, max(0, len(found) - 1)))
    behind = Continuation(chain, predictions, found[:begins], longest, guide)
    for place, token in enumerate(found[begins:], begins + 1):
        chances = behind.add(token)
        assert chances is not None
        # What is unlikely further ahead may be predicted from here.
        assert [prediction.token for prediction in behind.predictions][
            : len(found) - place
        ] == found[place:]
        assert drafter.index.tokens == text + found[:place]
        assert guide is None or guide.place == place
    behind.end()
    assert drafter.index.tokens == text
    assert guide is None or guide.place is None


def test_a_forbidden_token_ends_the_draft_without_side_effects() -> None:
    text = [*range(40), 99, *range(10)]
    drafter, guide = drafter_of(text), Script([*range(10, 20), 50])
    predictions = drafter.chain.after_history(0, 20, guide)
    behind = Continuation(drafter.chain, predictions, [10, 11], 20, guide)
    assert behind.add(13) is None
    assert behind.predictions == []
    assert behind.add(12)
    assert [prediction.token for prediction in behind.predictions] == [*range(13, 20), 50]
    assert behind.add(14) is None
    assert len(behind.predictions) == 8
    behind.end()


def test_nothing_follows_a_stop_token_or_the_longest_draft() -> None:
    text = [*range(40), 99, *range(10)]
    drafter = drafter_of(text, stop_tokens=[12])
    predictions = drafter.chain.after_history(0, 20, None)
    assert [prediction.token for prediction in predictions] == [10, 11, 12]
    behind = Continuation(drafter.chain, predictions, [10, 11, 12], 20, None)
    assert behind.add(13)
    behind.end()
    behind = Continuation(drafter.chain, predictions, [10, 11], 20, None)
    assert behind.add(12) == []
    behind.end()
    for longest in range(4, 8):
        behind = Continuation(drafter.chain, predictions, [10, 11], longest, None)
        assert len(behind.add(20) or ()) == longest - 3
        behind.end()


def changed(seed: int) -> TraceItem:
    """A text, and a copy in which every tenth token is another."""
    randomly = random.Random(seed)
    prompt = [randomly.randrange(5000) for _ in range(300)]
    output = [token if i % 10 else 5000 + i for i, token in enumerate(prompt)]
    return TraceItem(tuple(prompt), tuple(output))


def test_an_edited_copy_continues_after_a_neural_token() -> None:
    """Only the neural drafter knows one token of ten; the copy continues after it in one pass."""
    items, curve = (changed(0), changed(1)), parse_curve("m5max")
    passes = {
        mode: replay_mixture(items, curve, mode, [RIGHT])["passes"] for mode in ("ngram", "auto")
    }
    assert passes["auto"] < 0.7 * passes["ngram"]


def with_head(text: list[int]) -> AutoDrafter:
    drafters = SimulatedDrafters([RIGHT])
    drafters.item = TraceItem(tuple(text), tuple(range(40, 60)))
    return drafter_of(text, neural_drafters=drafters.make("auto"))


def test_ahead_draft_is_verified_against_its_own_tokens() -> None:
    """And not against the token of the running step, which comes first."""
    drafter = with_head([*range(100), *range(40)])
    chooser = drafter._chooser
    predicted, correct = chooser._predicted, chooser._correct
    draft = drafter.propose(8, ahead=True)
    assert draft == list(range(41, 41 + len(draft)))
    assert len(draft) > 2
    drafter.observe(0, 0, 1, 1.0)
    drafter.extend([40])
    assert (chooser._predicted, chooser._correct) == (predicted, correct)
    drafter.observe(len(draft), len(draft), 1 + len(draft), 1.0)
    drafter.extend(range(41, 42 + len(draft)))
    assert chooser._correct == correct + len(draft)
    assert correct < chooser._correct < predicted + len(draft)
