"""Measure drafting from the buffer, and the cost of a keystroke, in completion.

The workload (completion.toml) is small projects; each function body is held out once. A replay
counts the passes over the held-out text in the model's tokens. It runs no model, so it is exact.
`run_live` counts the passes over the model's own completions at the same places. The planner uses a
published cost curve, so that no count depends on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from typing import Any

from akunu_py.bench.command import add_model, progress, show
from akunu_py.bench.curve import Curve, FixedCosts, add_curve_option, parse_curve
from akunu_py.bench.replay import ReplayCounts, replay_item
from akunu_py.bench.trace import TraceItem
from akunu_py.completion.completer import Completer
from akunu_py.completion.prompt.layout import Prompt
from akunu_py.completion.request import CompleteOptions, Completion, CompletionRequest, SourceFile
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.parser import add_format
from akunu_py.types import LoadOptions
from tests.measure.tool import run_tool
from tests.support.complete import complete

SUMMARY = "Measure what drafting from the buffer is worth and what a keystroke costs"
_CONTEXTS = ("the prompt alone", "+ the rest of the buffer", "+ the other files")
PREFIX, BUFFER, FILES = "prefix", "buffer", "files"
CONTEXTS = (PREFIX, BUFFER, FILES)  # sources of drafts; each includes the previous ones
TOGETHER = "all"
_SHORTEST = 60  # characters of a held-out body
_LONGEST = 128  # tokens of a body that are counted
_COUNTS = ("tokens", "passes", "drafted", "accepted", "tokens_per_pass", "score")


@dataclass(frozen=True, slots=True)
class Place:
    """A held-out function body."""

    project: str
    request: CompletionRequest  # ends before the body's first word, continues after its end
    body: str


@dataclass(frozen=True, slots=True)
class Keystrokes:
    """The cost of keystrokes."""

    first: int  # tokens prefilled when the buffer is opened
    typed: int  # tokens prefilled after a letter that was not predicted
    predicted: int  # passes after a letter that was predicted
    superseded: int  # passes after the request was cancelled


def measure_completion(
    engine: Engine,
    options: CompleteOptions,
    curve: Curve,
    live_places: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return all measurements, ready for JSON.

    live: number of places that the model also completes.
    """
    places = load_places()
    replayed = replay_places(Completer(engine, options), places, curve)
    live_places = max(0, min(live_places, len(places)))
    chosen = [
        places[index * len(places) // live_places] for index in range(live_places)
    ]  # evenly spaced
    completed = run_live(engine, options, chosen, curve, progress)
    keystrokes = count_keystrokes(engine, options, places[len(places) // 2])
    projects = {
        project: _gains({context: total.as_dict() for context, total in counts.items()})
        for project, counts in replayed.items()
    }
    return {
        "replay": {"places": len(places), "projects": projects},
        "live": {"places": len(chosen), **_live_counts(completed)},
        "keystrokes": asdict(keystrokes),
    }


def _live_counts(completed: Mapping[str, Sequence[Completion]]) -> dict[str, Any]:
    contexts: dict[str, dict[str, Any]] = {}
    for context, completions in completed.items():
        stats = [each.stats for each in completions]
        tokens = sum(each.decoded_tokens for each in stats)
        passes = sum(each.target_passes for each in stats)
        contexts[context] = {
            "tokens": tokens,
            "passes": passes,
            "drafted": sum(each.drafted for each in stats),
            "accepted": sum(each.accepted for each in stats),
            "tokens_per_pass": round(tokens / passes, 4) if passes else 0.0,
        }
    texts = [[each.text for each in completions] for completions in completed.values()]
    return _gains(contexts) | {"identical": all(text == texts[0] for text in texts)}


def _gains(contexts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Add `gain` to the counts: tokens per pass relative to the prompt alone."""
    alone = next(iter(contexts.values()))["tokens_per_pass"]
    return {
        context: {name: counts[name] for name in _COUNTS if name in counts}
        | {"gain": round(counts["tokens_per_pass"] / alone, 4) if alone else 0.0}
        for context, counts in contexts.items()
    }


def load_places() -> list[Place]:
    """Return all places of the workload, in file order."""
    rows = tomllib.loads(
        resources.files(__package__).joinpath("completion.toml").read_text(encoding="utf-8")
    )["file"]
    places = []
    for row in rows:
        others = tuple(
            SourceFile(other["path"], other["text"])
            for other in rows
            if other["project"] == row["project"] and other is not row
        )
        for before, body, after in _bodies(row["text"]):
            request = CompletionRequest(before, after, row["path"], "python", others)
            places.append(Place(row["project"], request, body))
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
) -> dict[str, dict[str, ReplayCounts]]:
    """Count the passes over the held-out text, by project (and "all") and draft context."""
    counts: dict[str, dict[str, ReplayCounts]] = {}
    for place in places:
        prompt = completer.prompt(place.request)
        # The prompt may end within a token: the output starts with the healed part.
        output = completer.code.encode(prompt.healed + place.body)[:_LONGEST]
        for context, pieces in _contexts(prompt).items():
            drafter = AutoDrafter(
                FixedCosts(curve.points), stop_tokens=completer.engine.tokens.stop_tokens
            )
            end = sorted(completer.engine.tokens.stop_tokens)[:1]
            unread = [token for tokens in pieces for token in (*tokens, *end)]
            drafter.extend(unread)
            drafter.draft_only_tokens = len(unread)
            item = TraceItem(tuple(prompt.tokens), output)
            total = counts.setdefault(place.project, {}).setdefault(context, ReplayCounts())
            replay_item(item, drafter, curve, total)
    together = {context: _sum([each[context] for each in counts.values()]) for context in CONTEXTS}
    return {TOGETHER: together, **counts}


def _sum(counts: Sequence[ReplayCounts]) -> ReplayCounts:
    names = [field.name for field in fields(ReplayCounts)]
    return ReplayCounts(**{name: sum(getattr(each, name) for each in counts) for name in names})


def _contexts(prompt: Prompt) -> dict[str, list[tuple[int, ...]]]:
    """Return the draft context of each of `CONTEXTS`; the prompt begins with the files."""
    return {PREFIX: [], BUFFER: prompt.draft_context[prompt.files :], FILES: prompt.draft_context}


def run_live(
    engine: Engine,
    options: CompleteOptions,
    places: Sequence[Place],
    curve: Curve,
    progress: Callable[[str], None],
) -> dict[str, list[Completion]]:
    """Return the model's completions at `places`, by draft context."""
    completions: dict[str, list[Completion]] = {context: [] for context in CONTEXTS}
    for number, place in enumerate(places, start=1):
        for context in CONTEXTS:
            progress(f"{place.request.path}: {context}, {number}/{len(places)}")
            completer = _LimitedCompleter(engine, options, context)
            completer.session.drafting.curve = FixedCosts(curve.points)
            completions[context].append(complete(completer, place.request))
    return completions


class _LimitedCompleter(Completer):
    """A completer that drafts from one of `CONTEXTS` only."""

    def __init__(self, engine: Engine, options: CompleteOptions, context: str) -> None:
        super().__init__(engine, options)
        self._context = context

    def prompt(self, request: CompletionRequest, session: Session | None = None) -> Prompt:
        prompt = super().prompt(request, session)
        return replace(prompt, draft_context=_contexts(prompt)[self._context])


def count_keystrokes(engine: Engine, options: CompleteOptions, place: Place) -> Keystrokes:
    """Open a buffer, type a predicted letter and another one, and cancel a request."""
    completer = Completer(engine, options)
    request = place.request
    first = complete(completer, request)
    predicted = complete(completer, replace(request, prefix=request.prefix + first.text[:1]))
    other = next(letter for letter in "xyz" if not first.text.startswith(letter))
    typed = complete(completer, replace(request, prefix=request.prefix + other))
    return Keystrokes(
        _prefilled_tokens(first),
        _prefilled_tokens(typed),
        predicted.stats.target_passes,
        _passes_after(completer, request),
    )


def _prefilled_tokens(done: Completion) -> int:
    return done.stats.prompt_tokens - done.stats.cached_tokens


def _passes_after(completer: Completer, request: CompletionRequest) -> int:
    """Return the passes after a request is cancelled at its first text."""
    target = completer.session.target
    forward = target.forward
    passes = 0
    cancelled_at: list[int] = []

    def counted(*arguments: object) -> object:
        nonlocal passes
        passes += 1
        return forward(*arguments)  # type: ignore[arg-type]

    target.forward = counted  # type: ignore[assignment, method-assign]
    try:
        complete(
            completer,
            replace(request, prefix=request.prefix + "w"),
            ended=lambda: "cancelled" if cancelled_at else None,
            on_text=lambda text: cancelled_at.append(passes),
        )
    finally:
        target.forward = forward  # type: ignore[method-assign]
    return passes - cancelled_at[0] if cancelled_at else 0


def print_completion(found: dict[str, Any]) -> None:
    """Print all measurements. found: as in JSON."""
    replay, live = found["replay"], found["live"]
    print(f"held-out text at {replay['places']} places, planned for {found['curve']}")
    for name, contexts in replay["projects"].items():
        _print_contexts(name, contexts)
    if live["places"]:
        same = "the same text each time" if live["identical"] else "NOT the same text"
        print(f"\nwhat {found['model']} completes at {live['places']} of them: {same}")
        contexts = {name: counts for name, counts in live.items() if isinstance(counts, dict)}
        _print_contexts("", contexts)
    keys = found["keystrokes"]
    print(
        f"\nopening a buffer: {keys['first']} tokens prefilled; a letter that was not predicted: "
        f"{keys['typed']}; one that was: {keys['predicted']} passes; a cancelled request: "
        f"{keys['superseded']} more passes"
    )


def _print_contexts(name: str, contexts: Mapping[str, Any]) -> None:
    for words, counts in zip(_CONTEXTS, contexts.values(), strict=True):
        print(
            f"  {name:<6} {words:<25} {counts['tokens']:>6} tokens {counts['passes']:>6} "
            f"passes {counts['tokens_per_pass']:>6.2f} a pass  x{counts['gain']:.2f}"
        )
        name = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_curve_option(parser)
    parser.add_argument(
        "--live",
        type=int,
        default=6,
        metavar="N",
        help="Number of places that the model also completes (default: %(default)s)",
    )
    parser.add_argument(
        "--fim", default="auto", metavar="NAME", help="Prompt format (default: %(default)s)"
    )
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    curve = parse_curve(options.curve)
    engine = load_engine(options.model, LoadOptions(options.weights))
    complete_options = CompleteOptions(fim=options.fim)
    measured = measure_completion(engine, complete_options, curve, options.live, progress)
    progress("")
    found = {"model": engine.name, "curve": options.curve} | measured
    show(options, found, lambda: print_completion(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("completion", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
