"""The auto drafter: drafts of generated texts, limits, learning, probes, memory."""

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import create_autospec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.replay import TraceItem
from akunu_py.ngram import auto
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.auto import MAX_DRAFT, AutoDrafter
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.prediction import Continuation
from akunu_py.types import Drafter
from tests.support.drafters import Choices
from tests.support.simulated_drafters import DrafterFigures, SimulatedDrafters, replay_simulated

CHEAP = {1: 1.0, 5: 1.1, 32: 1.5}
FREE = {1: 1.0, 33: 1.01}  # every draft pays
NEWLINE, END, START, USER, ASSISTANT = range(5)
AFTER_ANSWER = [END, NEWLINE, START, USER, NEWLINE]
BEFORE_ANSWER = [END, NEWLINE, START, ASSISTANT, NEWLINE]
REPEATED = [1, 2, 3, 4, 5, 6, 7, 8] * 10


def drive(drafter: Drafter, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, int, int]:
    """Play a target whose output is `output`. Return (passes, drafted, accepted)."""
    drafter.extend(prompt)
    drafter.extend(output[:1])
    done, passes, drafted, accepted = 1, 0, 0, 0
    while done < len(output):
        limit = len(output) - done - 1
        draft = drafter.propose(limit)
        assert len(draft) <= min(limit, MAX_DRAFT)
        k = 0
        while k < len(draft) and draft[k] == output[done + k]:
            k += 1
        drafter.observe(len(draft), k, 1 + len(draft), 1.0)
        drafter.extend(output[done : done + k + 1])
        done += k + 1
        passes, drafted, accepted = passes + 1, drafted + len(draft), accepted + k
    return passes, drafted, accepted


def cheap(**options: Any) -> AutoDrafter:
    return AutoDrafter(CostCurve(CHEAP), **options)


def copy_of(count: int, change: Callable[[int, int], Sequence[int]], seed: int) -> TraceItem:
    """Return a text, and an output that copies it token by token with changes."""
    source = random.Random(seed).choices(range(100, 1000), k=count)
    output = [new for place, token in enumerate(source) for new in change(place, token)]
    return TraceItem(tuple(source), tuple(output))


def conversation(seed: int) -> TraceItem:
    """Return turns whose answers repeat phrases of earlier answers."""
    rng = random.Random(seed)
    phrases = [rng.choices(range(10, 60), k=9) for _ in range(12)]
    answers = [[token for phrase in rng.sample(phrases, 6) for token in phrase] for _ in range(6)]
    prompt: list[int] = []
    for answer in answers[:-1]:
        message = rng.choices(range(10, 60), k=20)
        prompt += [*AFTER_ANSWER, *message, *BEFORE_ANSWER, *answer]
    return TraceItem((*prompt, *AFTER_ANSWER, 11, *BEFORE_ANSWER), tuple(answers[-1]))


BREAK, DEEPER, COLON, BACKSLASH, LETTER_N, QUOTE, ESCAPED, OLD, NEW = range(1, 10)


