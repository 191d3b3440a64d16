"""Score what the rules of completion keep of a perfect model's output, on real source files.

No model runs. After the removed text, the output ends ("ends"), repeats the suffix ("repeats"), or,
if the suffix is empty, continues with the rest of the file ("goes on"). The first two skip places
where the removed lines follow the cursor again, because such output is a repetition.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from akunu_py.bench.command import FAILED, add_count, progress, show
from akunu_py.bench.tables import to_text
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.completion.stops import CompletionStops
from akunu_py.errors import UsageError
from akunu_py.parser import add_format
from tests.measure.tool import run_tool
from tests.support.source_places import LANGUAGES, Place, Source, choose_places, read_source

ENDS, REPEATS, GOES_ON = "ends", "repeats", "goes on"
_KINDS_AT_END = ("line", "block", "open", "margin")  # the cursor may be at the end of a file
_EXTRA_OUTPUT = 1500  # characters of the output after the removed text
_PIECE = 60  # characters per piece of the output

WHOLE, SHORT, LONGER = "whole", "short", "longer"  # the right text, fewer lines, more lines
LOST, BROKEN, REPEATED, INDENTED = "lost", "brackets", "repeated", "indentation"
SAFE = (WHOLE, SHORT, LONGER)
SAFE_PLACES, COMPLETE = 0.995, 0.95  # the goals: shares of places, and of blocks of each language


def score_directory(
    directory: Path, places: int, on_fault: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Score up to `places` places of each file below `directory`, ready for JSON.

    on_fault: called with a description of every place that is not whole. `reached`: all goals are
    met. Raises UsageError if there is no source file.
    """
    counts: dict[str, Counter[str]] = {}  # by language
    for path in sorted(directory.rglob("*")):
        source = read_source(path) if path.suffix in LANGUAGES and path.is_file() else None
        if source is None:
            continue
        progress(str(path.relative_to(directory)))
        count = counts.setdefault(source.language, Counter())
        for place, mode in cases(source, places):
            verdict, kept = judge(place, mode)
            block = "\n" in place.removed.strip()
            count.update(places=1, safe=verdict in SAFE)
            count.update(blocks=block, whole=block and verdict == WHOLE)
            if verdict != WHOLE and on_fault:
                on_fault(
                    f"\n{place}, the output {mode}: {verdict}\n  removed   {place.removed!r}\n"
                    f"  kept      {kept!r}\n  suffix    {place.suffix[:80]!r}"
                )
    progress("")
    if not counts:
        raise UsageError(f"no source files in {directory}; there may be *.py, *.js, *.go, ...")
    languages = {name: _score(count) for name, count in sorted(counts.items())}
    total = _score(sum(counts.values(), Counter()))
    complete = all(score["complete"] >= COMPLETE for score in languages.values())
    reached = total["safe"] >= SAFE_PLACES and complete
    return {"languages": languages, "all": total, "reached": reached}


def _score(count: Counter[str]) -> dict[str, Any]:
    places, blocks = count["places"], count["blocks"]
    return {
        "places": places,
        "safe": round(count["safe"] / places, 4) if places else 1.0,
        "blocks": blocks,  # places with several removed lines
        "complete": round(count["whole"] / blocks, 4) if blocks else 1.0,
    }


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
    stops = CompletionStops(CompletionRequest(text[: place.start], suffix, path=place.source.path))
    cuts = (stops.cut(output[:end]) for end in range(_PIECE, len(output), _PIECE))
    cut = next((cut for cut in cuts if cut.done), None) or stops.cut(output, final=True)
    assert output.startswith(cut.text)
    return _verdict(place, cut.text, at_end), cut.text


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
        if not kept.strip() or end < start + len(rest):
            return LOST
        if source.text[end : end + 1] != "\n" or not source.balanced(end, right):
            return BROKEN
        return SHORT
    # The last line before the suffix must have the indentation of the file.
    _, lines, indentation = place.removed.rpartition("\n")
    ends_a_line = at_end or not lines or place.suffix.startswith("\n")
    if ends_a_line or indentation.strip() or kept.rpartition("\n")[2] == indentation:
        return WHOLE
    return INDENTED


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


main = partial(run_tool, "oracle", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(main())
