"""`python -m tests.measure.early_exit`: agreement of a model's first layers with all layers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from akunu_py.bench.command import add_model, show
from akunu_py.bench.tables import to_text
from akunu_py.decoding.drafting import early_exit as first_layers
from akunu_py.decoding.load import load_engine
from akunu_py.parser import add_format
from akunu_py.types import LoadOptions
from tests.measure.tool import run_tool

SUMMARY = "Measure how often a model's first layers agree with all layers"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    engine = load_engine(options.model, LoadOptions(options.weights))
    chosen = first_layers.choose_exit(engine)
    exits = first_layers.measure_exits(engine, range(1, len(engine.model.layers)))
    found = {"chosen": chosen.layers, "exits": [each.as_dict() for each in exits]}
    show(options, found, lambda: print_exits(found))
    return 0


def print_exits(found: dict[str, Any]) -> None:
    """Print the agreement by number of layers. found: as in JSON."""
    headings = ["layers", "agreement", "of a step", "reused", "speed at best"]
    cells = [
        [str(row["layers"]), f"{row['agreement']:.0%}", f"{row['share']:.2f}",
         f"{row['reused']:.2f}", f"{row['promise']:.2f}"]
        for row in found["exits"]
    ]  # fmt: skip
    print(to_text((headings, cells)), end="")
    print(f"\nchosen among eighths of the layers: {found['chosen']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("early_exit", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
