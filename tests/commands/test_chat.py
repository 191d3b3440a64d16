"""What `akunu chat` works out before the screen opens, and the line behind it."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest

from akunu_py.commands.chat import check_draft_model
from akunu_py.decoding.load import with_settings
from akunu_py.program import shell_command
from akunu_py.settings import Settings
from akunu_py.types import LoadOptions


def test_a_missing_draft_model_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    args = argparse.Namespace(draft_model="no-such-model")
    (notice,) = check_draft_model(args)
    assert notice.startswith("--draft-model is not used: ")
    assert "no-such-model" in notice
    assert args.draft_model == ""
    assert check_draft_model(argparse.Namespace(draft_model=None)) == []


def test_the_list_of_models_has_the_limit_that_loading_has() -> None:
    settings = Settings(memory_limit="2GB")
    assert with_settings(LoadOptions(), settings).memory_limit == 2_000_000_000
    assert with_settings(LoadOptions(memory_limit=5), settings).memory_limit == 5
    assert with_settings(LoadOptions(), Settings()).memory_limit is None


def test_the_command_that_reopens_a_chat_works_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `make chat`, which runs a script that is not on the path."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    command = shlex.split(shell_command())
    done = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("akunu ")
    (tmp_path / "akunu").symlink_to(command[0])
    if command[0].endswith("/akunu"):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert shell_command() == "akunu"
