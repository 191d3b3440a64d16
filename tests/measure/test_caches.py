"""The cache replay: sessions, tokens counted by hand, and policies."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from akunu_py.bench.trace import Trace, TraceItem
from tests.measure.caches import POLICIES, main, replay_caches, schedule, sessions_of

pytestmark = pytest.mark.rotating


def session(seed: int, turns: int = 8) -> list[TraceItem]:
    """A growing conversation."""
    draw = random.Random(seed)
    known = [draw.randrange(1000) for _ in range(600)]
    items = []
    for _ in range(turns):
        known += [draw.randrange(1000) for _ in range(draw.randrange(50, 500))]
        output = [draw.randrange(1000) for _ in range(20)]
        items.append(TraceItem(tuple(known), tuple(output)))
        known += output
    return items


SESSIONS = [session(seed) for seed in range(6)]


def test_trace_is_split_into_sessions() -> None:
    trace = Trace("t", {"agent": tuple(item for each in SESSIONS for item in each)})
    assert sessions_of(trace) == SESSIONS


@pytest.mark.parametrize("policy", POLICIES)
def test_large_budget_needs_no_second_prefill(policy: str) -> None:
    requests = schedule(SESSIONS, 3, 1, aside=True)
    counts = replay_caches(requests, 1 << 40, policy)
    assert counts.again <= 0.01 * counts.prompts  # ends of texts; 16 of them are kept at most
    assert counts.prompts == sum(len(item.prompt) for item in requests)
    alone = replay_caches(SESSIONS[0], 1 << 40, policy)
    last = SESSIONS[0][-1].prompt
    outputs = sum(len(item.output) - 1 for item in SESSIONS[0][:-1])
    assert (alone.read, alone.again) == (len(last) - outputs, 0)


@pytest.mark.long
def test_own_policy_prefills_less_again_than_lru() -> None:
    ours = oldest = 0
    for aside in (False, True):
        orders = [schedule(SESSIONS, 3, seed, aside=aside) for seed in range(3)]
        for budget in (4_000, 6_000, 8_000, 12_000):
            again = [
                sum(replay_caches(each, budget, policy).again for each in orders)
                for policy in ("akunu", "lru")
            ]
            assert again[0] <= again[1]
            ours, oldest = ours + again[0], oldest + again[1]
    assert ours < 0.9 * oldest


def test_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    items = [{"prompt": item.prompt, "output": item.output} for item in SESSIONS[0]]
    path.write_text(json.dumps({"tokenizer": "t", "workloads": {"agent": items}}))
    words = [str(path), "--budget", "3000", "--repeats", "1"]
    assert main(words) == 0
    assert "lru" in capsys.readouterr().out
    assert main([*words, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["aside"] for row in rows] == [False, True]
