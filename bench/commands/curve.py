"""`akunu bench curve`."""

from __future__ import annotations

import argparse

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_format, add_model
from akunu_py.bench.commands.output import show
from akunu_py.types import LoadOptions

SUMMARY = "what a pass over 1 to 32 positions costs here, and what the planner makes of it"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=7, metavar="N")
    parser.add_argument("--context", type=positive, metavar="TOKENS")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench import curve
    from akunu_py.bench.report.printing import print_curve
    from akunu_py.decoding.load import load_engine

    engine = load_engine(options.model, LoadOptions(options.weights))
    context = options.context or curve.CONTEXT
    costs = curve.measure_curve(engine, range(1, 33), options.repeats, context)
    found = curve.as_dict(engine, costs, context)
    show(options, found, lambda: print_curve(curve.describe_setup(engine), costs, found))
    return 0
