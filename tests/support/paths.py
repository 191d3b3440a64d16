"""Directories of the repository, and golden source files."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EDITORS = ROOT / "akunu_py" / "editors"
GOLDEN = ROOT / "tests" / "golden"


def golden_sources() -> dict[str, str]:
    """Return source files in 20 languages: the text of each name."""
    return tomllib.loads((GOLDEN / "sources.toml").read_text("utf-8"))
