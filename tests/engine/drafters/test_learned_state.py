"""Learned state on disk: costs, weights and answers; private, bounded, robust against damage."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.replay import TraceItem
from akunu_py.engine.drafters import learned_state
from akunu_py.engine.drafters.learned_state import (
    LearnedState,
    answer_cache_bytes,
    delete_answer_cache,
)
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.ngram.acceptance_model import AcceptanceModel
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.settings import Settings, load_settings, settings_file
from akunu_py.types import GenerateOptions
from tests.support.command import run_here
from tests.support.full_disk import full_disk
from tests.support.simulated_drafters import DrafterFigures, SimulatedDrafters, replay_simulated
from tests.support.tiny_fim import write_chat_model

pytestmark = pytest.mark.usefixtures("own_directories")

MODEL = Path("/models/tiny")
ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]


def opened(*, answers: bool = True, tokenizer: str = "t", layout: str = "float32") -> LearnedState:
    return LearnedState(MODEL, tokenizer, layout, answer_cache=answers)


def add(learned: LearnedState, tokens: list[int] = ANSWER) -> None:
    learned.add_answer(tokens)
    learned.flush()


def recalled(learned: LearnedState) -> int | None:
    assert learned.answer_cache is not None
    found = learned.answer_cache.lookup([11, 12, 13])
    return found.token if found else None


def files(kind: str = "memory-*") -> list[Path]:
    return sorted(opened(answers=False).directory.glob(kind))


def costs_file() -> Path:
    learned = opened(answers=False)
    learned.save_costs()
    learned.flush()
    (path,) = files("curve-*")
    return path


def test_answers_are_private_to_the_user_and_found_by_the_next_run() -> None:
    first = opened()
    assert recalled(first) is None
    add(first)
    assert recalled(first) == 14
    assert recalled(opened()) == 14
    assert recalled(opened(tokenizer="another")) is None
    costs_file()
    kept = [path for path in first.directory.iterdir() if path.name != "lock"]
    assert len(kept) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    assert stat.S_IMODE(first.directory.stat().st_mode) == 0o700


def test_deleting_the_answer_cache_deletes_unfinished_files_too() -> None:
    learned = opened()
    add(learned)
    (journal,) = files()
    left = journal.with_name(f".{journal.stem}-k1lled")  # of a killed process
    left.write_bytes(b"x" * 1000)
    assert answer_cache_bytes(MODEL) == journal.stat().st_size + 1000
    assert delete_answer_cache(MODEL) > 1000
    assert answer_cache_bytes(MODEL) == 0
    assert not left.exists()
    assert recalled(opened()) is None
    assert delete_answer_cache(MODEL) == 0
    path = costs_file()
    left = path.with_name(f".{path.name}-k1lled")
    left.touch()
    costs_file()
    assert not left.exists()


def test_the_journal_moves_to_a_bounded_file_with_the_answers_of_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learned_state, "JOURNAL_BYTES", 200)
    one, other = opened(), opened()
    add(one)
    for _ in range(12):
        add(other, [1, 2, 3, 4, 5])
    assert [path.suffix for path in files()] in ([""], ["", ".journal"])
    assert recalled(opened()) == 14
    assert answer_cache_bytes(MODEL) < 64e6


def test_damaged_and_foreign_files_are_set_aside_with_one_warning() -> None:
    learned = opened()
    add(learned)
    (journal,) = files()
    journal.with_suffix("").write_bytes(b"PNG what is this doing here" * 100)
    costs_file().write_text('{"surprise": []}')
    assert len(opened().warnings) == 2
    assert opened().warnings == []


def test_a_record_that_was_cut_off_is_dropped_and_later_ones_are_kept() -> None:
    """A writer was killed in the middle of a record, or the disk was full."""
    add(opened())
    (journal,) = files()
    whole = journal.read_bytes()
    for cut in (whole[:1], whole[:2], whole[:-1], b'\n{"a": 1}', b"\n[-1]", b"\n\xff\0[[["):
        journal.write_bytes(whole + cut)
        learned = opened()
        assert recalled(learned) == 14
        add(learned, [21, 22, 23, 24])
        again = opened()
        assert (learned.warnings, again.warnings) == ([], [])
        assert again.answer_cache is not None
        assert again.answer_cache.total == len(ANSWER) + 1 + 5


def test_a_full_disk_is_one_warning_and_leaves_the_older_answers() -> None:
    learned = opened()
    add(learned)
    (journal,) = files()
    size = journal.stat().st_size
    with full_disk(size + 10):  # half a record fits
        add(learned)
    assert learned.warnings == ["cannot store the answer: File too large"]
    assert recalled(opened()) == 14


def test_costs_are_saved_by_layout() -> None:
    learned = opened()
    for _ in range(3):
        learned.curve.observe(1, 0.030, 100)
        learned.curve.observe(5, 0.045, 100)
    learned.save_costs()
    learned.flush()
    table = opened().curve.table(100)
    assert table[4] / table[0] == pytest.approx(1.5, rel=0.03)
    other = opened(layout="4-bit").curve.table(100)
    assert other[4] / other[0] > 1.6


def test_neural_drafters_are_saved_with_the_costs() -> None:
    simulated = SimulatedDrafters([DrafterFigures("model", 0.2, (0.9, 0.1))])
    learned = opened()

    def drafter() -> AutoDrafter:
        curve, learning = CostCurve({1: 1.0, 33: 1.5}), learned.neural_drafters
        return AutoDrafter(curve, neural_drafters=simulated.make("model"), learned=learning)

    item = TraceItem((1,) * 9, tuple(range(200)))
    replay_simulated([item], drafter, lambda rows: 1.0, simulated)
    learned.save_costs()
    learned.flush()
    saved = opened().neural_drafters["model"]
    found = saved.to_dict(), learned.neural_drafters["model"].to_dict()
    assert all(each.pop("curve") for each in found)  # of which a few times are kept
    assert found[0] == found[1]
    assert saved.timed
    assert saved.expected[0] > 0.8
    assert saved.expected[1] < 0.4
    (path,) = files("curve-*")
    whole = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [{"expected": [2.0] * 8}, {"tests": [-1.0] * 8}]
    for wrong in [*changes, {"attempts": 9}, {"saved": -1}, {"curve": {}}]:
        content = whole | {"networks": {"model": whole["networks"]["model"] | wrong}}
        path.write_text(json.dumps(content))
        damaged = opened()
        assert damaged.warnings
        assert not damaged.neural_drafters


def test_acceptance_weights_are_shared_by_sessions_and_saved(tiny: Engine) -> None:
    prior, prompt = AcceptanceModel().weights, list(b"one two three, one two three")
    learned = LearnedState(tiny.path, "t", "test", answer_cache=False)
    first = StepLoop(tiny, learned)
    for options in (GenerateOptions(24, may_store=False), GenerateOptions(24, side_request=True)):
        first.answer(prompt, options)
    assert learned.weights.to_list() == prior
    first.answer(prompt, GenerateOptions(24))
    assert learned.weights.to_list() != prior
    learned.flush()
    reopened = LearnedState(tiny.path, "t", "test", answer_cache=False)
    assert reopened.weights.to_list() == learned.weights.to_list()


@pytest.mark.parametrize(("weights", "is_damaged"), [
    ([[0.5]], False),  # another version's
    ([[1e9] * len(each) for each in AcceptanceModel().weights], True),
    ([["0"] * len(each) for each in AcceptanceModel().weights], True),
    (None, True),
])  # fmt: skip
def test_invalid_weights_are_not_used(weights: object, is_damaged: bool) -> None:
    file = costs_file()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"acceptance": weights}))
    found = opened()
    assert bool(found.warnings) == is_damaged
    assert found.weights.to_list() == AcceptanceModel().weights


def test_a_setting_turns_the_answer_cache_off(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    assert load_settings() == Settings()
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("answer_cache = false\n")
    assert load_settings() == Settings(answer_cache=False)
    command = ("run", "--quiet", "--model", str(model), "--max-tokens", "3", "hi")
    assert run_here(*command).returncode == 0
    assert answer_cache_bytes(model) == 0
