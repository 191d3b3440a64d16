"""`akunu bench compare A.json B.json`: is B slower? Exit code 1 where it is, 0 where not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from akunu_py.commands.bench_common import add_format
from akunu_py.errors import UsageError

SLOWER = 1  # the exit code


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


def compare(options: argparse.Namespace) -> int:
    from akunu_py.bench.compare import any_slower
    from akunu_py.bench.compare import compare as compare_results
    from akunu_py.bench.report.tables import to_text
    from akunu_py.bench.result import load_result

    comparisons = compare_results(
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
    if options.format == "json":
        rows = [asdict(comparison) for comparison in comparisons]
        print(json.dumps({"slower": slower, "comparisons": rows}, indent=1))
        return SLOWER if slower else 0
    unit = "x plain" if options.against_baseline else "t/s"
    cells = [
        [c.contestant, c.test, f"{c.before:.2f}", f"{c.after:.2f}", f"{c.ratio - 1:+.1%}",
         f"{c.p:.2g}", c.verdict]
        for c in comparisons
    ]  # fmt: skip
    print(to_text((["loop", "test", f"A, {unit}", f"B, {unit}", "change", "p", "verdict"], cells)))
    if any(c.plain and c.verdict in ("slower", "faster") for c in comparisons):
        print("A plain loop of others changed too, so the machine did: see --against-baseline.")
    print(f"B is slower than A: {'yes' if slower else 'no'}")
    return SLOWER if slower else 0


def percent(text: str) -> float:
    """A share, given in per cent."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"expected per cent above 0 and below 100, got {text!r}")
    return value / 100
