"""The Homebrew formula, and `make setup`."""

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


def make(tmp_path: Path, lock: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pylock.toml").write_text(lock)
    (tmp_path / "akunu.tar.gz").write_bytes(b"the sdist")
    addresses = ("https://example.org/akunu.tar.gz", "https://example.org/")
    files = (str(tmp_path / "pylock.toml"), str(tmp_path / "akunu.tar.gz"))
    command = [sys.executable, str(SCRIPT), *files, *addresses]
    return subprocess.run(command, capture_output=True, text=True)


def test_it_has_a_resource_for_each_package_without_a_formula(tmp_path: Path) -> None:
    formula = make(tmp_path, LOCK).stdout
    assert "@" not in formula.replace("python@3.14", "")
    assert hashlib.sha256(b"the sdist").hexdigest() in formula
    resources = [line for line in formula.splitlines() if line.startswith("  resource")]
    assert resources == ['  resource "anyio" do', '  resource "tqdm" do']
    assert 'url "https://example.org/tqdm-4.tar.gz"\n    sha256 "22"' in formula
    assert 'depends_on "mlx"' in formula
    assert 'run [opt_bin/"akunu", "serve"]' in formula


def test_a_package_without_sources_is_named(tmp_path: Path) -> None:
    done = make(tmp_path, LOCK.replace('"mlx"', '"other"'))
    assert done.returncode == 1
    assert "other has no source archive" in done.stderr


@pytest.mark.skipif(not shutil.which("ruby"), reason="needs ruby")
def test_it_is_ruby(tmp_path: Path) -> None:
    formula = tmp_path / "akunu.rb"
    formula.write_text(make(tmp_path, LOCK).stdout)
    subprocess.run(["ruby", "-wc", formula], check=True)
