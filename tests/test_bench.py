"""`akunu bench` as a person runs it. Counts and shapes are checked, never times."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from akunu_py.models.store import StoredModel
from tests.test_cli import akunu, assert_one_line_error

WORKLOADS = ("chat", "rewrite", "json", "summary", "story")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that repeats itself, and one that does not."""
    loop = {"prompt": list(range(50)) * 2, "output": list(range(50)) * 2}
    fresh = {"prompt": list(range(100, 150)), "output": list(range(200, 290))}
    content = {"tokenizer": "none", "workloads": {"loop": [loop, loop], "fresh": [fresh]}}
    path = tmp_path_factory.mktemp("traces") / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def bench(*args: str) -> Any:
    done = akunu("bench", *args, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_replay_prints_what_it_promises(trace: Path) -> None:
    result = bench("replay", str(trace), "--curve", "m5max")
    assert (result["curve"], result["draft"]) == ("m5max", "auto")
    loop, fresh = result["workloads"]["loop"], result["workloads"]["fresh"]
    assert set(loop) == {
        "items", "tokens", "passes", "drafted", "accepted", "tokens_per_pass", "score",
        "draft_us_per_token",
    }  # fmt: skip
    assert (loop["items"], loop["tokens"]) == (2, 198)
    assert loop["passes"] + loop["accepted"] == loop["tokens"]
    assert loop["score"] > 3
    assert fresh["score"] == pytest.approx(1.0, abs=0.02)


def test_replay_modes_and_given_curves(trace: Path) -> None:
    off = bench("replay", str(trace), "--draft", "off")["workloads"]["loop"]
    assert (off["score"], off["passes"], off["drafted"]) == (1.0, 198, 0)
    fixed = bench("replay", str(trace), "--draft", "fixed", "--curve", "1:1,5:2,9:4")
    assert fixed["workloads"]["loop"]["tokens_per_pass"] > 4
    short = bench("replay", str(trace), "--draft", "fixed", "--draft-tokens", "2")
    assert short["workloads"]["loop"]["tokens_per_pass"] <= 3
    dear = bench("replay", str(trace), "--curve", "1:1,2:40")
    assert dear["workloads"]["loop"]["score"] == 1.0


def test_memory_learns_from_item_to_item(tmp_path: Path) -> None:
    item = {"prompt": [1, 2, 3], "output": list(range(500, 600))}
    path = tmp_path / "cold.json"
    path.write_text(json.dumps({"tokenizer": "none", "workloads": {"cold": [item] * 4}}))
    without = bench("replay", str(path))["workloads"]["cold"]
    learned = bench("replay", str(path), "--memory")["workloads"]["cold"]
    assert learned["passes"] < 0.7 * without["passes"]


def test_compare_puts_them_side_by_side(trace: Path) -> None:
    table = akunu("bench", "replay", str(trace), "--compare").stdout
    for word in ("fixed 4", "prompt lookup", "auto", "loop", "fresh"):
        assert word in table
    both = bench("replay", str(trace), "--compare", "--workload", "loop")["drafters"]
    assert set(both["auto"]) == {"loop"}
    assert both["auto"]["loop"]["score"] > both["fixed 4"]["loop"]["score"]


def test_replay_refuses_what_it_cannot_read(trace: Path, tmp_path: Path) -> None:
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
        assert_one_line_error(akunu("bench", "replay", *args), 2, word)


def test_recording_ones_own_prompts(starter: StoredModel, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "own.json.gz"
    prompts.write_text('Name a colour.\n{"workload": "sums", "prompt": "What is 2 + 2?"}\n')
    done = akunu(
        "bench", "replay", "--record", str(out), "--prompts", str(prompts), "--max-tokens", "12"
    )
    assert done.returncode == 0, done.stderr
    result = bench("replay", str(out))["workloads"]
    assert set(result) == {"prompts", "sums"}
    assert all(0 < row["tokens"] < 12 for row in result.values())


def test_speed_compares_with_mlx_lm(starter: StoredModel) -> None:
    result = bench("--workload", "summary", "--max-tokens", "8", "--repeats", "1")
    rows = {row["contestant"]: row for row in result["runs"]}
    assert list(rows) == ["mlx-lm", "off", "fixed", "auto"]
    assert all(row["identical"] for row in rows.values())
    assert all(row["generated_tokens"] == 8 for row in rows.values())
    assert all(len(row["decode_s"]) == 1 for row in rows.values())
    assert rows["off"]["tokens_per_pass"] == 1
    assert "1" in result["curve_s"]


def test_a_run_names_its_machine_and_knows_its_workloads(starter: StoredModel) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "akunu_py.bench", "--max-tokens", "2", "--repeats", "1",
         "--workload", "story", "--draft", "off"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "blas" in done.stdout
    assert "story" in done.stdout
    unknown = akunu("bench", "--workload", "wibble")
    assert_one_line_error(unknown, 2, *WORKLOADS)


def test_curve_measures_every_row_count(starter: StoredModel) -> None:
    result = bench("curve", "--repeats", "1", "--context", "32")
    assert list(result["curve_s"]) == [str(rows) for rows in range(1, 33)]
    chosen = list(result["draft_tokens_at_acceptance"].values())
    assert len(chosen) == 8
    assert all(0 <= length <= 31 for length in chosen)
    assert "%" in akunu("bench", "curve", "--repeats", "1", "--context", "32").stdout
