"""What was learned is kept whole, for its owner alone, bounded; damage never stops an answer."""

from __future__ import annotations

import json
import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.replay import ReplayCounts, replay_item
from akunu_py.bench.trace import TraceItem
from akunu_py.decoding import learned_state as learned_module
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.learned_state import LearnedState, answer_cache_bytes, delete_answer_cache
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.ngram.acceptance_model import AcceptanceModel
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.settings import Settings, load_settings, settings_file
from akunu_py.types import GenerateOptions, Message
from tests.measure.neural_drafters import CostsWithDrafting, DrafterFigures, SimulatedDrafters
from tests.support.at_once import AtOnce
from tests.support.command import run_here
from tests.support.jobs import chat_request

MODEL = Path("/models/tiny")
ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return tmp_path


class SteadyCosts(CostCurve):
    """The same on every machine and every day."""

    def observe(self, rows: int, seconds: float, context: int) -> None:
        """Learns nothing."""


def opened(*, memory: bool = True, tokenizer: str = "t", layout: str = "float32") -> LearnedState:
    return LearnedState(MODEL, tokenizer, layout, answer_cache=memory)


@pytest.fixture(autouse=True)
def writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written before the next line of a test."""
    monkeypatch.setattr(learned_module, "ThreadPoolExecutor", AtOnce)


def recalled(learned: LearnedState) -> int | None:
    assert learned.answer_cache is not None
    found = learned.answer_cache.lookup([11, 12, 13])
    return found.token if found else None


def files() -> list[Path]:
    return sorted(opened(memory=False).directory.glob("memory-*"))


def test_the_next_run_has_the_answers() -> None:
    first = opened()
    assert recalled(first) is None
    first.add_answer(ANSWER)
    assert recalled(first) == 14
    assert recalled(opened()) == 14
    assert recalled(opened(tokenizer="another")) is None


def test_files_are_for_the_owner_alone() -> None:
    learned = opened()
    learned.add_answer(ANSWER)
    learned.curve.observe(1, 0.03, 100)
    learned.save_costs()
    kept = [path for path in learned.directory.iterdir() if path.name != "lock"]
    assert len(kept) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    assert stat.S_IMODE(learned.directory.stat().st_mode) == 0o700


def test_off_means_nothing_is_kept() -> None:
    learned = opened(memory=False)
    learned.add_answer(ANSWER)
    assert learned.answer_cache is None
    assert files() == []


def test_delete_answer_cache_deletes_its_files() -> None:
    opened().add_answer(ANSWER)
    assert answer_cache_bytes(MODEL) > 0
    assert delete_answer_cache(MODEL) > 0
    assert answer_cache_bytes(MODEL) == 0
    assert recalled(opened()) is None
    assert delete_answer_cache(MODEL) == 0


def test_the_journal_is_folded_into_a_bounded_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_module, "_JOURNAL_TOKENS", 50)
    one, other = opened(), opened()  # two processes at once
    one.add_answer(ANSWER)
    for _ in range(12):
        other.add_answer([1, 2, 3, 4, 5])
    assert [path.suffix for path in files()] in ([""], ["", ".journal"])
    assert recalled(opened()) == 14, "the other process's answers were lost"
    assert answer_cache_bytes(MODEL) < 64e6


def test_a_damaged_file_is_set_aside_with_one_warning() -> None:
    opened().add_answer(ANSWER)
    (journal,) = files()
    data = bytearray(journal.read_bytes())
    data[12] ^= 0xFF
    journal.write_bytes(data + b"\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
    learned = opened()
    assert len(learned.warnings) == 1
    assert "set aside" in learned.warnings[0]
    assert recalled(learned) is None
    assert [path.suffix for path in files()] == [".damaged"]
    learned.add_answer(ANSWER)
    again = opened()
    assert again.warnings == []
    assert recalled(again) == 14


def test_foreign_files_are_set_aside() -> None:
    learned = opened()
    learned.directory.mkdir(parents=True)
    learned._answer_file.write_bytes(b"PNG what is this doing here" * 100)
    learned._curve_file.write_text('{"surprise": []}')
    assert len(opened().warnings) == 2
    assert opened().warnings == []


def test_a_record_that_was_cut_off_is_left_out() -> None:
    opened().add_answer(ANSWER)
    opened().add_answer([21, 22, 23, 24])
    (journal,) = files()
    os.truncate(journal, journal.stat().st_size - 5)
    learned = opened()
    assert learned.warnings == []
    assert recalled(learned) == 14


def test_a_disk_that_refuses_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learned_module, "_append", refuse)
    learned = opened()
    learned.add_answer(ANSWER)
    assert "No space left" in learned.warnings[0]
    assert recalled(learned) == 14


def test_costs_are_kept_by_layout() -> None:
    learned = opened()
    for _ in range(3):
        learned.curve.observe(1, 0.030, 100)
        learned.curve.observe(5, 0.045, 100)
    learned.save_costs()
    table = opened().curve.table(100)
    assert table[4] / table[0] == pytest.approx(1.5, rel=0.03)
    other = opened(layout="4-bit").curve.table(100)
    assert other[4] / other[0] > 1.6


def test_neural_drafters_are_saved_with_the_costs() -> None:
    """What one takes, and how often it is right; what nobody learns is set aside."""
    neural_drafter = SimulatedDrafters([DrafterFigures("model", 0.2, (0.9, 0.1))])
    neural_drafter.item = TraceItem((1,) * 9, tuple(range(200)))
    for share in (0.2, 3.0):  # what is learned counts, not what is assumed of it
        learned = opened()
        (made,) = neural_drafter.make("model")
        made.relative_cost = share
        curve = CostCurve({1: 1.0, 33: 1.5})
        drafter = AutoDrafter(curve, neural_drafters=[made], learned=learned.neural_drafters)
        counts = ReplayCounts()
        replay_item(
            neural_drafter.item,
            drafter,
            CostsWithDrafting(lambda rows: 1.0, neural_drafter),
            counts,
        )
        learned.save_costs()
        assert counts.tokens > 1.5 * counts.passes
    saved = opened().neural_drafters["model"]
    found = saved.to_dict(), learned.neural_drafters["model"].to_dict()
    assert all(each.pop("curve") for each in found)  # of which a few times are kept
    assert found[0] == found[1]
    assert saved.timed
    assert saved.expected[0] > 0.8
    assert saved.expected[1] < 0.3
    whole = json.loads(learned._curve_file.read_text())
    changes: list[dict[str, Any]] = [{"expected": [2.0] * 8}, {"tests": [-1.0] * 8}]
    for wrong in [*changes, {"attempts": 9}, {"saved": -1}, {"curve": {}}]:
        content = whole | {"networks": {"model": whole["networks"]["model"] | wrong}}
        learned._curve_file.write_text(json.dumps(content))
        damaged = opened()
        assert damaged.warnings
        assert not damaged.neural_drafters


def test_a_second_run_drafts_from_the_output_of_the_first(starter_engine: Engine) -> None:
    messages = [Message("user", "Name the planets of the solar system.")]
    options = GenerateOptions(max_tokens=24)
    passes = []
    answers = []
    for _ in range(2):
        learned = LearnedState(
            starter_engine.path, starter_engine.tokens.digest, "test", answer_cache=True
        )
        learned.curve = SteadyCosts({1: 1.0, 5: 1.2, 33: 2.0})
        answer = chat_request(Session(starter_engine, learned), messages, options).answer()
        passes.append(answer.stats.target_passes)
        answers.append(answer.tokens)
    assert answers[0] == answers[1]
    assert passes[1] < 0.7 * passes[0]


def test_acceptance_weights_are_shared_by_sessions_and_saved(
    loaded_shallow_starter: Engine,
) -> None:
    engine, prior = loaded_shallow_starter, AcceptanceModel().weights
    messages = [Message("user", "Write one two three four, one two three four.")]

    def reopened() -> LearnedState:
        return LearnedState(engine.path, engine.tokens.digest, "test", answer_cache=False)

    def begun(session: Session) -> list[list[float]]:
        session.drafting.drafter(GenerateOptions(), [1, 2, 3])
        assert isinstance(session.drafting._inner, AutoDrafter)
        return session.drafting._inner.model.weights

    learned = reopened()
    first = Session(engine, learned)
    for options in (GenerateOptions(24, may_store=False), GenerateOptions(24, side_request=True)):
        chat_request(first, messages, options).answer()
    assert learned.weights.to_list() == prior
    chat_request(first, messages, GenerateOptions(24)).answer()
    assert begun(Session(engine, learned, first)) == learned.weights.to_list() != prior
    assert begun(Session(engine, reopened())) == learned.weights.to_list()


@pytest.mark.parametrize(
    ("weights", "is_damaged"),
    [
        ([[0.5]], False),  # another version's
        ([[1e9] * len(each) for each in AcceptanceModel().weights], True),
        ([["0"] * len(each) for each in AcceptanceModel().weights], True),
        (None, True),
    ],
)
def test_invalid_weights_are_not_used(weights: object, is_damaged: bool) -> None:
    opened().save_costs()
    file = opened()._curve_file
    file.write_text(json.dumps(json.loads(file.read_text()) | {"acceptance": weights}))
    found = opened()
    assert bool(found.warnings) == is_damaged
    assert found.weights.to_list() == AcceptanceModel().weights


def test_settings_turn_it_off(loaded_shallow_starter: Engine) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("answer_cache = false\n")
    assert load_settings() == Settings(answer_cache=False)
    assert run_here("run", "--quiet", "--max-tokens", "3", "hi").returncode == 0
    assert answer_cache_bytes(loaded_shallow_starter.path) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("answer_cache = 1", "true or false"),
        ("model = false", "a text"),
        ("memmory = true", "did you mean memory_limit"),
        ("answer_cache = ", "settings.toml"),
    ],
)
def test_wrong_settings_are_named(text: str, expected: str) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text(text)
    with pytest.raises(UsageError, match=expected):
        load_settings()


def test_no_settings_are_the_built_in_ones() -> None:
    assert load_settings() == Settings()


def test_what_follows_a_record_that_was_cut_off_is_kept() -> None:
    """A writer is killed in the middle of a record, or the disk is full there."""
    opened().add_answer(ANSWER)
    (journal,) = files()
    whole = journal.read_bytes()
    for cut in (1, 7, 9, len(whole) - 1):
        journal.write_bytes(whole + whole[:cut])
        learned = opened()
        learned.add_answer([21, 22, 23, 24])
        again = opened()
        assert (learned.warnings, again.warnings) == ([], [])
        assert again.answer_cache is not None
        assert again.answer_cache.total == len(ANSWER) + 1 + 5


def test_a_full_disk_leaves_the_journal_whole() -> None:
    learned = opened()
    learned.add_answer(ANSWER)
    (journal,) = files()
    size = journal.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))  # half a record fits
    try:
        learned.add_answer(ANSWER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert learned.warnings == ["cannot store the answer: No space left on device"]
    assert journal.stat().st_size == size


def test_unfinished_files_of_killed_writers_go() -> None:
    """They hold output too."""
    learned = opened()
    learned.add_answer(ANSWER)
    left = learned.directory / f".{learned._answer_file.name}-k1lled"
    left.write_bytes(b"x" * 1000)
    assert answer_cache_bytes(MODEL) > 1000
    assert delete_answer_cache(MODEL) > 1000
    assert not left.exists()
    curve = learned.directory / f".{learned._curve_file.name}-k1lled"
    curve.touch()
    learned.save_costs()
    assert not curve.exists()
