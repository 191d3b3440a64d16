"""The auto drafter: protocol, limits, learning, copies through changes, memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.ngram.acceptance_model import NO_OUTCOMES, AcceptanceModel, Candidate, push, sigmoid
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.auto import MAX_DRAFT, AutoDrafter
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.prediction import FROM_SKIP
from akunu_py.types import Drafter

CHEAP = {1: 1.0, 5: 1.1, 32: 1.5}
DEAR = {1: 1.0, 2: 2.0, 32: 32.0}


def drive(
    drafter: Drafter, prompt: Sequence[int], output: Sequence[int], seconds: float = 1.0
) -> tuple[int, int, int]:
    """Plays a target whose output is `output`. Returns (passes, drafted, accepted)."""
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
        drafter.observe(len(draft), k, 1 + len(draft), seconds)
        drafter.extend(output[done : done + k + 1])
        done += k + 1
        passes, drafted, accepted = passes + 1, drafted + len(draft), accepted + k
    return passes, drafted, accepted


def cheap(**options: object) -> AutoDrafter:
    return AutoDrafter(CostCurve(CHEAP), **options)  # type: ignore[arg-type]


def test_the_last_three_outcomes_are_kept() -> None:
    outcomes = NO_OUTCOMES
    seen = [outcomes := push(outcomes, hit) for hit in (True, False, True, True)]
    assert seen == [0b11, 0b110, 0b1101, 0b1011]


def test_a_candidate_learns_from_being_right_and_wrong() -> None:
    model = AcceptanceModel()
    before = sigmoid(model.skip[NO_OUTCOMES])
    for _ in range(20):
        candidate = Candidate(7, FROM_SKIP, 0.1, model.skip_tables, (NO_OUTCOMES,), [])
        candidate.learn(7)
    assert sigmoid(model.skip[NO_OUTCOMES]) > before
    for _ in range(100):
        candidate = Candidate(7, FROM_SKIP, 0.1, model.skip_tables, (NO_OUTCOMES,), [])
        candidate.learn(8)
    assert sigmoid(model.skip[NO_OUTCOMES]) < before


@settings(max_examples=24)
@given(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 5), min_size=1, max_size=60),
    st.booleans(),
    st.booleans(),
)
def test_any_text_is_followed_to_its_end(
    prompt: list[int], output: list[int], rerun: bool, remember: bool
) -> None:
    memory = AnswerCache(6) if remember else None
    if memory is not None:
        memory.learn(prompt)
    drafter = cheap(rerun_on_reject=rerun, answer_cache=memory)
    drive(drafter, prompt, output)
    assert drafter.index.tokens == prompt + output


def test_a_copy_is_drafted_at_full_length() -> None:
    passage = random.Random(1).sample(range(1000), 400)
    passes, drafted, accepted = drive(cheap(), passage, passage)
    assert passes < 30
    assert accepted > 0.9 * drafted


def test_nothing_is_drafted_without_matches_or_where_it_cannot_pay() -> None:
    text = random.Random(1).sample(range(10000), 500)
    assert drive(cheap(), text[:200], text[200:])[1] == 0
    words = random.Random(2).choices(range(300), k=600)
    _, drafted, _ = drive(AutoDrafter(CostCurve(DEAR)), words[:200], words[200:])
    assert drafted < 10


def test_a_copy_is_resumed_after_changes() -> None:
    rng = random.Random(3)
    source = rng.choices(range(1000), k=600)
    edited = list(source)
    for place in range(40, 600, 60):
        edited[place] = 5000 + place
    passes, _, _ = drive(cheap(), source, edited)
    assert passes < 100


def test_fields_of_a_table_are_filled_in() -> None:
    rng = random.Random(4)
    tab, line, names = 1, 2, (10, 11, 12)
    rows = [[[rng.randrange(100, 900) for _ in range(3)] for _ in names] for _ in range(12)]
    prompt: list[int] = []
    output = [3]
    for row in rows:
        for name, value in zip(names, row, strict=True):
            prompt += [*value, line if name == names[-1] else tab]
            output += [20, name, 21, 22, *value, 23, 24]
        output += [25, 26]
    passes, _, _ = drive(cheap(), prompt, output)
    assert len(output) / passes > 3


def test_the_limit_is_kept() -> None:
    drafter = cheap()
    drafter.extend([1, 2, 3, 4, 5, 6, 7, 8] * 10)
    assert drafter.propose(2) == [1, 2]
    assert drafter.propose(0) == []
    assert len(drafter.propose(100)) <= MAX_DRAFT


def test_a_draft_ends_with_a_stop_token() -> None:
    drafter = cheap(stop_tokens=[4])
    drafter.extend([1, 2, 3, 4, 5, 6, 7, 8] * 10)
    assert drafter.propose(32) == [1, 2, 3, 4]


def test_a_new_prompt_begins_a_new_answer() -> None:
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
    drafter.extend([5])  # a plain step that nothing was proposed for
    assert drafter.tracker.answer_start == answer_start


class Discouraging(CostCurve):
    def table(self, context: int) -> list[float]:
        return [0.01] + [1.0] * (MAX_ROWS - 1)


def test_a_probe_that_a_plain_step_came_before_is_run_next() -> None:
    passage = random.Random(1).sample(range(3000), 900)
    drafter = AutoDrafter(Discouraging())
    drafter.extend(passage)
    ahead = False  # whether a plain step is under way, as where they are pipelined
    run: list[int] = []
    for i, token in enumerate(passage):
        draft = drafter.propose(8)
        drafted = 0 if ahead else len(draft)
        ahead = not draft
        if drafted:
            run.append(i)
        drafter.observe(drafted, 0, 1 + drafted, 0.01)
        drafter.extend([token])
    assert len(run) == 2
    assert 250 < run[0] < 280


def test_a_curve_that_forbids_drafting_is_probed_ever_more_rarely() -> None:
    passage = random.Random(1).sample(range(3000), 1500)
    curve = Discouraging()
    drafter = AutoDrafter(curve)
    drafter.extend(passage)
    probes = []
    for i, token in enumerate(passage):
        if i == 200:  # another conversation on the same machine
            drafter = AutoDrafter(curve)
            drafter.extend([*passage, *passage[:i]])
        draft = drafter.propose(8)
        if draft:
            probes.append(i)
            assert len(draft) == 4
        drafter.observe(len(draft), 0, 1 + len(draft), 0.01)
        drafter.extend([token])
    assert len(probes) == 2
    assert 250 < probes[0] < 280
    assert 510 < probes[1] - probes[0] < 560


def test_a_preset_curve_is_not_probed() -> None:
    passage = random.Random(1).sample(range(1000), 300)
    drafter = AutoDrafter(CostCurve({1: 0.01, 2: 1.0}))
    drafter.extend(passage)
    for token in passage:
        assert drafter.propose(8) == []
        drafter.observe(0, 0, 1, 0.01)
        drafter.extend([token])


def test_seconds_teach_the_curve_by_the_rows_of_the_pass() -> None:
    curve = CostCurve()
    drafter = AutoDrafter(curve, rerun_on_reject=True)
    drafter.extend([1, 2, 3, 4, 5, 6, 7, 8] * 10)
    draft = drafter.propose(8)
    assert draft
    for _ in range(2):  # the first time of a row count is dropped
        drafter.observe(len(draft), 0, 4 + len(draft), 5.0)  # three tokens were read again
    assert not curve.measured(1 + len(draft))
    assert curve.measured(4 + len(draft))


def test_costs_are_those_of_the_context_that_the_target_reads() -> None:
    drafter = AutoDrafter()
    drafter.draft_only_tokens = 3
    drafter.extend([1, 2, 3, 4, 5])
    seen: list[int] = []
    table = drafter.curve.table
    drafter.curve.table = lambda context: seen.append(context) or table(context)  # type: ignore
    drafter.propose(4)
    assert set(seen) == {2}


def test_answer_cache_helps_new_text_and_stays_unchanged() -> None:
    answer = random.Random(5).sample(range(1000), 200)
    memory = AnswerCache(10)
    memory.learn(answer)
    before = memory.dump()
    with_memory, _, _ = drive(cheap(answer_cache=memory), [7, 8, 9], answer)
    without, _, _ = drive(cheap(), [7, 8, 9], answer)
    assert with_memory < 0.5 * without
    assert memory.dump() == before


def test_same_history_same_drafts() -> None:
    words = random.Random(6).choices(range(50), k=800)
    assert drive(cheap(), words[:300], words[300:]) == drive(cheap(), words[:300], words[300:])


def test_a_long_conversation_stays_small() -> None:
    words = random.Random(7).choices(range(49152), k=32000)
    tracemalloc.start()
    try:
        drafter = cheap()
        drafter.extend(words)
        assert tracemalloc.get_traced_memory()[0] < 64e6
    finally:
        tracemalloc.stop()


def test_the_first_time_of_each_row_count_is_dropped() -> None:
    """One pass that compiled a kernel: 60 ms at 3 rows, where plain takes 10."""
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
    # Another process: what was saved is kept, and its own first times are dropped too.
    again = AutoDrafter(CostCurve.from_dict(drafter.curve.to_dict()))
    again.observe(2, 0, 3, 0.06)
    assert again.curve.table(0)[2] == pytest.approx(costs[2])
