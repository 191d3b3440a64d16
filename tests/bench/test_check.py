"""`akunu bench check`: verdicts on given figures, and every line on a tiny model.

No timing is asserted. On a CPU, promises about Metal have the verdict "not on this machine".
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from akunu_py.bench import check, mac_checks
from akunu_py.bench.check import Check, CheckPlan, Promise
from akunu_py.bench.result import Repeat, Throughput
from akunu_py.cli import main
from akunu_py.decoding import device, output_rows
from akunu_py.decoding.chips import ChipBandwidth
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from tests.support.bench_fakes import drafted_series, fake_result
from tests.support.command import assert_one_line_error, run_here
from tests.support.tiny_fim import write_chat_model

QUICK = CheckPlan(
    workloads=["chat"],
    repeats=1,
    max_tokens=8,
    prompts=(16, 100_000),
    contexts=(0, 64, 100_000),
    rows=(1, 2, 32, 33),
    curve_repeats=1,
    kernels=((64, 64),),
    depths=(16,),
    idle_s=0.0,
    bandwidth_bytes=1 << 16,
    tie_positions=10,
)


# What only a Mac can show of memory, chips, prompt caches, buffers, sampling, ties and waits.
EVERY_ITEM = (
    "wired memory",
    "assumed memory bandwidth",
    "identify the model for its prompt caches",
    "of the bytes that akunu counts",
    "Metal buffers",
    "freed buffers that MLX keeps",
    "logit rows computed",
    "with top-p",
    "rows change, bfloat16",
    "rows change, float16",
    "compiling a schema",
    "with logprobs",
)


@pytest.mark.parametrize(
    ("value", "limit", "least", "verdict"),
    [
        (0.99, 1.0, False, "pass"),
        (1.0, 1.0, False, "pass"),
        (1.0049, 1.0, False, "pass"),  # shown as 1
        (1.01, 1.0, False, "FAIL"),
        (1.01, 1.0, True, "pass"),
        (0.9951, 1.0, True, "FAIL"),
        (0.99951, 1.0, True, "pass"),
        (math.nan, 1.0, False, "FAIL"),
        (math.nan, 1.0, True, "FAIL"),
        (math.inf, 1.0, False, "FAIL"),
        (None, 1.0, False, "not measured"),
    ],
)
def test_verdict_uses_the_rounded_figure(
    value: float | None, limit: float, least: bool, verdict: str
) -> None:
    assert Promise("model", "promise", value, limit, least=least).verdict == verdict
    there = Promise("model", "promise", value, limit, least=least, here=False)
    assert there.verdict == "not on this machine"
    assert not Check(QUICK, lines=[there]).failed
    assert Check(QUICK, lines=[there, Promise("m", "p", value, limit, least=least)]).failed == (
        verdict == "FAIL"
    )


def _speed_result(off: float, auto: float, **more: Any) -> list[Promise]:
    """Return the lines of three runners at these speeds; mlx-lm has 100 tokens per second."""
    rates = {"mlx-lm": 100.0, "off": off, "auto": auto}
    result = fake_result(
        [
            drafted_series(name, repeats=[Repeat(100, 100 / rate, 0.1)], **more)
            for name, rate in rates.items()
        ]
    )
    result.throughput = [
        Throughput("pp512", "mlx-lm", [1000.0]),
        Throughput("pp512", "akunu", [off * 10]),
    ]
    found = Check(QUICK)
    check.check_speed("tiny", result, found)
    return found.lines


def test_speed_is_compared_with_mlx_lm_and_with_off() -> None:
    lines = {line.name: line for line in _speed_result(97.0, 98.0)}
    verdicts = {name: line.verdict for name, line in lines.items()}
    assert verdicts["edit: off compared with mlx-lm"] == "FAIL"
    assert verdicts["edit: auto compared with mlx-lm"] == "FAIL"
    assert verdicts["edit: auto compared with off"] == "pass"
    assert verdicts["prefill, pp512, compared with mlx-lm"] == "pass"
    assert lines["edit: auto compared with off"].value == pytest.approx(98 / 97)
    assert {line.verdict for line in _speed_result(98.0, 99.0)} == {"pass"}
    assert any(
        "pp512" in line.name and line.verdict == "FAIL" for line in _speed_result(90.0, 90.0)
    )


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (None, "pass"),
        ({"margin": 0.25}, "pass"),
        ({"margin": 1.5}, "FAIL"),
        ({"margin": None}, "FAIL"),  # other prompts
    ],
)
def test_answers_may_differ_at_near_ties(difference: dict[str, Any] | None, verdict: str) -> None:
    lines = _speed_result(100, 100, identical=difference is None, difference=difference)
    (line,) = [line for line in lines if line.unit == "logits"]
    assert line.verdict == verdict
    assert line.note.startswith("0 of" if difference else "3 of 3")


def test_kernel_that_is_wrong_from_some_row_count_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "on_metal", lambda: True)

    def kernel(start: int, stop: int) -> mx.array:
        rows = mx.ones((stop - start, 64))
        return rows if stop - start < 13 else rows * mx.where(mx.arange(64) == 5, wrong, 1.0)

    for wrong, verdict in ((1.0, "pass"), (1 + 2**-7, "pass"), (1.5, "FAIL"), (math.nan, "FAIL")):
        found, checked = check.compare_rows(kernel), Check(QUICK)
        check._add_rows(checked, "a kernel", mx.bfloat16, [found])
        (line,) = checked.lines
        assert line.verdict == verdict
        assert line.value == (math.inf if math.isnan(wrong) else pytest.approx(wrong - 1))
        same = [1.0] * check.MOST_ROWS if wrong == 1 else [1.0] * 12 + [63 / 64] * 21
        assert found["identical"] == pytest.approx(same)
        assert f"up to {33 if wrong == 1 else 12} rows" in line.note


def test_causal_pass_over_rows_equals_one_row_at_a_time() -> None:
    """Use float32, where only a wrong comparison could give a difference."""
    for found in (
        check.attention_rows(mx.float32, 16, 4),
        check.quantized_rows(4, mx.float32, 64, 64),
    ):
        assert max(found["difference"]) < 1e-5
        assert len(found["identical"]) == check.MOST_ROWS


def test_a_wrong_bandwidth_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An "Apple M5 Ultra" taken for an M5 differs by a factor of eight."""
    monkeypatch.setattr(device, "on_metal", lambda: True)
    monkeypatch.setattr(device, "chip", lambda: ChipBandwidth(153.0, estimated=False))
    for measured, verdict in ((120e9, "pass"), (1000e9, "FAIL"), (50e9, "FAIL")):
        monkeypatch.setattr(mac_checks, "measured_bandwidth", lambda _, found=measured: found)
        found = Check(QUICK)
        check.check_device(found)
        assert found.lines[0].verdict == verdict
        assert "153 GB/s known" in found.lines[0].note
    monkeypatch.undo()
    assert mac_checks.measured_bandwidth(1 << 16) > 0


