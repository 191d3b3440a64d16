"""`akunu bench report`: tables as text and as Markdown."""

from __future__ import annotations

from pathlib import Path

from akunu_py.bench.tables import result_markdown, result_text
from tests.support.bench_fakes import drafted_series, fake_result, plain_series
from tests.support.command import assert_one_line_error, run_here


def test_report_prints_text_and_writes_markdown(tmp_path: Path) -> None:
    result = fake_result([plain_series(), drafted_series(), plain_series("json")])
    path, table = tmp_path / "result.json", tmp_path / "report.md"
    result.save(path)
    done = run_here("bench", "report", str(path), "-o", str(table))
    assert done.returncode == 0, done.stderr
    assert table.read_text() == result_markdown(result)
    assert "| edit" in table.read_text()
    shown = run_here("bench", "report", str(path))
    assert shown.stdout == result_text(result) + "\n"
    assert "1.91" in shown.stdout
    assert len(run_here("bench", "report", str(path), str(path)).stdout) > len(shown.stdout)
    for args, word in (
        ((), "FILE"),
        ((str(path), "-o", "report.html"), ".md"),
        ((str(tmp_path / "none.json"),), "none.json"),
    ):
        assert_one_line_error(run_here("bench", "report", *args), 2, word)
