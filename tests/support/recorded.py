"""Requests of real clients, recorded by `tests/serve/record.py`."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

REQUESTS = Path(__file__).parents[1] / "serve/requests"
_CUT = re.compile(r"\[([0-9]+) characters, ([0-9a-f]{8})\]")
_LONGEST = 800  # characters of a filler; longer ones only take time


def recorded_requests() -> dict[str, list[dict[str, Any]]]:
    """Return the recorded requests by client, with fillers in place of long texts."""
    found = {}
    for file in sorted(REQUESTS.iterdir()):
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        found[file.name.split(".json")[0]] = json.loads(_CUT.sub(_filler, text))
    return found


def _filler(match: re.Match[str]) -> str:
    """Return a text as long as the one that was cut; equal texts have equal fillers."""
    pick = random.Random(match[2])
    words = ["the", "file", "is", "in", "a", "folder", "with", "other", "names", "and", "lines"]
    return " ".join(pick.choices(words, k=min(int(match[1]), _LONGEST) // 5))
