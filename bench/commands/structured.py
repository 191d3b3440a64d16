"""`akunu bench structured`."""

from __future__ import annotations

import argparse
from pathlib import Path

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_curve, add_format, add_model
from akunu_py.bench.commands.output import progress, show
from akunu_py.bench.curve import parse_curve
from akunu_py.types import LoadOptions

SUMMARY = "tokens a pass of answers in JSON: drafted from the grammar, from n-grams, from both"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="SCHEMAS",
        help="JSON schemas with valid instances, as JSONSchemaBench has them, gzipped or not: "
        "these are the answers then",
    )
    add_curve(parser)
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="of an answer")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench import structured
    from akunu_py.bench.report.printing import print_structured
    from akunu_py.decoding.load import load_engine

    curve = parse_curve(options.curve)
    cases = structured.load_instances(options.file) if options.file else structured.load_cases()
    measure = structured.replay_instances if options.file else structured.measure_structured
    engine = load_engine(options.model, LoadOptions(options.weights))
    sources = measure(engine, cases, curve, options.max_tokens, progress)
    progress("")
    found = {"model": engine.name, "curve": options.curve, "sources": sources}
    show(options, found, lambda: print_structured(found))
    return 0
