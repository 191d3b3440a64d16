"""Score what the rules of completion keep of a perfect model's output.

The output comes from real source files, at thousands of cursor places. No model runs. After the
removed text, the output ends ("ends"), repeats the suffix ("repeats"), or, if the suffix is empty,
continues with the rest of the file ("goes on"). The first two skip places where the removed lines
follow the cursor again, because such output is a repetition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from akunu_py.completion.request import CompletionRequest
from akunu_py.completion.stops import CompletionStops
from tests.measure.oracle.places import Place, choose_places
from tests.measure.oracle.source import LANGUAGES, Source, read_source

ENDS, REPEATS, GOES_ON = "ends", "repeats", "goes on"
_KINDS_AT_END = (
    "line",
    "block",
    "open",
    "margin",
)  # kinds whose cursor may be at the end of a file
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

    def merge(self, other: Score) -> None:
        self.verdicts += other.verdicts
        self.blocks += other.blocks

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


def ignore_fault(place: Place, mode: str, verdict: str, kept: str) -> None:
    """Do nothing."""


def score_directory(
    directory: Path,
    places: int,
    progress: Callable[[str], None] = lambda text: None,
    on_fault: Callable[[Place, str, str, str], None] = ignore_fault,
) -> dict[str, Score]:
    """Score up to `places` places of each file below `directory`; return the scores by language.

    on_fault: called for every place that is not whole, with the place, the mode, the verdict and
    the kept text.
    """
    scores: dict[str, Score] = {}
    for path in sorted(directory.rglob("*")):
        if path.suffix not in LANGUAGES or not path.is_file():
            continue
        source = read_source(path)
        if source is None:
            continue
        progress(str(path.relative_to(directory)))
        score = scores.setdefault(source.language, Score())
        for place, mode in _cases(source, places):
            verdict, kept = judge(place, mode)
            score.add(verdict, "\n" in place.removed.strip())
            if verdict != WHOLE:
                on_fault(place, mode, verdict, kept)
    return scores


def as_dict(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return all scores, ready for JSON. `reached`: all goals are met."""
    total_score = Score()
    for score in scores.values():
        total_score.merge(score)
    languages = {name: score.as_dict() for name, score in sorted(scores.items())}
    complete = all(score["complete"] >= COMPLETE for score in languages.values())
    total = total_score.as_dict()
    return {
        "languages": languages,
        "all": total,
        "reached": total["safe"] >= SAFE_PLACES and complete,
    }


def _cases(source: Source, places: int) -> Iterable[tuple[Place, str]]:
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
