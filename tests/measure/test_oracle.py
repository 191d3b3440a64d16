"""The rules of completion, scored on real text without a model."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.measure.oracle.__main__ import main
from tests.measure.oracle.places import choose_places
from tests.measure.oracle.score import (
    COMPLETE,
    SAFE_PLACES,
    _cases,
    as_dict,
    judge,
    score_directory,
)
from tests.measure.oracle.source import Source, read_source
from tests.support.paths import golden_sources

_DIRECTORY = TemporaryDirectory()
SOURCES = Path(_DIRECTORY.name)
for _name, _text in golden_sources().items():
    (SOURCES / _name).write_text(_text, "utf-8")
OURS = Path(__file__).parents[2] / "akunu_py" / "completion"


@pytest.mark.long
def test_rules_reach_their_goals() -> None:
    """At least 99.5 % of all places are safe and 95 % of all blocks whole, in 20 languages."""
    found = as_dict(score_directory(SOURCES, 6))
    assert len(found["languages"]) == 20
    assert found["all"]["places"] > 270
    assert found["all"]["safe"] >= SAFE_PLACES
    assert found["reached"], {
        name: score for name, score in found["languages"].items() if score["complete"] < COMPLETE
    }


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_our_own_sources(tmp_path: Path, step: int) -> None:
    for path in sorted(OURS.glob("*.py"))[::step]:
        (tmp_path / path.name).write_text(path.read_text())
    assert as_dict(score_directory(tmp_path, 2))["reached"]


def source(tmp_path: Path, name: str, text: str) -> Source:
    path = tmp_path / name
    path.write_text(text)
    found = read_source(path)
    assert found is not None
    return found


def test_removed_text_ends_where_the_language_says(tmp_path: Path) -> None:
    """The ends of all kinds of places are correct in the language."""
    kinds = set()
    for path in sorted(SOURCES.iterdir()):
        found = read_source(path)
        assert found is not None, path
        for place in choose_places(found, 40):
            kinds.add(place.kind)
            text = found.text
            assert text[: place.start] + place.removed + text[place.end :] == text
            if place.kind in ("body", "lines"):
                ends = [found.partner.get(at, at) for at in range(place.start, place.end)]
                assert all(place.start <= at < place.end for at in ends)
    assert len(kinds) == 9


def test_faults_are_reported(tmp_path: Path) -> None:
    """The lexer reports a cut string, an open bracket, and a repeated line."""
    found = source(tmp_path, "a.js", "f(a, {\n  b: ')',\n});\ng();\n")
    assert found.partner[1] == found.text.index(");")
    assert found.span(found.text.index("')'") + 1) is not None
    assert not found.balanced(0, 6)
    assert found.balanced(0, found.text.index("\ng"))
    assert found.statement_end(0) == found.text.index("\ng")
    python = source(tmp_path, "a.py", "if a:\n    b()\n\n    c()\nd()\n")
    assert python.block_end(0) == python.text.index("\nd")
    ruby = source(tmp_path, "a.rb", "def f\n  begin\n    a\n  rescue B\n    c\n  end\nend\nx\n")
    assert ruby.block_end(0) == ruby.text.index("\nx")


def test_duplicated_lines_are_skipped(tmp_path: Path) -> None:
    """Such output repeats the suffix; with an empty suffix it is scored."""
    found = source(tmp_path, "a.c", "int x[] = {\n" + "  1, 2, 3,\n" * 9 + "};\n")
    twice = {place.is_duplicated for place in choose_places(found, 9) if place.kind == "line"}
    assert twice == {True}
    assert {mode for place, mode in _cases(found, 9) if place.is_duplicated} == {"goes on"}


def test_places_are_the_same_every_time() -> None:
    found = read_source(SOURCES / "stock.js")
    assert found is not None
    first, again = choose_places(found, 20), choose_places(found, 20)
    assert first == again
    assert [judge(place, "ends") for place in first] == [judge(place, "ends") for place in again]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--places", "9", "--format", "json"]
    assert main([*options, str(tmp_path)]) == 2
    capsys.readouterr()
    (tmp_path / "tree.py").write_text((SOURCES / "tree.py").read_text())
    assert main([*options, str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reached"]
    assert set(found["languages"]) == {"python"}
    assert set(found["all"]) == {"places", "safe", "blocks", "complete", "verdicts"}


@pytest.mark.long
def test_prompts_contain_definitions_of_called_functions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nearly all at 2,048 tokens in our sources; few with the first lines of the nearest files."""
    for path in sorted(OURS.glob("*.py"))[-6:]:
        (tmp_path / path.name).write_text(path.read_text())
    options = ["--definitions", str(tmp_path), "--format", "json"]
    assert main(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budgets"][2] == 2048
    shares = found["languages"]["all"]
    assert shares["calls"][0] >= 5
    assert shares["related"][2] >= 0.9
    assert shares["first lines"][2] <= shares["related"][2] - 0.4


def test_imported_files_have_the_names_of_the_next_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tax.py").write_text("def value_added_tax(price):\n    return price * 1.2\n")
    above = "from tax import *\n" + "x = 1\n" * 12
    (tmp_path / "uses.py").write_text(above + "value_added_tax(7)\n" + "y = 1\n" * 12)
    (tmp_path / "alone.py").write_text("x = 1\n" * 12 + "value_added_tax(7)\n" + "y = 1\n" * 12)
    assert main(["--imports", str(tmp_path), "--places", "99", "--format", "json"]) == 0
    counts = json.loads(capsys.readouterr().out)["all"]
    assert counts == {"places": 15, "imported": 8, "new names": 4}
