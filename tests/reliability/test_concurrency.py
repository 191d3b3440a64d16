"""Several akunus at once on one store, one database and one cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability import concurrency
from tests.reliability.faults import Home, Outcome
from tests.support.terminal import needs_tmux
from tests.support.tiny_model import tiny_files


@pytest.fixture
def home(tmp_path: Path, shallow_directory: Path) -> Home:
    return Home(tmp_path / "home", shallow_directory)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Those of a small model, for a hub on this machine."""
    return tiny_files(tmp_path)


def good(outcome: Outcome) -> None:
    assert not outcome.problems


@needs_tmux
def test_two_chats_a_helper_and_a_pull(home: Home, files: dict[str, bytes]) -> None:
    good(concurrency.all_at_once(home, files, 1, tokens=30))


def test_two_imports_of_one_model(home: Home) -> None:
    good(concurrency.import_twice(home))


def test_two_pulls_of_one_model(home: Home, files: dict[str, bytes]) -> None:
    good(concurrency.pull_twice(home, files))


def test_readers_during_a_migration(home: Home) -> None:
    good(concurrency.read_while_migrated(home))


def test_a_migration_that_is_killed(home: Home) -> None:
    good(concurrency.killed_migration(home, 0.4))


def test_writers_of_one_memory(tmp_path: Path) -> None:
    good(concurrency.remembered_together(tmp_path, processes=3, answers=15))


@pytest.mark.slow
def test_a_model_that_is_removed_while_it_is_imported(home: Home) -> None:
    good(concurrency.remove_meanwhile(home))
