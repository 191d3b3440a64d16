"""`akunu bench theory`: tables 1 and 4 of Leviathan et al. (2023), compared with measurements.

They assume a constant acceptance rate a (section 3.1), drafts of g tokens, and that a pass over
g + 1 positions costs as much as a pass over one. A second prediction uses measured costs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from akunu_py.bench import command
from akunu_py.bench.curve import Curve, expected_tokens
from akunu_py.bench.result import Result, Series, load_merged
from akunu_py.bench.tables import Table, heading, to_text
from akunu_py.bench.workloads import load_workloads
from akunu_py.errors import UsageError
from akunu_py.parser import add_format
from akunu_py.types import LoadOptions

LONGEST = 32
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
"""(a, g) of the paper's table 1."""

Cost = Callable[[int], float]
"""Cost of a pass by its rows; one row costs 1."""
_TABLE_1_NOTE = """\
Leviathan et al. (2023), table 1: a is the acceptance rate, g the draft length; drafting costs
nothing. "speed, paper" assumes that every pass costs the same; "speed, here" uses the costs that
were measured on this machine.
"""
_TABLE_4_NOTE = """\
Table 4: drafts of a fixed length. a and c (the cost of drafting a token, in plain steps) are
measured. Tokens per pass and speedup are predicted and measured.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="Result files (default: measure now)"
    )
    what = "Draft lengths to measure (default: 2,4,8)"
    command.add_lengths(parser, "--draft-tokens", default=[2, 4, 8], what=what)
    command.add_workloads(parser)
    command.add_temperatures(parser)
    command.add_count(parser, "--max-tokens", 256, "Maximum tokens of an answer")
    command.add_repeats(parser, 3)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="Save the measurements as JSON"
    )
    command.add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    results = load_merged(options.files) if options.files else [_measure_fixed(options)]
    interrupted = not options.files and not results[0].complete
    results = [result for result in results if predict(result)]
    if not results and not interrupted:
        raise UsageError(
            "the result files have no run with drafts of a fixed length; "
            "measure one with: akunu bench theory -o FILE"
        )
    found = [as_dict(result) for result in results]

    def print_all() -> None:
        for result, each in zip(results, found, strict=True):
            print_theory(result, each)

    command.show(options, found[0] if len(found) == 1 else found, print_all)
    return command.exit_code(interrupted)


def _measure_fixed(options: argparse.Namespace) -> Result:
    """Measure drafts of the requested lengths."""
    from akunu_py.bench.speed import SpeedPlan, run_speed
    from akunu_py.decoding.load import load_engine

    if 0 in options.draft_tokens:
        raise UsageError("--draft-tokens: expected lengths of 1 or more, got 0")
    workloads = load_workloads(options.workload)
    plan = SpeedPlan(
        workloads,
        options.temperature or [0.0],
        options.max_tokens,
        options.repeats,
        modes=["fixed"],
        draft_tokens=options.draft_tokens,
    )
    engine = load_engine(options.model, LoadOptions(options.weights))
    result = run_speed(engine, plan, options.command_line)
    if options.output:
        result.save(options.output)
    return result


def improvement(chance: float, drafted: int, c: float, cost: Cost = lambda rows: 1.0) -> float:
    """Return the speedup over plain decoding: theorem 3.8 if `cost` is 1 for any number of rows.

    c: cost of drafting a token, in plain steps.
    """
    return expected_tokens(chance, drafted) / (cost(drafted + 1) + drafted * c)


def operations(chance: float, drafted: int) -> float:
    """Return the factor of arithmetic operations: theorem 3.11, where drafting costs none."""
    return (drafted + 1) / expected_tokens(chance, drafted)


def best_length(chance: float, c: float, cost: Cost) -> int:
    """Return the draft length up to LONGEST with the greatest improvement, 0 for none."""
    return max(range(LONGEST + 1), key=lambda drafted: improvement(chance, drafted, c, cost))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row of the paper's table 4."""

    workload: str
    temperature: float
    drafted: int  # g: draft length
    chance: float  # a: acceptance rate; a position without a draft counts as rejected
    c: float  # cost of drafting a token, in plain steps
    yielded: float  # tokens per pass, predicted
    measured: float  # tokens per pass
    by_paper: float  # speedup by theorem 3.8
    by_curve: float  # speedup with measured costs
    found: float | None  # measured speedup
    more_work: float  # computed positions per token
    best: int  # the fixed length with the greatest improvement


