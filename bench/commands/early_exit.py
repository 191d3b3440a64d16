"""`akunu bench exit`."""

from __future__ import annotations

import argparse

from akunu_py.bench.commands.arguments import add_format, add_model
from akunu_py.bench.commands.output import show
from akunu_py.types import LoadOptions

SUMMARY = "how often a model's first layers agree with all of them, and what that promises"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.report.printing import print_exits
    from akunu_py.decoding.drafting import early_exit as first_layers
    from akunu_py.decoding.load import load_engine

    engine = load_engine(options.model, LoadOptions(options.weights))
    chosen = first_layers.choose(engine)
    exits = first_layers.measure(engine, range(1, len(engine.model.layers)))
    found = {"chosen": chosen.layers, "exits": [each.as_dict() for each in exits]}
    show(options, found, lambda: print_exits(found))
    return 0
