"""Measure the time from a request to the first text of a completion, after a key in a quiet editor.

    python -m tests.measure.first_text TREE ...

TREE: checkouts, whose helpers take turns at each place, with the starter. A quiet editor: one
buffer, prefilled up to the last key. An editor adds its delay (100 ms in Vim). Prints JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.measure.completion import Place, load_places

PLACES = 40
TYPED = 3  # characters of a body, the last of which is the last key
# Runs `akunu complete` of a tree with this Python's packages.
HELPER = """
import sys
sys.path.insert(0, sys.argv[1])
from akunu_py.cli import main
sys.argv = ["akunu", "complete", "--model", "starter", "--no-answer-cache"]
main()
"""


class Helper:
    """The helper of one checkout."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HELPER, str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tree,
        )
        self._numbers = itertools.count(1)
        self.first_ms: list[float] = []

    def first_text(self, request: dict[str, Any]) -> float | None:
        """Return the milliseconds until the first text of a reply, None if it has none."""
        assert self._process.stdin
        assert self._process.stdout
        number = next(self._numbers)
        line = json.dumps({"id": number, "stream": True, "time_ms": 200_000} | request)
        start, first = time.monotonic(), None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        while True:
            reply = json.loads(self._process.stdout.readline())
            if first is None and (reply.get("delta") or reply.get("text")):
                first = (time.monotonic() - start) * 1000
            if reply["id"] == number and ("finish_reason" in reply or "error" in reply):
                return first

    def type(self, place: Place) -> None:
        request = place.request
        fields = {"suffix": request.suffix, "path": request.path}
        before = request.prefix + place.body[: TYPED - 1]
        self.first_text(fields | {"prefix": before, "max_tokens": 0})
        typed = request.prefix + place.body[:TYPED]
        first = self.first_text(fields | {"prefix": typed, "max_tokens": 16})
        if first is not None:
            self.first_ms.append(first)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def measure(trees: Sequence[Path]) -> dict[str, Any]:
    places = load_places()
    chosen = [places[index * len(places) // PLACES] for index in range(PLACES)]
    helpers = [Helper(tree) for tree in trees]
    for number, place in enumerate(chosen):
        for helper in helpers if number % 2 else reversed(helpers):
            helper.type(place)
    for helper in helpers:
        helper.close()
    medians = [statistics.median(helper.first_ms) for helper in helpers]
    return {
        "median_ms": [round(median) for median in medians],
        "ratio_to_last": [round(median / medians[-1], 2) for median in medians],
        "places_with_text": [len(helper.first_ms) for helper in helpers],
    }


if __name__ == "__main__":
    print(json.dumps(measure([Path(tree).resolve() for tree in sys.argv[1:]])))