def predict(result: Result) -> list[Prediction]:
    """Return a prediction for each series of `fixed`, if `result` has a cost curve."""
    found = []
    for series in result.runs:
        match = re.fullmatch(r"fixed (\d+)", series.runner)
        if match and series.drafted and 1 in result.curve_s:
            found.append(_predict(result, series, int(match[1])))
    return found


def _predict(result: Result, series: Series, drafted: int) -> Prediction:
    """Return the prediction for a series with `drafted` draft tokens in every pass."""
    curve = relative_curve(result)
    passes, accepted = len(series.drafted), sum(series.accepted)
    failures = sum(count < drafted for count in series.accepted)
    chance = accepted / (accepted + failures) if accepted + failures else 0.0
    # Per pass, because a drafter that finds nothing takes time too.
    c = series.draft_s / passes / drafted / result.curve_s[1]
    rows = sum(curve(1 + count) for count in series.drafted) / passes
    yielded = expected_tokens(chance, drafted)
    return Prediction(
        series.workload,
        series.temperature,
        drafted,
        chance,
        c,
        yielded,
        series.tokens_per_pass,
        improvement(chance, drafted, c),
        yielded / (rows + drafted * c),
        result.speedup(series),
        (passes + sum(series.drafted)) / (passes + accepted),
        best_length(chance, c, curve),
    )


def relative_curve(result: Result) -> Curve:
    """Return the measured curve, scaled so that one row costs 1."""
    plain = result.curve_s[1]
    return Curve({rows: seconds / plain for rows, seconds in result.curve_s.items()})


def as_dict(result: Result) -> dict[str, Any]:
    """Return both tables, ready for JSON."""
    curve = relative_curve(result)
    return {
        "model": result.model,
        "machine": result.machine,
        "command": result.command,
        "table_1": [
            {
                "chance": chance,
                "drafted": drafted,
                "operations": operations(chance, drafted),
                "speed_by_paper": improvement(chance, drafted, 0.0),
                "speed_by_curve": improvement(chance, drafted, 0.0, curve),
                "best": best_length(chance, 0.0, curve),
            }
            for chance, drafted in TABLE_1
        ],
        "table_4": [asdict(row) for row in predict(result)],
    }


def theory_table(result: Result) -> Table:
    """Return predictions and measurements; see `Prediction`."""
    headings = ["workload", "temp", "g", "a", "c", "tokens/pass", "measured", "speed, paper",
                "speed, here", "measured", "positions/token", "best g"]  # fmt: skip
    cells = [
        [row.workload, f"{row.temperature:g}", str(row.drafted), f"{row.chance:.2f}",
         f"{row.c:.4f}", f"{row.yielded:.2f}", f"{row.measured:.2f}", f"{row.by_paper:.2f}",
         f"{row.by_curve:.2f}", "" if row.found is None else f"{row.found:.2f}",
         f"{row.more_work:.2f}", str(row.best)]
        for row in predict(result)
    ]  # fmt: skip
    return headings, cells


def print_theory(result: Result, found: dict[str, Any]) -> None:
    """Print tables 1 and 4 of the paper. found: the values that `--format json` prints."""
    print(heading(result), end="\n\n")
    print(_TABLE_1_NOTE)
    cells = [
        [f"{row['chance']:.1f}", str(row["drafted"]), f"{row['operations']:.2f}",
         f"{row['speed_by_paper']:.2f}", f"{row['speed_by_curve']:.2f}", str(row["best"])]
        for row in found["table_1"]
    ]  # fmt: skip
    headings = ["a", "g", "operations", "speed, paper", "speed, here", "best g here"]
    print(to_text((headings, cells)))
    print(_TABLE_4_NOTE)
    print(to_text(theory_table(result)), end="")
