"""`akunu bench complete`: what drafting from the buffer is worth, and what a keystroke costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from akunu_py.bench.replay.curves import CURVES, parse_curve
from akunu_py.commands.bench_common import add_format, add_model, progress

if TYPE_CHECKING:
    from akunu_py.bench.completion import Place
    from akunu_py.bench.replay.trace import ReplayCounts
    from akunu_py.completion.types import Completion

_WORDS = ("the prompt alone", "+ the rest of the buffer", "+ the other files")  # the evidence
_COUNTS = ("tokens", "passes", "drafted", "accepted", "tokens_per_pass", "score")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--curve",
        default="m5max",
        metavar="CURVE",
        help=f"costs to plan with: {', '.join(CURVES)}, or points such as 1:1,3:1.11,5:1.42",
    )
    parser.add_argument(
        "--live",
        type=int,
        default=6,
        metavar="N",
        help="places that the model itself completes too (default: %(default)s)",
    )
    parser.add_argument("--fim", default="auto", metavar="NAME")
    add_model(parser)
    add_format(parser)


def complete(options: argparse.Namespace) -> int:
    from akunu_py.bench import completion
    from akunu_py.completion.completer import CompleteOptions, Completer
    from akunu_py.decoding.load import load_engine

    curve = parse_curve(CURVES.get(options.curve, options.curve))
    engine = load_engine(options.model, options.weights)
    asked = CompleteOptions(fim=options.fim)
    places = completion.load_places()
    replayed = completion.replay_places(Completer(engine, asked), places, curve)
    chosen = _spread(places, options.live)
    live = completion.run_live(engine, asked, chosen, curve, progress)
    typed = completion.count_keystrokes(engine, asked, places[len(places) // 2])
    progress("")
    result = {
        "model": engine.name,
        "curve": options.curve,
        "replay": {"places": len(places), "projects": _replayed(replayed)},
        "live": {"places": len(chosen), **_live(live)},
        "keystrokes": asdict(typed),
    }
    if options.format == "json":
        print(json.dumps(result, indent=1))
    else:
        _print(result)
    return 0


def _spread(places: Sequence[Place], count: int) -> list[Place]:
    """`count` of the places, evenly apart."""
    count = max(0, min(count, len(places)))
    return [places[index * len(places) // count] for index in range(count)]


def _replayed(counts: Mapping[str, Mapping[str, ReplayCounts]]) -> dict[str, Any]:
    return {
        project: _rates({kind: total.as_dict() for kind, total in kinds.items()})
        for project, kinds in counts.items()
    }


def _rates(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The counts by evidence, and how many times the tokens per pass of the prompt alone."""
    alone = next(iter(kinds.values()))["tokens_per_pass"]
    return {
        kind: {name: counts[name] for name in _COUNTS if name in counts}
        | {"gain": round(counts["tokens_per_pass"] / alone, 4) if alone else 0.0}
        for kind, counts in kinds.items()
    }


def _live(done: Mapping[str, Sequence[Completion]]) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {}
    for kind, completions in done.items():
        tokens = sum(each.stats.decoded_tokens for each in completions)
        passes = sum(each.stats.target_passes for each in completions)
        kinds[kind] = {
            "tokens": tokens,
            "passes": passes,
            "drafted": sum(each.stats.drafted for each in completions),
            "accepted": sum(each.stats.accepted for each in completions),
            "tokens_per_pass": round(tokens / passes, 4) if passes else 0.0,
        }
    texts = [[each.text for each in completions] for completions in done.values()]
    return _rates(kinds) | {"identical": all(text == texts[0] for text in texts)}


def _print(result: dict[str, Any]) -> None:
    replay, live = result["replay"], result["live"]
    print(f"what really stands at {replay['places']} places, planned for {result['curve']}")
    for name, kinds in replay["projects"].items():
        _print_kinds(name, kinds)
    if live["places"]:
        same = "the same text each time" if live["identical"] else "NOT the same text"
        print(f"\nwhat {result['model']} completes at {live['places']} of them: {same}")
        kinds = {kind: counts for kind, counts in live.items() if isinstance(counts, dict)}
        _print_kinds("", kinds)
    keys = result["keystrokes"]
    print(
        f"\nopening a buffer: {keys['first']} tokens read; a letter that was not predicted: "
        f"{keys['typed']}; one that was: {keys['predicted']} passes; a request that was given up: "
        f"{keys['superseded']} passes more"
    )


def _print_kinds(name: str, kinds: Mapping[str, Any]) -> None:
    for words, counts in zip(_WORDS, kinds.values(), strict=True):
        print(
            f"  {name:<6} {words:<25} {counts['tokens']:>6} tokens {counts['passes']:>6} "
            f"passes {counts['tokens_per_pass']:>6.2f} a pass  x{counts['gain']:.2f}"
        )
        name = ""
