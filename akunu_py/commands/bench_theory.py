"""`akunu bench theory`: what Leviathan et al. predict for this machine, beside what it does."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from akunu_py.arguments import positive
from akunu_py.bench.workloads import load_workloads
from akunu_py.commands.bench_common import add_format, add_model, progress
from akunu_py.commands.bench_speed import CURVE_ROWS, lengths, temperature
from akunu_py.errors import INTERRUPTED, UsageError

_TABLE_1 = """\
Leviathan et al. (2023), table 1: a is the chance that a drafted token is accepted, g how many are
drafted; drafting costs nothing. Speed as in the paper, where a pass over any number of positions
takes as long as one, and by the costs measured here.
"""
_TABLE_4 = """\
Table 4: drafts of a fixed length. a and c (what drafting a token costs, in plain steps) are
measured; then tokens a pass and times as fast, predicted and measured.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="results of akunu bench; none: measure now"
    )
    parser.add_argument("--draft-tokens", type=lengths, default=[2, 4, 8], metavar="N,...")
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--temperature", type=temperature, action="append", metavar="T")
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument("-o", "--output", metavar="FILE", help="keep what was measured there")
    add_model(parser)
    add_format(parser)


def theory(options: argparse.Namespace) -> int:
    from akunu_py.bench.result import load_result, merged
    from akunu_py.bench.theory import predict

    results = (
        merged([load_result(Path(file)) for file in options.files])
        if options.files
        else [_measure(options)]
    )
    interrupted = not options.files and not results[0].complete
    results = [result for result in results if predict(result)]
    if not results and not interrupted:
        raise UsageError(
            "no run with fixed drafts to compare the theory with; make one with: akunu bench theory"
        )
    if options.format == "json":
        whole = [_as_dict(result) for result in results]
        print(json.dumps(whole if len(whole) > 1 else whole[0], indent=1))
    else:
        for result in results:
            _print(result)
    if interrupted:
        print("interrupted: this is what was measured so far", file=sys.stderr)
        return INTERRUPTED
    return 0


def _measure(options: argparse.Namespace) -> Any:
    from akunu_py.bench.run import Request, run_speed
    from akunu_py.bench.runners.setup import Asked
    from akunu_py.bench.speed import Plan
    from akunu_py.decoding.load import load_engine

    if 0 in options.draft_tokens:
        raise UsageError("--draft-tokens: expected drafts of 1 token or more")
    workloads = load_workloads(options.workload)
    plan = Plan(workloads, options.temperature or [0.0], options.max_tokens, options.repeats)
    request = Request(plan, Asked(["fixed"], options.draft_tokens), curve_rows=CURVE_ROWS)
    engine = load_engine(options.model, options.weights)
    result = run_speed(engine, request, options.command_line, progress)
    if options.output:
        result.save(Path(options.output))
    return result


def _as_dict(result: Any) -> dict[str, Any]:
    from akunu_py.bench import theory

    curve = theory.relative_curve(result)
    return {
        "model": result.model,
        "machine": result.machine,
        "command": result.command,
        "table_1": [
            {
                "chance": chance,
                "drafted": drafted,
                "operations": theory.operations(chance, drafted),
                "speed_by_paper": theory.improvement(chance, drafted, 0.0),
                "speed_by_curve": theory.improvement(chance, drafted, 0.0, curve),
                "best": theory.best_length(chance, 0.0, curve),
            }
            for chance, drafted in theory.TABLE_1
        ],
        "table_4": [asdict(row) for row in theory.predict(result)],
    }


def _print(result: Any) -> None:
    from akunu_py.bench.report.pages import theory_table
    from akunu_py.bench.report.tables import heading, to_text

    whole = _as_dict(result)
    print(heading(result), end="\n\n")
    print(_TABLE_1)
    cells = [
        [f"{row['chance']:.1f}", str(row["drafted"]), f"{row['operations']:.2f}",
         f"{row['speed_by_paper']:.2f}", f"{row['speed_by_curve']:.2f}", str(row["best"])]
        for row in whole["table_1"]
    ]  # fmt: skip
    print(to_text((["a", "g", "operations", "speed, paper", "speed, here", "best g here"], cells)))
    print(_TABLE_4)
    print(to_text(theory_table(result)), end="")