def lines_edited(kind: str, *, back: bool = False, seed: int = 0, words: int = 7) -> TraceItem:
    """Return 40 lines and their edited copy, or the other way round (`back`)."""
    rng, source, target = random.Random(seed), list[int](), list[int]()
    written = {
        "indented": {BREAK: [DEEPER]},
        "escaped": {BREAK: [BACKSLASH, LETTER_N], QUOTE: [ESCAPED]},
    }.get(kind, {})
    for number in range(10, 50):
        half, rest = rng.choices(range(100, 400), k=words), rng.choices(range(100, 400), k=3)
        line = [BREAK, *half, QUOTE, *rest, QUOTE, OLD, rng.randrange(100, 400)]
        source += line
        if kind == "numbered":
            line[1:1] = [20 + number // 10, 20 + number % 10, COLON]
        target += [new for token in line for new in written.get(token, [token])]
    source, target = (target, source) if back else (source, target)
    return TraceItem((0, *source, 0, 0, 50, 51), (52, *target))


TEXTS = {
    "unnumbered": lines_edited("numbered", back=True),
    "indented": lines_edited("indented", seed=1),
    "escaped": lines_edited("escaped", seed=3, words=12),
    "copy": copy_of(400, lambda place, token: [token], 1),
    "replaced": copy_of(600, lambda place, token: [5000 + place if place % 60 == 40 else token], 3),
    "inserted": copy_of(400, lambda place, token: [7, token] if token < 200 else [token], 4),
    "omitted": copy_of(400, lambda place, token: [] if place % 9 == 4 else [token], 5),
    "conversation": conversation(6),
    "words": TraceItem(
        tuple(random.Random(6).choices(range(50), k=300)),
        tuple(random.Random(7).choices(range(50), weights=range(1, 51), k=400)),
    ),
}
# (passes, drafted, accepted): alone, with reruns and an answer cache, and passes with an MTP head.
RECORDED = {
    "unnumbered": ((27, 635, 573), (25, 662, 575), 29),
    "indented": ((27, 606, 573), (23, 605, 577), 31),
    "escaped": ((71, 893, 769), (39, 855, 801), 80), "copy": ((14, 385, 385), (14, 385, 385), 14),
    "replaced": ((25, 655, 574), (27, 686, 572), 32),
    "inserted": ((105, 1226, 341), (90, 1121, 356), 97),
    "omitted": ((49, 598, 306), (47, 552, 308), 90),
    "conversation": ((6, 95, 47), (5, 89, 48), 10), "words": ((395, 405, 4), (286, 556, 113), 137),
}  # fmt: skip


def drafts_of(name: str) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    prompt, output = TEXTS[name].prompt, TEXTS[name].output
    memory = AnswerCache(10)
    memory.learn(output[::-1] + output[:100])
    alone = drive(cheap(), prompt, output)
    other = drive(cheap(rerun_on_reject=True, answer_cache=memory), prompt, output)
    drafters = SimulatedDrafters([DrafterFigures("mtp", 0.06, (0.8, 0.65, 0.5))])
    curve = parse_curve("m5max")
    found = replay_simulated(
        [TEXTS[name]],
        lambda: AutoDrafter(CostCurve(curve.points), neural_drafters=drafters.make("auto")),
        curve,
        drafters,
    )
    return alone, other, found["passes"]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_drafted_as_recorded(name: str) -> None:
    """A change of the estimates changes the numbers: record them anew if they are better."""
    assert drafts_of(name) == RECORDED[name]


@settings(max_examples=24)
@given(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 5), min_size=1, max_size=60),
    st.booleans(),
    st.booleans(),
)
def test_any_text_is_followed_to_its_end_with_the_same_drafts_each_time(
    prompt: list[int], output: list[int], rerun: bool, cached: bool
) -> None:
    memory = AnswerCache(6)
    memory.learn(prompt)
    before, found = memory.dump(), []
    for _ in range(2):
        drafter = cheap(rerun_on_reject=rerun, answer_cache=memory if cached else None)
        found.append(drive(drafter, prompt, output))
        assert drafter.index.tokens == prompt + output
    assert found[0] == found[1]
    assert memory.dump() == before


def test_nothing_is_drafted_without_matches_or_where_it_cannot_pay() -> None:
    text = random.Random(1).sample(range(10000), 500)
    assert drive(cheap(), text[:200], text[200:])[1] == 0
    words = random.Random(2).choices(range(300), k=600)
    expensive = AutoDrafter(CostCurve({1: 1.0, 2: 2.0, 32: 32.0}))
    assert drive(expensive, words[:200], words[200:])[1] < 10


def test_drafts_keep_the_limit_and_end_with_a_stop_token() -> None:
    drafter, stopping = cheap(), cheap(stop_tokens=[4])
    for each in (drafter, stopping):
        each.extend(REPEATED)
    assert drafter.propose(2) == [1, 2]
    assert drafter.propose(0) == []
    assert 2 < len(drafter.propose(100)) <= MAX_DRAFT
    assert stopping.propose(32) == [1, 2, 3, 4]


def test_a_new_prompt_starts_a_new_answer() -> None:
    drafter = cheap()
    drive(drafter, [1, 2, 3], [4, 5, 6, 7])
    drafter.propose(8)  # abandoned: the user cancelled
    drafter.extend([9] * 40)
    assert drafter.tracker.answer_start == drafter.index.size - 1
    drafter.extend([3])
    draft = drafter.propose(4)
    drafter.observe(len(draft), 0, 1 + len(draft), 1.0)
    answer_start = drafter.tracker.answer_start
    drafter.extend([4])
    drafter.extend([5])  # a plain step without a proposal
    assert drafter.tracker.answer_start == answer_start


