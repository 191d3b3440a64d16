"""`akunu bench complete`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_curve, add_format, add_model
from akunu_py.bench.commands.output import progress, show
from akunu_py.bench.curve import parse_curve
from akunu_py.errors import UsageError
from akunu_py.types import LoadOptions

if TYPE_CHECKING:
    from akunu_py.decoding.model.engine import Engine


SUMMARY = "completing code: what drafting from the buffer is worth, what a keystroke costs"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_curve(parser)
    parser.add_argument(
        "--live",
        type=int,
        default=6,
        metavar="N",
        help="places that the model itself completes too (default: %(default)s)",
    )
    parser.add_argument("--fim", default="auto", metavar="NAME")
    parser.add_argument(
        "--oracle",
        type=Path,
        metavar="DIR",
        help="instead: what the rules keep of the true text at places in the source files there",
    )
    parser.add_argument(
        "--definitions",
        type=Path,
        metavar="DIR",
        help="instead: how often the model reads the definition of what is called there",
    )
    parser.add_argument(
        "--places",
        type=positive,
        default=10,
        metavar="N",
        help="of each file (default: %(default)s)",
    )
    parser.add_argument("--faults", action="store_true", help="print every place that is not right")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.completion import measure_completion
    from akunu_py.bench.report.printing import print_completion
    from akunu_py.completion.types import CompleteOptions
    from akunu_py.decoding.load import load_engine

    if options.oracle:
        return _score_rules(options)
    curve = parse_curve(options.curve)
    engine = load_engine(options.model, LoadOptions(options.weights))
    if options.definitions:
        return _find_definitions(options, engine)
    complete_options = CompleteOptions(fim=options.fim)
    measured = measure_completion(engine, complete_options, curve, options.live, progress)
    progress("")
    found = {"model": engine.name, "curve": options.curve} | measured
    show(options, found, lambda: print_completion(found))
    return 0


def _score_rules(options: argparse.Namespace) -> int:
    """The exit code is 1 where the goals are missed."""
    from akunu_py.bench.oracle import score
    from akunu_py.bench.report.printing import print_fault, print_oracle

    on_fault = print_fault if options.faults else score.ignore_fault
    scores = score.score_directory(options.oracle, options.places, progress, on_fault)
    progress("")
    if not scores:
        raise UsageError(f"no source files in {options.oracle}; there may be *.py, *.js, *.go, ...")
    found = score.as_dict(scores)
    show(options, found, lambda: print_oracle(found))
    return 0 if found["reached"] else 1


def _find_definitions(options: argparse.Namespace, engine: Engine) -> int:
    from akunu_py.bench.oracle.definitions import BUDGETS, measure_definitions
    from akunu_py.bench.report.printing import print_definitions
    from akunu_py.completion.tokens import CodeTokens

    code = CodeTokens(engine.tokens.tokenizer, engine.tokens.vocabulary)
    found = measure_definitions(options.definitions, lambda text: len(code.encode(text)), progress)
    progress("")
    if not found:
        raise UsageError(f"no calls of other files' functions in {options.definitions}")
    as_json = {"budgets": BUDGETS, "languages": found}
    show(options, as_json, lambda: print_definitions(BUDGETS, found))
    return 0
