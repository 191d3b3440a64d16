"""Score what the rules of completion keep of a perfect model's output, on real source files.

No model runs. After the removed text, the output ends ("ends"), repeats the suffix ("repeats"), or,
if the suffix is empty, continues with the rest of the file ("goes on"). The first two skip places
where the removed lines follow the cursor again, because such output is a repetition.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from akunu_py.bench.command import FAILED, add_count, progress, show
from akunu_py.bench.tables import to_text
from akunu_py.completion.request import CompletionRequest
from akunu_py.completion.stops import CompletionStops
from akunu_py.errors import UsageError
from akunu_py.parser import add_format
from tests.measure.oracle_places import LANGUAGES, Place, Source, choose_places, read_source
from tests.measure.tool import run_tool

ENDS, REPEATS, GOES_ON = "ends", "repeats", "goes on"
_KINDS_AT_END = ("line", "block", "open", "margin")  # the cursor may be at the end of a file
_EXTRA_OUTPUT = 1500  # characters of the output after the removed text
_PIECE = 60  # characters per piece of the output

WHOLE, SHORT, LONGER = "whole", "short", "longer"  # the right text, fewer lines, more lines
LOST, BROKEN, REPEATED, INDENTED = "lost", "brackets", "repeated", "indentation"
SAFE = (WHOLE, SHORT, LONGER)
SAFE_PLACES, COMPLETE = 0.995, 0.95  # the goals: shares of places, and of blocks of each language


@dataclass(slots=True)
class Score:
    """Numbers of places by verdict."""

    verdicts: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)  # places with several removed lines

    def add(self, verdict: str, block: bool) -> None:
        self.verdicts[verdict] += 1
        if block:
            self.blocks[verdict] += 1

    def as_dict(self) -> dict[str, Any]:
        places, blocks = self.verdicts.total(), self.blocks.total()
        safe = sum(self.verdicts[each] for each in SAFE)
        return {
            "places": places,
            "safe": round(safe / places, 4) if places else 1.0,
            "blocks": blocks,
            "complete": round(self.blocks[WHOLE] / blocks, 4) if blocks else 1.0,
            "verdicts": dict(sorted(self.verdicts.items())),
        }


def score_directory(
    directory: Path, places: int, on_fault: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Score up to `places` places of each file below `directory`, ready for JSON.

    on_fault: called with a description of every place that is not whole. `reached`: all goals are
    met. Raises UsageError if there is no source file.
    """
    scores: dict[str, Score] = {}
    for path in sorted(directory.rglob("*")):
        source = read_source(path) if path.suffix in LANGUAGES and path.is_file() else None
        if source is None:
            continue
        progress(str(path.relative_to(directory)))
        score = scores.setdefault(source.language, Score())
        for place, mode in cases(source, places):
            verdict, kept = judge(place, mode)
            score.add(verdict, "\n" in place.removed.strip())
            if verdict != WHOLE and on_fault:
                on_fault(
                    f"\n{place}, the output {mode}: {verdict}\n  removed   {place.removed!r}\n"
                    f"  kept      {kept!r}\n  suffix    {place.suffix[:80]!r}"
                )
    progress("")
    if not scores:
        raise UsageError(f"no source files in {directory}; there may be *.py, *.js, *.go, ...")
    total = Score()
    for score in scores.values():
        total.verdicts += score.verdicts
        total.blocks += score.blocks
    languages = {name: score.as_dict() for name, score in sorted(scores.items())}
    complete = all(score["complete"] >= COMPLETE for score in languages.values())
    whole = total.as_dict()
    reached = whole["safe"] >= SAFE_PLACES and complete
    return {"languages": languages, "all": whole, "reached": reached}


def cases(source: Source, places: int) -> Iterable[tuple[Place, str]]:
    for place in choose_places(source, places):
        if not place.is_duplicated:
            yield place, ENDS
            yield place, REPEATS
        if place.kind in _KINDS_AT_END:
            yield place, GOES_ON


def judge(place: Place, mode: str) -> tuple[str, str]:
    """Return (verdict, kept text) of one place."""
    text = place.source.text
    at_end = mode == GOES_ON
    suffix = "" if at_end else place.suffix
    output = place.removed if mode == ENDS else text[place.start : place.widest + _EXTRA_OUTPUT]
    kept = _keep(
        CompletionStops(CompletionRequest(text[: place.start], suffix, path=place.source.path)),
        output,
    )
    assert output.startswith(kept)
    return _verdict(place, kept, at_end), kept


def _keep(stops: CompletionStops, output: str) -> str:
    """Return the kept part of `output`, fed in pieces until the rules end it."""
    for end in range(_PIECE, len(output), _PIECE):
        cut = stops.cut(output[:end])
        if cut.done:
            return cut.text
    return stops.cut(output, final=True).text


def _verdict(place: Place, kept: str, at_end: bool) -> str:
    source, start = place.source, place.start
    end = start + len(kept.rstrip())
    right = start + len(place.removed.rstrip())
    if end > right:
        if not at_end:
            return REPEATED
        inside = source.span(end)
        if inside and inside[1] == place.widest:  # more lines of a multi-line string or comment
            return WHOLE
        if not source.balanced(source.line_start(start), end, may_close=True):
            return BROKEN
        return WHOLE if end <= place.widest else LONGER
    if end < right:
        rest = source.text[start : source.line_end(start)].strip()
        if end < right and (not kept.strip() or (rest and end < start + len(rest))):
            return LOST
        if source.text[end : end + 1] != "\n" or not source.balanced(end, right):
            return BROKEN
        return SHORT
    return INDENTED if not _closes_right(place, kept, at_end) else WHOLE


def _closes_right(place: Place, kept: str, at_end: bool) -> bool:
    """Return True if the last line before the suffix has the indentation of the file."""
    end = place.removed.rpartition("\n")[2]
    if at_end or "\n" not in place.removed or end.strip() or place.suffix.startswith("\n"):
        return True
    return kept.rpartition("\n")[2] == end


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="Directory of source files")
    add_count(parser, "--places", 10, "Number of places in each file")
    parser.add_argument("--faults", action="store_true", help="Print every wrong place")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    """Return exit code 1 if the goals are missed."""
    on_fault = print if options.faults else None
    found = score_directory(options.directory, options.places, on_fault)
    show(options, found, lambda: print_oracle(found))
    return 0 if found["reached"] else FAILED


def print_oracle(found: Mapping[str, Any]) -> None:
    """Print the scores. found: as in JSON."""
    print("kept text: safe (brackets balanced, nothing lost or repeated), and whole\n")
    cells = [
        [name, str(score["places"]), f"{score['safe']:.2%}", str(score["blocks"]),
         f"{score['complete']:.2%}"]
        for name, score in [*found["languages"].items(), ("all", found["all"])]
    ]  # fmt: skip
    print(to_text((["language", "places", "safe", "blocks", "whole"], cells)), end="")


main = partial(run_tool, "oracle", "Score the rules of completion on real source files",
               add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
