"""Measure how often the next lines use a name that only the imported files have.

No model runs. The directory is the project; every file is a buffer whose other files are closed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

from akunu_py.completion.prompt.project_imports import imported_files
from akunu_py.completion.request import CompletionRequest
from tests.measure.oracle.source import LANGUAGES

_NEXT = 8  # lines that are removed after the cursor
_NAME = re.compile(r"\b[A-Za-z_]\w{3,}")
Counts = dict[str, int]


def measure_imports(
    directory: Path, places: int, progress: Callable[[str], None]
) -> dict[str, Counts]:
    """Return counts by language: places, those with imported files, those with a new name.

    places: maximum number in each file.
    """
    found: dict[str, Counts] = {}
    for path in sorted(directory.resolve().rglob("*")):
        if path.suffix not in LANGUAGES or not path.is_file():
            continue
        progress(path.name)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        numbers = range(min(10, len(lines)), len(lines) - _NEXT)
        chance = random.Random(crc32(path.name.encode()))
        for number in sorted(chance.sample(numbers, min(places, len(numbers)))):
            before, after = "".join(lines[:number]), "".join(lines[number + _NEXT :])
            request = CompletionRequest(before, after, str(path), root=str(directory.resolve()))
            added = _names("".join(file.text for file in imported_files(request)))
            wanted = _names("".join(lines[number : number + _NEXT])) - _names(before + after)
            for name in (LANGUAGES[path.suffix], "all"):
                counts = found.setdefault(name, {"places": 0, "imported": 0, "new names": 0})
                counts["places"] += 1
                counts["imported"] += bool(added)
                counts["new names"] += bool(wanted & added)
    return found


def _names(text: str) -> set[str]:
    return set(_NAME.findall(text))
