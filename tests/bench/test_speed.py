"""The speed bench and its tables: order of runners, repetitions, failures, interruptions."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from akunu_py.bench import tables
from akunu_py.bench.result import Throughput, load_merged, load_result, loop_start
from akunu_py.bench.runners import Conditions, RecordingDrafter, Run
from akunu_py.bench.speed import Divergence, first_divergence
from akunu_py.bench.workloads import NAMES, Workload, WorkloadTurn, load_workloads
from akunu_py.engine.engine import Engine
from akunu_py.models.store.model_store import StoredModel
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.fixed import FixedDrafter
from tests.support.bench_fakes import (
    PLAIN,
    Simulated,
    drafted_series,
    fake_result,
    plain_series,
    simulate,
    write_quick_model,
)
from tests.support.command import assert_one_line_error, run_here


def test_runners_alternate_and_every_repetition_is_recorded() -> None:
    order: list[str] = []
    runners = [
        Simulated(name, before=lambda conditions, name=name: order.append(name))  # type: ignore[misc]
        for name in (PLAIN, "b", "c")
    ]
    result = simulate(runners, workloads=("chat",), repeats=3)
    assert order == [PLAIN, "b", "c", PLAIN, "b", "c", "b", "c", PLAIN, "c", PLAIN, "b"]
    assert [len(series.repeats) for series in result.runs] == [3, 3, 3]
    assert [c.max_tokens for c in runners[1].conditions] == [16, 64, 64, 64]  # the first warms up
    assert len({c.seed for c in runners[1].conditions[1:]}) == 3
    assert all(series.identical for series in result.runs[1:])
    assert result.runs[0].identical is None


def test_failing_peer_does_not_end_the_run() -> None:
    def fail(conditions: Conditions) -> None:
        if conditions.seed == 2:
            raise RuntimeError("out of memory")

    result = simulate([Simulated(PLAIN), Simulated("peer", before=fail), Simulated("auto")])
    by_name = {(series.workload, series.runner): series for series in result.runs}
    peer = by_name["chat", "peer"]
    assert peer.failed == "RuntimeError: out of memory"
    assert len(peer.repeats) == 1
    assert ("edit", "peer") not in by_name
    assert len(by_name["edit", "auto"].repeats) == 5
    assert any("out of memory" in line for line in tables.notes(result))


def test_own_failure_is_raised() -> None:
    ours = Simulated("auto", before=Mock(side_effect=RuntimeError("a bug of ours")))
    ours.foreign = False
    with pytest.raises(RuntimeError, match="ours"):
        simulate([Simulated(PLAIN), ours])


def test_different_output_is_reported() -> None:
    other = Simulated("auto", tokens=[*range(10), 99, *range(30)])
    result = simulate([Simulated(PLAIN), other], workloads=("chat",))
    auto = result.runs[1]
    assert auto.identical is False
    assert auto.difference == {
        "turn": 0, "position": 10, "expected": 10, "found": 99, "margin": None,
    }  # fmt: skip
    assert any("differs from plain at token 10" in line for line in tables.notes(result))


def test_margin_at_the_first_divergence_comes_from_the_model(starter_engine: Engine) -> None:
    prompt = starter_engine.tokens.encode("The capital of France is")
    output = starter_engine.tokens.encode(" the city")
    found = first_divergence(starter_engine, [(prompt, [*output, 5])], [(prompt, [*output, 7, 8])])
    logits = sorted(starter_engine.model(mx.array([[*prompt, *output]]))[0, -1].tolist())
    assert found is not None
    assert found == Divergence(0, len(output), 5, 7, found.margin)
    assert found.margin == pytest.approx(logits[-1] - logits[-2], abs=1e-3)
    assert first_divergence(None, [(prompt, output)], [([1], output)]) == Divergence(
        0, 0, -1, -1, None
    )
    assert first_divergence(None, [(prompt, output)], [(prompt, output)]) is None
    cut = first_divergence(None, [(prompt, output)], [(prompt, output[:-1])])
    assert cut == Divergence(0, len(output) - 1, output[-1], -1, None)


def test_loops_are_detected() -> None:
    assert loop_start([1, 2, 3, 4, 5, 4, 5, 4, 5]) == 3
    assert loop_start([9, *[1, 2, 3] * 3, 1]) == 1
    assert loop_start([7] * 4) == 0
    assert loop_start([1, 2, 3, 1, 2, 3]) is None
    assert loop_start([]) is None


def test_interrupt_keeps_measurements() -> None:
    # After warm-up and repetitions of a workload, in the middle of the second one.
    stop = Mock(side_effect=[*[None] * 8, KeyboardInterrupt])
    runs: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        simulate([Simulated(PLAIN, before=stop), Simulated("auto")], runs=runs)
    assert [len(series.repeats) for series in runs] == [5, 5, 1, 2]


def test_result_file_contains_all_fields(tmp_path: Path) -> None:
    result = fake_result([plain_series(), drafted_series()])
    result.throughput = [Throughput("pp512", "akunu", [900.0, 1100.0])]
    path = tmp_path / "deep" / "result.json"
    result.save(path)
    assert load_result(path) == result
    text = path.read_text()
    assert '"drafted": [4, 4, 0, 2]' in text  # a list of numbers is one line
    content = json.loads(text)
    auto = content["runs"][1]
    assert auto["tokens_per_pass"] == 2.25
    assert auto["speedup"] == pytest.approx(1.91, abs=0.01)
    # Four passes over 5, 5, 1 and 3 rows cost 2 + 2 + 1 + 1.5.
    assert auto["score"] == pytest.approx(9 / 6.5, abs=1e-4)
    fake_result([plain_series("chat")]).save(tmp_path / "chat.json")
    (both,) = load_merged([path, tmp_path / "chat.json"])
    assert [series.workload for series in both.runs] == ["edit", "edit", "chat"]


def test_tables_have_the_columns_of_llama_bench() -> None:
    result = fake_result([plain_series(), drafted_series(loop=3)])
    result.throughput = [Throughput("pp512 @ d1024", "akunu", [900.0, 1100.0])]
    headings, cells = tables.throughput_table(result)
    assert headings == ["model", "size", "params", "backend", "loop", "test", "t/s"]
    assert cells[0][1:4] == ["514.98 MiB", "135.00 M", "CPU, BLAS"]
    assert cells[0][-2:] == ["pp512 @ d1024", "1000.00 ± 100.00"]
    markdown = tables.to_markdown(tables.speed_table(result)).splitlines()
    assert len({line.count("|") for line in markdown}) == 1
    assert "edit*" in markdown[3]
    assert "yes" in tables.to_text(tables.speed_table(result)).splitlines()[2]


def test_each_workload_has_a_turn_to_answer() -> None:
    workloads = load_workloads()
    assert [workload.name for workload in workloads] == list(NAMES)
    for workload in workloads:
        assert any(turn.assistant is None for turn in workload.turns)


def test_given_answers_are_examples_and_the_rest_is_generated() -> None:
    turns = (WorkloadTurn("a", "given"), WorkloadTurn("b"), WorkloadTurn("c"))
    seen: list[list[str]] = []

    def answer(messages: Any) -> str:
        seen.append([message.content for message in messages])
        return f"answer {len(seen)}"

    assert Workload("talk", turns).run_turns(answer) == ["answer 1", "answer 2"]
    assert seen == [["a", "given", "b"], ["a", "given", "b", "answer 1", "c"]]


@pytest.mark.parametrize("drafter", [AutoDrafter(), FixedDrafter(4)])
def test_recording_drafter_counts_passes_without_changing_drafts(drafter: Any) -> None:
    text = list(range(20)) * 3
    twin = AutoDrafter() if isinstance(drafter, AutoDrafter) else FixedDrafter(4)
    run = Run()
    recorded = RecordingDrafter(drafter, run)
    for one in (recorded, twin):
        one.extend(text[:25])
    done, accepted_in_all = 25, 0
    while done < len(text):
        limit = len(text) - done - 1
        draft = recorded.propose(limit)
        assert draft == twin.propose(limit)
        kept = len(draft) if draft == text[done : done + len(draft)] else 0
        for one in (recorded, twin):
            one.observe(len(draft), kept, 1 + len(draft), 0.01)
            one.extend(text[done : done + kept + 1])
        done += kept + 1
        accepted_in_all += kept
    assert sum(run.accepted) == accepted_in_all > 10


def test_ctrl_c_writes_valid_output(starter: StoredModel, tmp_path: Path) -> None:
    model = write_quick_model(tmp_path / "quick", starter.path)
    out = tmp_path / "partial.json"
    child = subprocess.Popen(
        [sys.executable, "-m", "akunu_py", "bench", "--workload", "story", "--draft", "off",
         "--max-tokens", "8", "--repeats", "5000", "--format", "json", "-o", str(out),
         "--model", model],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr is not None
    for line in child.stderr:
        if "repetition 3 of" in line:
            break
    os.kill(child.pid, signal.SIGINT)
    stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    content = json.loads(stdout)
    assert content["complete"] is False
    assert all(len(series["repeats"]) >= 2 for series in content["runs"])
    assert load_result(out).runs[0].runner == "mlx-lm"
    assert "interrupted" in stderr


def test_report_prints_text_and_writes_markdown(tmp_path: Path) -> None:
    result = fake_result([plain_series(), drafted_series(), plain_series("json")])
    path, table = tmp_path / "result.json", tmp_path / "report.md"
    result.save(path)
    done = run_here("bench", "report", str(path), "-o", str(table))
    assert done.returncode == 0, done.stderr
    assert table.read_text() == tables.result_markdown(result)
    assert "| edit" in table.read_text()
    shown = run_here("bench", "report", str(path))
    assert shown.stdout == tables.result_text(result) + "\n"
    assert "1.91" in shown.stdout
    assert len(run_here("bench", "report", str(path), str(path)).stdout) > len(shown.stdout)
    for args, word in (
        ((), "FILE"),
        ((str(path), "-o", "report.html"), ".md"),
        ((str(tmp_path / "none.json"),), "none.json"),
    ):
        assert_one_line_error(run_here("bench", "report", *args), 2, word)
