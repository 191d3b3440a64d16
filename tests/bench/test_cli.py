"""`akunu bench` as a user runs it. Counts and shapes are checked, never times."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.curve import print_curve
from akunu_py.models.drafters.block import BlockDrafter
from akunu_py.models.store.model_store import StoredModel
from tests.support.bench_fakes import TRACE, write_quick_model
from tests.support.command import assert_one_line_error, printed, run_here
from tests.support.published_drafters import write_drafter


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TRACE).encode()))
    return path


@pytest.fixture(scope="module")
def quick(starter: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_model(tmp_path_factory.mktemp("model") / "quick", starter.path)


def bench(*args: str) -> Any:
    return json.loads(printed("bench", *args, "--format", "json"))


def test_replay_prints_all_counts(trace: Path) -> None:
    result = bench("replay", str(trace), "--curve", "m5max")
    assert (result["curve"], result["draft"]) == ("m5max", "auto")
    loop, fresh = result["workloads"]["loop"], result["workloads"]["fresh"]
    assert set(loop) == {
        "items", "tokens", "passes", "drafted", "accepted", "tokens_per_pass", "score",
        "draft_us_per_token", "learn_us_per_prompt_token",
    }  # fmt: skip
    assert (loop["items"], loop["tokens"]) == (2, 198)
    assert loop["passes"] + loop["accepted"] == loop["tokens"]
    assert loop["score"] > 3
    assert fresh["score"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("options", "low", "high"), [  # bounds of tokens per pass
    ("--draft off", 1.0, 1.0),
    ("--draft fixed --curve 1:1,5:2,9:4", 4.0, 5.0),
    ("--draft fixed --draft-tokens 2", 2.0, 3.0),
    ("--curve 1:1,2:40", 1.0, 1.0),
    ("--curve 1:1,2:3 --latency 2000", 2.0, 40.0),
])  # fmt: skip
def test_replay_modes_and_curves(trace: Path, options: str, low: float, high: float) -> None:
    found = bench("replay", str(trace), *options.split())["workloads"]["loop"]
    assert low <= found["tokens_per_pass"] <= high
    assert (found["score"] == 1.0) == (high == 1.0)


def test_memory_learns_from_item_to_item(tmp_path: Path) -> None:
    item = {"prompt": [1, 2, 3], "output": list(range(500, 600))}
    path = tmp_path / "cold.json"
    path.write_text(json.dumps({"tokenizer": "none", "workloads": {"cold": [item] * 4}}))
    without = bench("replay", str(path))["workloads"]["cold"]
    learned = bench("replay", str(path), "--memory")["workloads"]["cold"]
    assert learned["passes"] < 0.7 * without["passes"]


def test_compare_prints_drafters_side_by_side(trace: Path) -> None:
    table = run_here("bench", "replay", str(trace), "--compare").stdout
    for word in ("fixed 4", "prompt lookup", "auto", "loop", "fresh"):
        assert word in table
    both = bench("replay", str(trace), "--compare", "--workload", "loop")["drafters"]
    assert set(both["auto"]) == {"loop"}
    assert both["auto"]["loop"]["score"] > both["fixed 4"]["loop"]["score"]


def test_replay_rejects_unreadable_traces(trace: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(trace.read_bytes()[:40])
    for args, word in (
        ((), "TRACES"),
        ((str(tmp_path / "none"),), "none"),
        ((str(damaged),), "damaged"),
        ((str(trace), "--curve", "m9"), "m5max"),
        ((str(trace), "--curve", "2:1"), "1 row"),
        ((str(trace), "--workload", "wibble"), "loop"),
        (("--record", str(tmp_path / "t"), "--prompts", str(tmp_path / "none")), "none"),
    ):
        assert_one_line_error(run_here("bench", "replay", *args), 2, word)


def test_record_answers_to_given_prompts(quick: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "own.json.gz"
    prompts.write_text("Name a colour.\nWhat is 2 + 2?\n")
    record = ("--record", str(out), "--prompts", str(prompts))
    printed("bench", "replay", *record, "--max-tokens", "12", "--model", quick)
    row = bench("replay", str(out))["workloads"]["prompts"]
    assert row["items"] == 2
    assert 0 < row["tokens"] < 24


def test_speed_compares_with_mlx_lm(quick: str) -> None:
    """One short run with every kind of runner, including a missing peer."""
    result = bench(
        "-p", "16", "-n", "4", "-d", "0,32", "--workload", "summary", "--workload", "multi-turn",
        "--max-tokens", "8", "--repeats", "1", "--draft-model", quick, "--model", quick,
        "--draft", "off",
        "--draft", "fixed", "--draft", "auto", "--draft", "memory",
    )  # fmt: skip
    assert result["complete"] is True
    assert [(row["test"], row["runner"]) for row in result["throughput"]] == [
        (test, loop)
        for test in ("pp16", "pp16 @ d32", "tg4", "tg4 @ d32")
        for loop in ("mlx-lm", "akunu")
    ]
    assert all(row["rates"][0] > 0 for row in result["throughput"])
    summary = {r["runner"]: r for r in result["runs"] if r["workload"] == "summary"}
    ours = ["off", "fixed 4", "auto", "auto + memory"]
    drafted = ["mlx-lm + draft model", "draft model", "auto + draft model"]
    assert list(summary) == ["mlx-lm", *drafted, *ours]
    assert all(row["repeats"][0]["tokens"] == 7 for row in summary.values())
    assert all(row["repeats"][0]["peak_bytes"] > 0 for row in summary.values())
    assert all(row["identical"] for name, row in summary.items() if name != "mlx-lm")
    assert summary["off"]["tokens_per_pass"] == 1
    turns = {r["runner"]: r for r in result["runs"] if r["workload"] == "multi-turn"}
    assert list(turns) == ["mlx-lm", *drafted, *ours]  # a failed runner is skipped
    assert all(row["repeats"][0]["tokens"] == 21 for row in turns.values())
    assert turns["auto"]["identical"] is True
    assert result["machine"]["versions"]["mlx"]
    assert result["command"].startswith("akunu bench -p 16")
    assert "1" in result["curve_s"]


def test_a_drafter_that_cannot_answer_is_measured_in_akunu_only(
    quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, states = [], BlockDrafter.states  # passes of the model that the drafter follows

    def follow(drafter: BlockDrafter, hidden: Any) -> Any:
        followed.append(hidden.shape)
        return states(drafter, hidden)

    monkeypatch.setattr(BlockDrafter, "states", follow)
    drafter = write_drafter(tmp_path / "drafter", 32, 49_152)
    options = ("--workload", "summary", "--draft", "off", "--max-tokens", "8", "--repeats", "1")
    done = run_here(
        "bench", *options, "--draft-model", str(drafter), "--model", quick, "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    runs = {row["runner"]: row for row in json.loads(done.stdout)["runs"]}
    assert list(runs) == ["mlx-lm", "draft model", "auto + draft model", "off"]
    assert len(followed) > 2 * 7  # two runners, seven tokens each, besides the warm-up
    assert all(row["identical"] for name, row in runs.items() if name != "mlx-lm")
    reason = "mlx-lm + draft model is not measured: "
    assert len([line for line in done.stderr.splitlines() if line.startswith(reason)]) == 1


def test_sampled_answers_are_equal_for_the_same_seed(quick: str) -> None:
    result = bench(
        "--workload", "summary", "--temperature", "0.7", "--max-tokens", "8", "--repeats", "2",
        "--draft", "off", "--draft", "auto", "--model", quick,
    )  # fmt: skip
    plain, off, auto = result["runs"]
    assert (plain["identical"], off["identical"], auto["identical"]) == (None, None, True)
    assert auto["reference"] == "off"


def test_speed_rejects_impossible_measurements(quick: str) -> None:
    for args, word in (
        (("--workload", "wibble"), "multi-turn"),
        (("--workload", "none"), "nothing to measure"),
        (("-p", "many"), "512"),
        (("-n", "8000", "-d", "8000"), "context"),
        (("--temperature", "-1"), "temperature"),
    ):
        assert_one_line_error(run_here("bench", *args, "--model", quick), 2, word)


def test_curve_measures_every_row_count(quick: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("curve", "--repeats", "1", "--context", "32", "--model", quick)
    assert list(result["curve_s"]) == [str(rows) for rows in range(1, 33)]
    chosen = list(result["draft_tokens_at_acceptance"].values())
    assert len(chosen) == 8
    assert all(0 <= length <= 31 for length in chosen)
    print_curve({int(rows): seconds for rows, seconds in result["curve_s"].items()}, result)
    assert "%" in capsys.readouterr().out