class Discouraging(CostCurve):
    def table(self, context: int) -> list[float]:
        return [0.01] + [1.0] * (MAX_ROWS - 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_curve_that_forbids_drafting_is_probed_ever_more_rarely(ahead: bool) -> None:
    """ahead: plain steps are pipelined, so that a probe waits for the step that is running."""
    passage, curve = random.Random(1).sample(range(3000), 1500), Discouraging()
    drafter = AutoDrafter(curve)
    drafter.extend(passage)
    probes, running = list[int](), False
    for i, token in enumerate(passage[:900]):
        if i == 200:  # another conversation on the same machine
            drafter = AutoDrafter(curve)
            drafter.extend([*passage, *passage[:i]])
        draft = drafter.propose(8)
        drafted = 0 if running else len(draft)
        running = ahead and not draft
        if drafted:
            probes.append(i)
            assert drafted == 4
        drafter.observe(drafted, 0, 1 + drafted, 0.01)
        drafter.extend([token])
    assert len(probes) == 2
    assert 250 < probes[0] < 280
    assert 510 < probes[1] - probes[0] < 560


def test_seconds_teach_the_curve_by_the_rows_of_the_pass() -> None:
    curve = CostCurve()
    drafter = AutoDrafter(curve, rerun_on_reject=True)
    drafter.extend(REPEATED)
    draft = drafter.propose(8)
    assert draft
    for _ in range(2):  # the first time of a row count is dropped
        drafter.observe(len(draft), 0, 4 + len(draft), 5.0)  # three tokens were run again
    assert not curve.measured(1 + len(draft))
    assert curve.measured(4 + len(draft))


def test_costs_are_those_of_the_prefilled_context(monkeypatch: pytest.MonkeyPatch) -> None:
    table = create_autospec(CostCurve.table, side_effect=CostCurve.table)
    monkeypatch.setattr(CostCurve, "table", table)
    drafter = AutoDrafter()
    drafter.draft_only_tokens = 3
    drafter.extend([1, 2, 3, 4, 5])
    drafter.propose(4)
    assert {call.args[1] for call in table.call_args_list} == {2}


def test_the_first_time_of_each_row_count_is_dropped() -> None:
    """The first pass compiles a kernel."""
    drafter = AutoDrafter()
    drafter.extend([1, 2, 3])
    for rows, seconds in [(1, 0.5), (1, 0.01), (3, 0.06), (1, 0.01), (3, 0.012), (5, 0.3)]:
        drafter.propose(8)
        drafter.observe(rows - 1, 0, rows, seconds)
    costs = drafter.curve.table(0)
    assert costs[0] == pytest.approx(0.01)
    assert costs[2] < 0.013
    assert costs[4] < 0.02
    assert not drafter.curve.measured(5)
    again = AutoDrafter(CostCurve.from_dict(drafter.curve.to_dict()))  # another process
    again.observe(2, 0, 3, 0.06)
    assert again.curve.table(0)[2] == pytest.approx(costs[2])


def elements(drafter: AutoDrafter) -> int:
    """Return the number of elements of all containers that the drafter references."""
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
    """Copy a text with edits that write `secret`; return the draft tokens."""
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
    limit, kinds = 50, 12  # of outcomes, edits and skips
    monkeypatch.setattr(auto, "MAX_OUTCOMES", limit)
    draw, drafter = random.Random(1), AutoDrafter(CostCurve(FREE))
    sizes = []
    for number in range(30):
        converse(drafter, draw)
        if number % 3 == 2:
            sizes.append(elements(drafter))
    assert max(sizes) < sizes[0] + 2 * kinds * limit
    assert max(sizes[5:]) <= max(sizes[:5]) * 1.2


@pytest.mark.parametrize("forget", [False, True])
def test_a_forgotten_text_is_not_drafted(forget: bool) -> None:
    secret, draw, drafter = 99, random.Random(1), AutoDrafter(CostCurve(FREE))
    for _ in range(8):
        converse(drafter, draw, secret)
    drafter.rewind(0)
    if forget:
        drafter.forget_texts()
    drafted = set().union(*(converse(drafter, draw) for _ in range(3)))
    assert (secret in drafted) == (not forget)


def drafter_of(text: Sequence[int], **options: object) -> AutoDrafter:
    drafter = AutoDrafter(CostCurve(FREE), **options)  # type: ignore[arg-type]
    drafter.extend(text[:-1])
    drafter.extend(text[-1:])
    return drafter


def test_a_forbidden_token_ends_the_draft_without_side_effects() -> None:
    text = [*range(40), 99, *range(10)]
    drafter, guide = drafter_of(text), Choices([*range(10, 20), 50])
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


def test_ahead_draft_is_verified_against_its_own_tokens() -> None:
    """And not against the token of the running step, which comes first."""
    drafters = SimulatedDrafters([DrafterFigures("mtp", 0.06, (0.99,))])  # only its first is right
    text = [*range(100), *range(40)]
    drafters.item = TraceItem(tuple(text), tuple(range(40, 60)))
    drafter = drafter_of(text, neural_drafters=drafters.make("auto"))
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
