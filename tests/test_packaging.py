"""The Homebrew formula. `make setup` reports its progress, and each failure in one line."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "packaging" / "homebrew" / "make_formula.py"
LOCK = """
lock-version = "1.0"
[[packages]]
name = "tqdm"
sdist = { url = "https://example.org/tqdm-4.tar.gz", hashes = { sha256 = "22" } }
[[packages]]
name = "mlx"
wheels = [{ url = "https://example.org/mlx-1.whl", hashes = { sha256 = "33" } }]
[[packages]]
name = "anyio"
sdist = { url = "https://example.org/anyio-4.tar.gz", hashes = { sha256 = "11" } }
"""


def make_formula(tmp_path: Path, lock: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pylock.toml").write_text(lock)
    (tmp_path / "akunu.tar.gz").write_bytes(b"the sdist")
    addresses = ("https://example.org/akunu.tar.gz", "https://example.org/")
    files = (str(tmp_path / "pylock.toml"), str(tmp_path / "akunu.tar.gz"))
    command = [sys.executable, str(SCRIPT), *files, *addresses]
    return subprocess.run(command, capture_output=True, text=True)


def test_formula_has_a_resource_for_each_package_without_a_formula(tmp_path: Path) -> None:
    formula = make_formula(tmp_path, LOCK).stdout
    assert "@" not in formula.replace("python@3.14", "")
    assert hashlib.sha256(b"the sdist").hexdigest() in formula
    resources = [line for line in formula.splitlines() if line.startswith("  resource")]
    assert resources == ['  resource "anyio" do', '  resource "tqdm" do']
    assert 'url "https://example.org/tqdm-4.tar.gz"\n    sha256 "22"' in formula
    assert 'depends_on "mlx"' in formula
    assert 'run [opt_bin/"akunu", "serve"]' in formula


def test_a_package_without_sources_is_named(tmp_path: Path) -> None:
    done = make_formula(tmp_path, LOCK.replace('"mlx"', '"other"'))
    assert done.returncode == 1
    assert "other has no source archive" in done.stderr


@pytest.mark.skipif(not shutil.which("ruby"), reason="needs ruby")
def test_formula_is_ruby(tmp_path: Path) -> None:
    formula = tmp_path / "akunu.rb"
    formula.write_text(make_formula(tmp_path, LOCK).stdout)
    subprocess.run(["ruby", "-wc", formula], check=True)


# `make setup`


REAL_OUTPUT = """Collecting mlx==0.32.4
  Using cached mlx-0.32.4-py3-none-any.whl.metadata (5.5 kB)
  Downloading mlx-0.32.4-cp311-cp311-manylinux.whl (12.3 MB)
Collecting numpy==2.4.6
  Using cached numpy-2.4.6-cp311.whl (16.9 MB)
"""


def make_setup(directory: Path, output: str, code: int) -> subprocess.CompletedProcess[str]:
    """Run `make setup` in a copy of the sources whose pip prints `output` and exits with `code`."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, directory)
    shutil.copytree(ROOT / "packaging", directory / "packaging")
    python = directory / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (directory / "output").write_text(output)
    python.write_text(f"#!/bin/sh\ncat output\nexit {code}\n")
    python.chmod(0o755)
    return subprocess.run(
        ["make", "--no-print-directory", "setup"],
        cwd=directory, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def test_setup_reports_progress_and_names_the_next_command(tmp_path: Path) -> None:
    done = make_setup(tmp_path, REAL_OUTPUT, 0)
    assert done.returncode == 0, done.stderr
    first, progress, last = done.stdout.splitlines()
    assert first == "Installing akunu with pip ..."
    assert progress.startswith("  29 MB, ")
    assert last == "Now: make chat"
    assert (tmp_path / ".venv.log").read_text() == REAL_OUTPUT
    assert (tmp_path / ".venv" / ".installed").exists()


@pytest.mark.parametrize(("output", "message"), [
    ("WARNING: Retrying: Temporary failure in name resolution", "check the network"),
    ("ERROR: Could not find a version (from versions: none)", "check the network"),
    ("  Caused by: dns error: failed to lookup address", "check the network"),
    ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ("error: Permission denied (os error 13)", "no permission"),
    ("ERROR: Package 'x' requires a different Python: 3.14", "PYTHON=python3.12"),
    ("building\nERROR: something new\nwarning: later", "ERROR: something new"),
    ("", "no output"),
])  # fmt: skip
def test_a_failure_is_one_line_with_advice(tmp_path: Path, output: str, message: str) -> None:
    done = make_setup(tmp_path, output, 1)
    assert done.returncode != 0
    line, *of_make = done.stderr.splitlines()
    assert line.startswith("akunu: ")
    assert message in line
    assert line.endswith(f"(log: {tmp_path}/.venv.log)")
    assert all(each.startswith("make") for each in of_make)
    assert not (tmp_path / ".venv" / ".installed").exists()


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "packaging").mkdir()
    (tmp_path / "packaging" / "constraints.txt").touch()
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    for name in ("cat", "mkdir", "touch", "make", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        ["make", "setup"], cwd=tmp_path, capture_output=True, text=True, env={"PATH": str(tmp_path)}
    )
    assert done.returncode != 0
    assert "Python 3.11 or later is needed, found Python 3.9.1" in done.stderr
