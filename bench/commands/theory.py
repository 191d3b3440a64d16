"""`akunu bench theory`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_format, add_model, lengths, temperature
from akunu_py.bench.commands.output import exit_code, progress, show
from akunu_py.bench.workloads import load_workloads
from akunu_py.errors import UsageError
from akunu_py.types import LoadOptions

if TYPE_CHECKING:
    from akunu_py.bench.result import Result


SUMMARY = "what Leviathan et al. predict for this machine, beside what it does"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="results of akunu bench; none: measure now",
    )
    parser.add_argument("--draft-tokens", type=lengths, default=[2, 4, 8], metavar="N,...")
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--temperature", type=temperature, action="append", metavar="T")
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="keep what was measured there"
    )
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench import theory
    from akunu_py.bench.report.printing import print_theory
    from akunu_py.bench.result import load_results, merged

    results = (
        merged([each for file in options.files for each in load_results(file)])
        if options.files
        else [_measure_fixed(options)]
    )
    interrupted = not options.files and not results[0].complete
    results = [result for result in results if theory.predict(result)]
    if not results and not interrupted:
        raise UsageError(
            "no run with fixed drafts to compare the theory with; make one with: akunu bench theory"
        )
    found = [theory.as_dict(result) for result in results]

    def print_all() -> None:
        for result, each in zip(results, found, strict=True):
            print_theory(result, each)

    show(options, found[0] if len(found) == 1 else found, print_all)
    return exit_code(interrupted)


def _measure_fixed(options: argparse.Namespace) -> Result:
    """Drafts of the lengths that were asked for."""
    from akunu_py.bench.speed import Plan, Setup, run_speed
    from akunu_py.decoding.load import load_engine

    if 0 in options.draft_tokens:
        raise UsageError("--draft-tokens: expected drafts of 1 token or more")
    workloads = load_workloads(options.workload)
    plan = Plan(workloads, options.temperature or [0.0], options.max_tokens, options.repeats)
    engine = load_engine(options.model, LoadOptions(options.weights))
    setup = Setup(["fixed"], options.draft_tokens)
    result = run_speed(engine, setup, plan, options.command_line, progress)
    if options.output:
        result.save(options.output)
    return result
