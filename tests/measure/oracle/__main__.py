"""`python -m tests.measure.oracle DIR`: score the rules of completion on real source files.

No model runs, except with --definitions, which needs a tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from akunu_py.bench.command import FAILED, add_model, progress, show
from akunu_py.completion.prompt.layout import CodeTokens
from akunu_py.decoding.load import load_engine
from akunu_py.errors import UsageError
from akunu_py.parser import add_format, positive
from akunu_py.types import LoadOptions
from tests.measure.oracle.definitions import BUDGETS, measure_definitions
from tests.measure.oracle.imports import measure_imports
from tests.measure.oracle.places import Place
from tests.measure.oracle.score import as_dict, ignore_fault, score_directory
from tests.measure.tool import run_tool

SUMMARY = "Score the rules of completion on real source files"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="Directory of source files")
    parser.add_argument(
        "--definitions",
        action="store_true",
        help="Measure instead how often the prompt contains the definition of a called function",
    )
    parser.add_argument(
        "--imports",
        action="store_true",
        help="Measure instead how often the next lines use a name that only imported files have",
    )
    parser.add_argument(
        "--places",
        type=positive,
        default=10,
        metavar="N",
        help="Number of places in each file (default: %(default)s)",
    )
    parser.add_argument("--faults", action="store_true", help="Print every wrong place")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    if options.imports:
        return _find_imports(options)
    return _find_definitions(options) if options.definitions else _score_rules(options)


def _score_rules(options: argparse.Namespace) -> int:
    """Return exit code 1 if the goals are missed."""
    on_fault = print_fault if options.faults else ignore_fault
    scores = score_directory(options.directory, options.places, progress, on_fault)
    progress("")
    if not scores:
        raise UsageError(
            f"no source files in {options.directory}; there may be *.py, *.js, *.go, ..."
        )
    found = as_dict(scores)
    show(options, found, lambda: print_oracle(found))
    return 0 if found["reached"] else FAILED


def _find_definitions(options: argparse.Namespace) -> int:
    engine = load_engine(options.model, LoadOptions(options.weights))
    code = CodeTokens(engine.tokens.tokenizer, engine.tokens.vocabulary)
    found = measure_definitions(options.directory, lambda text: len(code.encode(text)), progress)
    progress("")
    if not found:
        raise UsageError(f"no calls of other files' functions in {options.directory}")
    as_json = {"budgets": BUDGETS, "languages": found}
    show(options, as_json, lambda: print_definitions(BUDGETS, found))
    return 0


def _find_imports(options: argparse.Namespace) -> int:
    found = measure_imports(options.directory, options.places, progress)
    progress("")
    if not found:
        raise UsageError(f"no source files in {options.directory}")
    show(options, found, lambda: print_imports(found))
    return 0


def print_imports(found: Mapping[str, Mapping[str, int]]) -> None:
    """Print the shares of places."""
    print("places with imported files, and whose next lines use a name that only those have")
    for name, counts in sorted(found.items()):
        imported, new = (counts[key] / counts["places"] for key in ("imported", "new names"))
        print(f"  {name:<11} {counts['places']:>6} places {imported:>8.2%} {new:>8.2%}")


def print_oracle(found: dict[str, Any]) -> None:
    """Print the scores. found: as in JSON."""
    print("kept text: safe (brackets balanced, nothing lost or repeated), and whole")
    for name, score in [*found["languages"].items(), ("all", found["all"])]:
        print(
            f"  {name:<11} {score['places']:>6} places {score['safe']:>8.2%} safe "
            f"{score['blocks']:>6} blocks {score['complete']:>8.2%} whole"
        )


def print_definitions(
    budgets: Sequence[int], found: Mapping[str, Mapping[str, Sequence[float]]]
) -> None:
    """Print the shares. found: as in JSON."""
    print(f"calls with the definition in the prompt, at {', '.join(map(str, budgets))} tokens")
    for name, shares in sorted(found.items()):
        cells = [
            f"{method} " + " ".join(f"{share:7.1%}" for share in each)
            for method, each in shares.items()
            if method != "calls"
        ]
        print(f"  {name:<11} {int(shares['calls'][0]):>5} calls  {'   '.join(cells)}")


def print_fault(place: Place, mode: str, verdict: str, kept: str) -> None:
    """Print a place with a wrong verdict, the removed text and the kept text."""
    print(f"\n{place.describe()}, the output {mode}: {verdict}")
    print(f"  removed   {place.removed!r}\n  kept      {kept!r}\n  suffix    {place.suffix[:80]!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("oracle", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
