"""`akunu bench compare`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from akunu_py.bench.commands.arguments import add_format, percent
from akunu_py.bench.commands.output import FAILED, show
from akunu_py.errors import UsageError

SUMMARY = "whether the second of two results is slower; exit code 1 where it is"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")
    parser.add_argument(
        "--threshold", type=percent, default=0.05, metavar="PERCENT", help="differences up to "
        "this are none (default: 5)",
    )  # fmt: skip
    parser.add_argument(
        "--alpha", type=percent, default=0.01, metavar="PERCENT", help="how often noise alone may "
        "be called a difference (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--against-baseline",
        action="store_true",
        help="compare how many times as fast as the plain loop of the same round each is: for "
        "machines that are not equally fast every day",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.compare import any_slower, compare
    from akunu_py.bench.report.printing import print_comparisons
    from akunu_py.bench.result import load_result, to_file_keys

    comparisons = compare(
        [load_result(Path(options.before))],
        [load_result(Path(options.after))],
        threshold=options.threshold,
        alpha=options.alpha,
        against_baseline=options.against_baseline,
    )
    if not comparisons:
        raise UsageError(
            f"{options.before} and {options.after} have no test and loop in common; "
            "measure both with the same options of akunu bench"
        )
    slower = any_slower(comparisons)
    rows = [to_file_keys(asdict(comparison)) for comparison in comparisons]
    unit = "x plain" if options.against_baseline else "t/s"
    show(
        options,
        {"slower": slower, "comparisons": rows},
        lambda: print_comparisons(comparisons, unit, slower),
    )
    return FAILED if slower else 0
