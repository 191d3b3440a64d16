"""`akunu uninstall` lists our data, and deletes it after a confirmation."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from akunu_py.commands import uninstall
from akunu_py.models.store.names import NameEntry, save_entry
from akunu_py.serve.own import system_service
from akunu_py.serve.own.client import RunningServer, announce
from tests.support.command import AKUNU, assert_one_line_error, pseudo_terminal, run_here


@pytest.fixture(autouse=True)
def home(tmp_path: Path, own_directories: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of ours, and of other programs in the same directories."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for kind in ("data", "cache", "config"):
        for name in ("akunu", "other"):
            (tmp_path / kind / name / "some").mkdir(parents=True)
            (tmp_path / kind / name / "some" / "file").write_bytes(b"x" * 1000)
    return tmp_path


def files_in(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("file")}


OTHERS = {f"{kind}/other/some/file" for kind in ("data", "cache", "config")}


def test_without_data_nothing_is_deleted(home: Path) -> None:
    before = files_in(home)
    shown = run_here("uninstall").stdout
    for kind in ("data", "cache", "config"):
        assert f"1.0 kB  {home / kind / 'akunu'}" in shown
    assert "to delete this data, run: akunu uninstall --data" in shown
    assert f"to remove the program, run: {uninstall.removal_command()}" in shown
    assert files_in(home) == before
    assert_one_line_error(run_here("uninstall", "--yes"), 2, "--data")


def test_only_our_files_are_deleted(home: Path) -> None:
    (home / "hub").mkdir()
    (home / "hub" / "file").write_bytes(b"y")
    save_entry("m", NameEntry(repository="a/b", revision="0" * 40, cache=str(home / "hub")))
    done = run_here("uninstall", "--data", "--yes")
    assert (done.returncode, files_in(home)) == (0, OTHERS | {"hub/file"})
    assert f"remain in its cache, {home / 'hub'}" in done.stdout
    assert "no data" in run_here("uninstall", "--data").stdout


def test_no_terminal_or_a_running_server_is_refused(home: Path) -> None:
    before = files_in(home)
    assert "run: akunu uninstall --data --yes" in run_here("uninstall", "--data").stderr
    with announce(RunningServer("http://127.0.0.1:1", "", {"m": str(home)})):
        assert f"process {os.getpid()}" in run_here("uninstall", "--data", "--yes").stderr
    assert files_in(home) == before


def test_a_service_is_removed_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_in(home)
    monkeypatch.setattr(system_service, "is_installed", lambda: True)
    assert "run: akunu serve --uninstall" in run_here("uninstall").stdout
    done = run_here("uninstall", "--data", "--yes")
    assert "first run: akunu serve --uninstall" in done.stderr
    assert files_in(home) == before


def test_a_link_is_left_to_the_user(home: Path) -> None:
    (home / "data" / "akunu").rename(home / "moved")
    (home / "data" / "akunu").symlink_to(home / "moved")
    done = run_here("uninstall", "--data", "--yes")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "is a link" in done.stderr
    assert (home / "moved" / "some" / "file").exists()


def test_a_failed_deletion_does_not_advise_another_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(uninstall, "shutil", Mock(rmtree=refuse))
    done = run_here("uninstall", "--data", "--yes")
    assert done.stderr.endswith("Permission denied; give yourself write access\n")


@pytest.mark.parametrize(("prefix", "command"), [
    ("/home/me/.local/share/uv/tools/akunu-py", "uv tool uninstall akunu-py"),
    ("/home/me/.local/share/pipx/venvs/akunu-py", "pipx uninstall akunu-py"),
    ("/opt/homebrew/Cellar/akunu/0.1.0/libexec", "brew uninstall akunu"),
    ("/home/me/venv", f"{sys.executable} -m pip uninstall akunu-py"),
])  # fmt: skip
def test_it_knows_its_installer(prefix: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    assert uninstall.removal_command() == command
    assert command in run_here("info").stdout


@pytest.mark.parametrize(
    ("answer", "remaining"), [(b"n\n", None), (b"\x04", None), (b"y\n", OTHERS)]
)
def test_data_is_deleted_after_a_confirmation(
    home: Path, answer: bytes, remaining: set[str] | None
) -> None:
    before = files_in(home)
    with pseudo_terminal() as (terminal, inside):
        os.write(terminal, answer)
        done = subprocess.run(
            [*AKUNU, "uninstall", "--data"], stdin=inside, capture_output=True, text=True
        )
    assert "Delete all of it permanently? [y/N]" in done.stdout
    assert done.returncode == 0, done.stderr
    assert files_in(home) == (before if remaining is None else remaining), done.stderr
