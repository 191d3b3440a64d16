"""Where the repository's own files lie that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EDITORS = ROOT / "akunu_py" / "editors"
GOLDEN = ROOT / "tests" / "golden"