def test_near_ties_are_counted_and_the_weights_stay(tmp_path: Path) -> None:
    engine = Engine.load(write_chat_model(tmp_path / "model"))
    before = dict(tree_flatten(engine.model.parameters()))
    exact = mac_checks.near_ties(engine, mx.float32, 12)
    assert (exact.flipped, exact.rate) == (0, 0.0)
    assert 0 < exact.positions <= 12
    rounded = mac_checks.near_ties(engine, mx.bfloat16, 12)
    assert rounded.positions == exact.positions
    assert rounded.close >= exact.close
    after = dict(tree_flatten(engine.model.parameters()))
    assert all(mx.array_equal(after[name], value) for name, value in before.items())
    assert {value.dtype for value in after.values()} == {mx.float32}


def test_rows_of_the_output_head_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(write_chat_model(tmp_path / "model"))
    assert mac_checks.head_rows(engine) == 1
    monkeypatch.setattr(output_rows, "_narrow_model", lambda _: None)
    assert mac_checks.head_rows(engine) == mac_checks.HEAD_ROWS


def test_buffers_of_weights_and_prompt_caches_are_counted(tmp_path: Path) -> None:
    """Keys and values of each layer, in 16 prompt caches; checkpoints hold as many each."""
    engine = Engine.load(write_chat_model(tmp_path / "model"))
    weights = len(tree_flatten(engine.model.parameters()))
    layers = len(engine.model.layers)
    assert mac_checks.metal_buffers(engine) == weights + 16 * 2 * layers
    engine = replace(engine, needs_checkpoints=True)
    assert mac_checks.metal_buffers(engine) == weights + 16 * 9 * 2 * layers


