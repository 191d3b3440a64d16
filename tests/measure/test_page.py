"""`python -m tests.measure.page`: charts, and a page that needs no other files."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from akunu_py.bench.result import Result
from tests.measure import charts
from tests.measure.page import main, to_html, to_text
from tests.support.bench_fakes import drafted_series, fake_result, plain_series

pytestmark = pytest.mark.rotating


@pytest.fixture
def result() -> Result:
    fixed = drafted_series("fixed 4", drafted=[4, 4, 4, 4], accepted=[4, 0, 2, 0])
    return fake_result(
        [
            plain_series(),
            drafted_series(),
            fixed,
            plain_series("json"),
            *(drafted_series(workload="json") for _ in range(2)),
        ]
    )


def test_acceptance_counts_tested_tokens() -> None:
    many = [drafted_series() for _ in range(5)]
    # Of 3 drafts the first token was tested, and accepted in 2; the second in 2, accepted in 1.
    assert charts.acceptance_by_position(many)[:2] == [(1, 2 / 3), (2, 1 / 2)]
    assert charts.acceptance_by_position(many[:1]) == []  # too few
    assert charts.passes_by_length(many) == [(1, 0.5), (2, 0.25), (3, 0), (4, 0), (5, 0.25)]
    assert charts.chosen_lengths(many) == [(0, 0.25), (1, 0), (2, 0.25), (3, 0), (4, 0.5)]
    along = charts.yields_along_answer(many[0])
    assert [x for x, _ in along] == [2.5, 6, 7.5, 8.5]  # the middle of each pass's tokens
    assert along[0][1] == 9 / 4


class Page(HTMLParser):
    """Checks that tags are closed, and collects the names in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_complete_and_self_contained(result: Result) -> None:
    html = to_html([result])
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert page.links == []
    assert "script" not in page.tags
    assert not re.search(r"https?:|@import|url\(", html)
    assert page.tags.count("svg") >= 6
    assert "a &lt;machine&gt;" in html
    assert "said &amp; &lt;done&gt;" in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)  # well-formed
    for title in ("Tokens per second", "by position", "planner chose", "Theory"):
        assert title in html


def test_charts_stay_within_their_frame(result: Result) -> None:
    svg = charts.svg_bars(charts.speed_bars(result), " t/s")
    root = ElementTree.fromstring(svg)
    width = float(root.attrib["viewBox"].split()[2])
    ends = [float(r.attrib["x"]) + float(r.attrib["width"]) for r in root.iter("rect")]
    assert max(ends) < width
    assert min(ends) > 0
    points = {"one": [(1.0, 1.0), (32.0, 3.2)], "two": [(1.0, 1.0), (8.0, 2.0)]}
    curves = ElementTree.fromstring(charts.svg_lines(points, "positions"))
    for line in curves.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= 260
    assert charts.svg_lines({}, "") == charts.svg_columns([], "") == charts.svg_bars([], "") == ""


def test_plots_for_a_terminal(result: Result) -> None:
    text = to_text([result])
    assert "█" in text
    assert "1.91x" in text
    assert max(map(len, charts.text_columns([(0, 0.25), (4, 0.75)]).splitlines())) < 80
    assert charts.text_bar(0.5, 4) == "██"
    assert charts.text_bar(1 / 32, 4) == "▏"
    assert charts.text_bar(2.0, 4) == "████"


def test_the_command_writes_a_page_or_prints_plots(
    result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "result.json", tmp_path / "report.html"
    result.save(path)
    assert main([str(path), "-o", str(out)]) == 0
    assert out.read_text() == to_html([result])
    assert main([str(path), str(path)]) == 0
    assert "Tokens per second" in capsys.readouterr().out
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
