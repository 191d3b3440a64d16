"""Replays: trace files, curves, and passes counted by hand."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from akunu_py.bench.curve import Curve, parse_curve
from akunu_py.bench.replay import PromptLookupDrafter, TraceItem, load_trace, replay
from akunu_py.errors import UsageError
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from tests.support.drafters import OffersAll


class Scripted(OffersAll):
    """Proposes the given drafts, and records its calls."""

    pipelines = False

    def __init__(self, *drafts: Sequence[int]) -> None:
        self.drafts = list(drafts)
        self.calls: list[object] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.calls.append(tuple(tokens))

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        self.calls.append(limit)
        return list(self.drafts.pop(0))[:limit]

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        self.calls.append((accepted, seconds))


def test_acceptance_weights_carry_over_to_the_next_item() -> None:
    """Answers of short copies pay off sooner where the item before had such copies too."""
    items = []
    for number in range(6):
        rng = random.Random(number)
        prompt = [1000 * number + rng.randrange(50) for _ in range(300)]
        starts = [rng.randrange(292) for _ in range(30)]
        answer = [token for start in starts for token in prompt[start : start + 8]]
        items.append(TraceItem(tuple(prompt), tuple(answer)))
    curve = parse_curve("m1")

    def passes(chosen: Sequence[TraceItem]) -> int:
        return int(replay(chosen, lambda: AutoDrafter(CostCurve(curve.points)), curve)["passes"])

    assert passes(items) < 0.9 * sum(passes([each]) for each in items)


def test_passes_counted_by_hand() -> None:
    item = TraceItem((1,), (10, 11, 12, 13, 14, 15))
    drafter = Scripted((11, 12, 99, 99), (), (15,))
    counts = replay([item], lambda: drafter, Curve({1: 1.0, 5: 1.4}))
    assert drafter.calls == [
        (1,), (10,), *(4, (2, 1.4), (11, 12, 13)), *(1, (0, 1.0), (14,)), *(0, (0, 1.0), (15,)),
    ]  # fmt: skip
    assert counts.pop("draft_us_per_token") > 0
    assert counts.pop("learn_us_per_prompt_token") > 0
    assert counts == {
        "items": 1, "tokens": 5, "passes": 3, "drafted": 4, "accepted": 2,
        "tokens_per_pass": round(5 / 3, 4), "score": round(5 / 3.4, 4),
    }  # fmt: skip


def test_a_drafter_that_exceeds_its_limit_is_refused() -> None:
    class Greedy(Scripted):
        def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
            return [0] * (limit + 1)

    with pytest.raises(ValueError, match="at most 1"):
        replay([TraceItem((1,), (1, 2, 3))], Greedy, parse_curve("cpu"))


def test_prompt_lookup_copies_the_first_match() -> None:
    drafter = PromptLookupDrafter()
    drafter.extend([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 6, 6, 2, 3])
    assert drafter.propose(3) == [4, 9, 1]
    assert len(drafter.propose(32)) == 10
    drafter.extend([77])
    assert drafter.propose(3) == []


@pytest.mark.parametrize("latency", [0.002, 0.2, 24.0])
def test_network_latency_makes_rows_cheaper_relative_to_a_plain_step(latency: float) -> None:
    curve = parse_curve("m5max")
    delayed = curve.with_latency(latency)
    assert delayed(1) == 1
    for rows in range(2, 40):
        assert 1 < delayed(rows) < curve(rows)
        seconds = delayed(rows) * (1 + latency)
        assert seconds == pytest.approx(curve(rows) + latency)


def test_curves_are_linear_between_points_and_beyond() -> None:
    curve = parse_curve("1:1,3:1.11,5:1.42")
    assert [curve(1), curve(3), curve(5)] == [1.0, 1.11, 1.42]
    assert curve(2) == pytest.approx(1.055)
    assert curve(7) == pytest.approx(1.73)
    assert parse_curve("cpu")(20) == pytest.approx(1.67 + 0.04 * 12)
    assert parse_curve("m4pro")(100) == pytest.approx(3.9)
    assert parse_curve("1:2")(9) == 2.0
    step = parse_curve("m5max,33:7")
    assert [step(32), step(33)] == [3.2, 7.0]


@pytest.mark.parametrize(
    "text",
    ["", "m9", "m1,32:4", "1:1,m1", "1:1,3", "2:1", "1:1,1:2", "1:0", "1:-1", "1:nan", "0:1,1:1",
     "1:x"],
)  # fmt: skip
def test_invalid_curve_is_rejected(text: str) -> None:
    with pytest.raises(UsageError):
        parse_curve(text)


ITEMS = (
    3, {"prompt": [1]}, {"prompt": [1], "output": []}, {"prompt": [1], "output": [-1]},
    {"prompt": [True], "output": [1]}, {"prompt": [1.5], "output": [1]},
    {"prompt": "text", "output": [1]},
)  # fmt: skip


@pytest.mark.parametrize("content", [
    *({"tokenizer": "t", "workloads": {"a": [item]}} for item in ITEMS),
    {"tokenizer": "t", "workloads": []}, {"tokenizer": "t", "workloads": {"a": {}}},
    {"workloads": {}}, {"tokenizer": 3, "workloads": {}},
])  # fmt: skip
def test_malformed_traces_are_rejected(tmp_path: Path, content: object) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="expected"):
        load_trace(path)
