"""`make chat` in a fresh clone says what it does before each slow step."""

from __future__ import annotations

import subprocess
from pathlib import Path

MAKEFILE = Path(__file__).parents[1] / "Makefile"


def test_each_slow_step_is_announced(tmp_path: Path) -> None:
    python = tmp_path / "fake"  # prints its module, and makes itself the environment's Python
    python.write_text(
        '#!/bin/sh\n[ "$1" = -m ] && echo "runs $2" >> log\n'
        '[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python\nexit 0\n'
    )
    python.chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    command = [
        "make",
        "--no-print-directory",
        "-f",
        str(MAKEFILE),
        "setup",
        f"PYTHON={python}",
        "SHELL=/bin/sh",
    ]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "log").read_text().splitlines() == ["runs venv", "runs pip"]
    first, second = made.stdout.splitlines()
    assert first.startswith("Making a virtual environment in .venv")
    assert second.startswith("Installing akunu")