@pytest.mark.long
@pytest.mark.parametrize("programs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command(
    programs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not programs:
        monkeypatch.setattr(check, "run_process", lambda *_: None)
    _run_command(tmp_path, monkeypatch, capsys)


def test_a_process_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AkunuError, match="akunu run ended with"):
        check.run_process(tmp_path / "none", str(tmp_path))


def _run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the whole check on a tiny model."""
    directory = write_chat_model(tmp_path / "model")
    monkeypatch.setattr(check, "DEFAULT_MODEL", str(directory))
    monkeypatch.setattr(check, "default_plan", lambda: QUICK)
    out = tmp_path / "there" / "mac.json"
    code = main(["bench", "check", "--model", str(directory), "-o", str(out), "--format", "json"])
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)
    assert json.loads(out.read_text()) == found
    assert found["complete"], captured.err
    lines = found["lines"]
    names = {line["name"] for line in lines}
    assert "checked completely" not in names
    for words in EVERY_ITEM:
        assert any(words in name for name in names), words
    assert code == any(line["verdict"] == "FAIL" for line in lines)
    of_metal = [
        line
        for line in lines
        if line["about"] in ("kernels", "device")
        or re.search("32 rows|idling|wired|rows change|Metal buffers", line["name"])
    ]
    assert len(of_metal) == 6 + 1 + 3 + 2 + 2 + 1
    if not device.on_metal():
        assert {line["verdict"] for line in of_metal} == {"not on this machine"}
        rest = [line for line in lines if line not in of_metal]
        assert "not on this machine" not in {line["verdict"] for line in rest}
    (beyond,) = [line for line in lines if "100,000" in line["name"]]
    assert beyond["note"] == "the context ends at 16,384 tokens"
    assert {line["name"] for line in lines if line["value"] is None} == {
        beyond["name"],
        "assumed memory bandwidth compared with the measured one",
        "compiling a schema of 300 properties again",  # its tokenizer has no grammars
    }
    (curves,) = [each["curves_s"] for each in found["figures"].values() if "curves_s" in each]
    assert {name: list(costs) for name, costs in curves.items()} == {
        "0": ["1", "2", "32", "33"],
        "64": ["1", "2", "32", "33"],
    }
    (result,) = found["results"]
    assert {run["runner"] for run in result["runs"]} == {"mlx-lm", "off", "auto"}
    assert {test["test"] for test in result["throughput"]} == {"pp16"}
    report = run_here("bench", "report", str(out))
    assert report.returncode == 0, report.stderr
    assert "tokens/pass" in report.stdout


def test_two_streams_run_and_their_error_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = write_chat_model(tmp_path / "model"), tmp_path / "mac.json"
    monkeypatch.setattr(check, "DEFAULT_MODEL", str(directory))
    monkeypatch.setattr(check, "default_plan", lambda: replace(QUICK, soak_tokens=80))
    monkeypatch.setattr(check, "run_check", lambda *_: None)
    assert main(["bench", "check", "-o", str(out), "--soak", "0.001"]) == 0
    (line,) = json.loads(out.read_text())["lines"]
    assert (line["name"], line["verdict"]) == ("two streams with evictions", "pass")
    requests = int(line["note"].split()[0])
    assert requests >= 2

    def fail(*_: object) -> None:
        raise AkunuError("no memory")

    monkeypatch.setattr(mac_checks, "text_job", lambda *_: fail)
    assert main(["bench", "check", "-o", str(out), "--soak", "5"]) == 1
    (line,) = json.loads(out.read_text())["lines"]
    assert line["verdict"] == "FAIL"
    assert "no memory" in line["note"]
    assert_one_line_error(run_here("bench", "check", "--soak", "-1"), 2, "minutes", "-1")
    assert_one_line_error(run_here("bench", "check", "--soak", "long"), 2, "long")


def test_error_during_a_model_becomes_a_failing_line(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [StoredModel("first", Path("a")), StoredModel("second", Path("b"))]

    def measure(model: StoredModel, *_: object) -> None:
        if model.name == "first":
            raise AkunuError("the chat ended with 1, expected 0")

    monkeypatch.setattr(check, "check_kernels", lambda *_: None)
    monkeypatch.setattr(check, "check_device", lambda *_: None)
    monkeypatch.setattr(check, "check_model", measure)
    found = Check(QUICK)
    check.run_check(models, found)
    assert found.complete
    (line,) = found.lines
    assert (line.about, line.verdict) == ("first", "FAIL")
    assert "ended with 1" in line.note


@pytest.mark.long
def test_interrupt_keeps_finished_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(model: Path, directory: str) -> None:
        raise KeyboardInterrupt

    directory = write_chat_model(tmp_path / "model")
    monkeypatch.setattr(check, "DEFAULT_MODEL", str(directory))
    monkeypatch.setattr(check, "default_plan", lambda: QUICK)
    monkeypatch.setattr(check, "run_process", interrupted)
    out = tmp_path / "mac.json"
    assert main(["bench", "check", "-o", str(out)]) == INTERRUPTED
    assert "7 " in capsys.readouterr().out  # the kernels and the device
    found = json.loads(out.read_text())
    assert not found["complete"]
    assert len(found["lines"]) == 7


def test_largest_4_bit_model_below_the_size_limit_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model(name: str, size: float, quantization: str, damaged: str = "") -> StoredModel:
        return StoredModel(name, Path(name), int(size), quantization=quantization, damaged=damaged)

    starter = model("starter", 1e8, "4-bit, groups of 32")
    there = [
        starter,
        model("small", 1e9, "4-bit, groups of 64"),
        model("fitting", 3e9, "4-bit, groups of 64"),
        model("damaged", 3.1e9, "4-bit, groups of 64", "no weights"),
        model("wide", 3.2e9, "8-bit, groups of 64"),
        model("large", 9e9, "4-bit, groups of 64"),
    ]
    by_name = {each.name: each for each in there}
    monkeypatch.setattr(model_store, "list_models", lambda: there)
    monkeypatch.setattr(model_store, "resolve", by_name.__getitem__)
    monkeypatch.setattr(model_store, "check", lambda model: None)
    assert [each.name for each in check.choose_models([])] == ["starter", "fitting"]
    assert [each.name for each in check.choose_models(["large", "starter"])] == ["starter", "large"]
    there[1:] = []
    assert [each.name for each in check.choose_models([])] == ["starter"]


def test_the_table_shows_every_line() -> None:
    lines = [
        Promise("kernels", "<rows>", 0.01234567, 0.125, note="identical up to 13 rows"),
        Promise("starter", "speed", 0.9, 0.99, "x", least=True),
        Promise("starter", "wired", None, 10, here=False),
    ]
    _, cells = check.check_table(lines)
    assert cells == [
        ["kernels", "<rows>", "0.0123", "at most 0.125", "pass", "identical up to 13 rows"],
        ["starter", "speed", "0.9 x", "at least 0.99 x", "FAIL", ""],
        ["starter", "wired", "", "at most 10", "not on this machine", ""],
    ]


def test_the_result_file_is_json() -> None:
    assert_one_line_error(run_here("bench", "check", "-o", "mac.html"), 2, ".json", "mac.html")
