"""Memories, journals and cost curves that may have been altered: read, or set aside in one clear
line; whatever is raised fails the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding.learned_state import LearnedState
from akunu_py.ngram.cost import CostCurve
from tests.reliability.fuzz import changed, damaged, explore, lengths
from tests.support.at_once import AtOnce

pytestmark = [pytest.mark.rotating, pytest.mark.usefixtures("own_directories")]


@pytest.fixture(autouse=True)
def writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written before the next line of a test."""
    monkeypatch.setattr("akunu_py.decoding.learned_state.ThreadPoolExecutor", AtOnce)


def learned_state(model: Path) -> LearnedState:
    return LearnedState(model, "tokenizer", "layout", answer_cache=True)


def learned_files(model: Path) -> list[Path]:
    """Of a model that said something: a snapshot, a journal and a curve."""
    learned = learned_state(model)
    for _ in range(3):
        learned.add_answer([1, 2, 3, 4, 5, 1, 2, 3, 6])
    assert learned.answer_cache is not None
    learned.curve.observe(1, 0.01, 10)
    learned.curve.observe(5, 0.02, 10)
    learned.save_costs()
    (learned.directory / "x").write_bytes(b"")
    (learned.directory / "x").unlink()
    snapshot = next(iter(learned.directory.glob("memory-*.journal"))).with_suffix("")
    snapshot.write_bytes(learned.answer_cache.dump())
    return sorted(path for path in learned.directory.iterdir() if path.name != "lock")


def replaced(path: Path, by: str, precious: Path) -> None:
    path.unlink()
    if by == "fifo":
        os.mkfifo(path)
    elif by == "directory":
        path.mkdir()
    elif by == "holes":
        path.touch()
        os.truncate(path, 20 << 30)
    else:
        others = {"zero": Path("/dev/zero"), "nothing": precious / "none"}
        path.symlink_to(others.get(by, precious))


@pytest.mark.parametrize("by", ["link", "nothing", "zero", "fifo", "directory", "holes"])
@pytest.mark.parametrize("kind", ["lock", ".json", ".journal", ""])
def test_what_is_no_file_of_ours_is_never_written_through(
    kind: str, by: str, tmp_path: Path
) -> None:
    files = learned_files(tmp_path / "model")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    by_suffix = {path.suffix: path for path in files}
    path = files[0].parent / "lock" if kind == "lock" else by_suffix[kind]
    replaced(path, by, precious)
    again = learned_state(tmp_path / "model")
    again.add_answer([1, 2, 3])
    again.curve.observe(1, 0.02, 10)
    again.save_costs()
    assert again.answer_cache is not None
    assert again.answer_cache.lookup([1, 2]) is not None, "this answer at least"
    assert precious.read_text() == "mine"
    assert all("\n" not in warning for warning in again.warnings)
    assert again.warnings or kind in ("lock", ".json") or by == "nothing"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "precious"]


@lengths(30)
@pytest.mark.parametrize("kind", ["curve", "snapshot", "journal"])
def test_learned_files_with_bytes_turned_over(kind: str, examples: int, tmp_path: Path) -> None:
    files = learned_files(tmp_path / "model")
    endings = {"curve": ".json", "journal": ".journal", "snapshot": ""}
    path = next(path for path in files if path.suffix == endings[kind])
    # Of a snapshot, 14 MB of mostly nothing, the head is what may be believed by mistake.
    head, rest = path.read_bytes()[:200], path.read_bytes()[200:]

    def check(data: bytes) -> None:
        path.write_bytes(data + rest)
        again = learned_state(tmp_path / "model")
        again.curve.table(100)
        assert again.answer_cache is not None
        again.answer_cache.lookup([1, 2, 3])
        again.add_answer([1, 2])
        assert all("\n" not in warning for warning in again.warnings)
        for aside in again.directory.glob("*.damaged"):
            aside.unlink()

    explore(check, examples, damaged(head))


@pytest.mark.parametrize(
    "wrong",
    [
        {"points": {"1": 10**400}},
        {"points": {"1": 1e-320, "2": 1e308}},
        {"bands": [{"1": [0.1, float("inf")]}, {}, {}, {}]},
        {"bands": [{"1": [10**400, 1]}, {}, {}, {}]},
    ],
)
def test_curves_beyond_all_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CostCurve.from_dict(CostCurve().to_dict() | wrong)


@lengths(100)
def test_curves_of_wrong_values(examples: int, tmp_path: Path) -> None:
    path = next(path for path in learned_files(tmp_path / "model") if path.suffix == ".json")
    whole = json.loads(path.read_bytes())

    def check(value: Any) -> None:
        path.write_text(json.dumps(value))
        again = LearnedState(tmp_path / "model", "tokenizer", "layout", answer_cache=False)
        costs = again.curve.table(100)
        assert all(0 < cost < float("inf") for cost in costs)
        again.save_costs()

    explore(check, examples, changed(whole))
