"""Measure drafting from the buffer in completion.

The workload (completion.toml) is small projects; each function body is held out once. A replay
counts the passes over the held-out text in the model's tokens. It runs no model, so it is exact.
The planner uses a published cost curve, so that no count depends on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from akunu_py.bench.command import add_count, add_model, show
from akunu_py.bench.curve import Curve, FixedCosts, add_curve_option, parse_curve
from akunu_py.bench.replay import ReplayCounts, replay_item
from akunu_py.bench.tables import to_text
from akunu_py.bench.trace import TraceItem
from akunu_py.completion.completer import Completer
from akunu_py.completion.request import CompletionRequest, SourceFile
from akunu_py.decoding.load import load_engine
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.parser import add_format
from akunu_py.types import LoadOptions
from tests.measure.tool import run_tool

PROMPT, BUFFER, FILES = "the prompt alone", "+ the rest of the buffer", "+ the other files"
_SHORTEST = 60  # characters of a held-out body
_LONGEST = 128  # tokens of a body that are counted


@dataclass(frozen=True, slots=True)
class Place:
    """A held-out function body."""

    request: CompletionRequest  # ends before the body's first word, continues after its end
    body: str


def load_places() -> list[Place]:
    """Return all places of the workload, in file order."""
    text = resources.files(__package__).joinpath("completion.toml").read_text(encoding="utf-8")
    rows, places = tomllib.loads(text)["file"], []
    for row in rows:
        others = tuple(
            SourceFile(other["path"], other["text"])
            for other in rows
            if other["project"] == row["project"] and other is not row
        )
        for before, body, after in _bodies(row["text"]):
            request = CompletionRequest(before, after, row["path"], "python", others)
            places.append(Place(request, body))
    return places


def _bodies(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (before, body, after) of each function with a one-line head."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not (line.lstrip().startswith("def ") and line.rstrip().endswith(":")):
            continue
        end = number + 1
        while end < len(lines) and (not lines[end].strip() or _width(lines[end]) > _width(line)):
            end += 1
        whole = "".join(lines[number + 1 : end])
        body = whole.strip()
        if len(body) >= _SHORTEST:
            indent = whole[: len(whole) - len(whole.lstrip())]
            before = "".join(lines[: number + 1]) + indent
            yield before, body, whole[len(whole.rstrip()) :] + "".join(lines[end:])


def _width(line: str) -> int:
    return len(line) - len(line.lstrip())


def replay_places(
    completer: Completer, places: Sequence[Place], curve: Curve
) -> dict[str, ReplayCounts]:
    """Count the passes over the held-out text, by source of drafts; each includes the previous."""
    counts: dict[str, ReplayCounts] = {}
    stop_tokens = completer.engine.tokens.stop_tokens
    for place in places:
        prompt = completer.prompt(place.request)
        # The prompt may end within a token: the output starts with the healed part.
        output = completer.code.encode(prompt.healed + place.body)[:_LONGEST]
        item = TraceItem(tuple(prompt.tokens), output)
        whole = prompt.draft_context  # begins with the files
        for source, context in ((PROMPT, []), (BUFFER, whole[prompt.files :]), (FILES, whole)):
            drafter = AutoDrafter(FixedCosts(curve.points), stop_tokens=stop_tokens)
            unread = [token for tokens in context for token in (*tokens, *sorted(stop_tokens)[:1])]
            drafter.extend(unread)
            drafter.draft_only_tokens = len(unread)
            replay_item(item, drafter, curve, counts.setdefault(source, ReplayCounts()))
    return counts


def add_options(parser: argparse.ArgumentParser) -> None:
    add_curve_option(parser)
    add_count(parser, "--every", 1, "Replay every Nth place of the workload")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    curve, places = parse_curve(options.curve), load_places()[:: options.every]
    engine = load_engine(options.model, LoadOptions(options.weights))
    counts = replay_places(Completer(engine), places, curve)
    found = {
        "model": engine.name,
        "curve": options.curve,
        "places": len(places),
        "sources": {source: each.as_dict() for source, each in counts.items()},
    }
    show(options, found, lambda: print_completion(found))
    return 0


def print_completion(found: Mapping[str, Any]) -> None:
    """Print all measurements. found: as in JSON."""
    print(f"held-out text at {found['places']} places, planned for {found['curve']}\n")
    cells = [
        [source, str(row["tokens"]), str(row["passes"]), f"{row['tokens_per_pass']:.2f}"]
        for source, row in found["sources"].items()
    ]
    print(to_text((["drafts from", "tokens", "passes", "tokens/pass"], cells)))


main = partial(run_tool, "completion", "Measure what drafting from the buffer is worth in "
               "completion", add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
