"""`akunu bench replay`: passes counted over recorded answers; `--record` makes the recording."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from akunu_py.arguments import positive
from akunu_py.bench.replay.curves import CURVES, parse_curve
from akunu_py.bench.replay.drafters import COMPARED, replay_trace
from akunu_py.bench.replay.trace import Trace, load_trace
from akunu_py.commands.bench_common import add_format, add_model
from akunu_py.errors import UsageError
from akunu_py.types import DEFAULT_DRAFT_TOKENS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="TRACES", help="a trace file, gzipped or not")
    parser.add_argument(
        "--curve",
        default="m5max",
        metavar="CURVE",
        help=f"{', '.join(CURVES)}, or points such as 1:1,3:1.11,5:1.42",
    )
    parser.add_argument("--draft", choices=("auto", "fixed", "off"), default="auto")
    parser.add_argument("--draft-tokens", type=positive, default=DEFAULT_DRAFT_TOKENS, metavar="N")
    parser.add_argument("--memory", action="store_true", help="learn from item to item")
    parser.add_argument("--compare", action="store_true", help="beside fixed 4 and prompt lookup")
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--record", metavar="OUT", help="answer prompts and write a trace file")
    parser.add_argument(
        "--prompts", metavar="FILE", help="for --record: a prompt a line, or JSON lines"
    )
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    add_model(parser)
    add_format(parser)


def replay(options: argparse.Namespace) -> int:
    if options.record:
        return _record(options)
    if not options.file:
        raise UsageError("expected a trace file: akunu bench replay TRACES (--record makes one)")
    curve = parse_curve(options.curve)
    trace = load_trace(options.file)
    names = _chosen(trace, options.workload)

    def run(drafter: str) -> dict[str, Any]:
        return replay_trace(
            trace,
            curve,
            drafter,
            workloads=names,
            draft_tokens=options.draft_tokens,
            memory=options.memory,
        )

    if options.compare:
        results = {drafter: run(drafter) for drafter in COMPARED}
        if options.format == "json":
            print(json.dumps({"curve": options.curve, "drafters": results}, indent=1))
        else:
            _print_comparison(options.curve, results)
        return 0
    workloads = run(options.draft)
    if options.format == "json":
        whole = {"curve": options.curve, "draft": options.draft, "workloads": workloads}
        print(json.dumps(whole, indent=1))
    else:
        _print_workloads(options.curve, options.draft, workloads)
    return 0


def _chosen(trace: Trace, wanted: Sequence[str] | None) -> list[str]:
    if unknown := sorted(set(wanted or ()) - set(trace.workloads)):
        there = ", ".join(trace.workloads)
        raise UsageError(f"no workload {', '.join(unknown)} in the trace; there are: {there}")
    return list(wanted or trace.workloads)


def _print_workloads(curve: str, draft: str, workloads: dict[str, Any]) -> None:
    print(f"curve {curve}, draft {draft}; score: tokens per cost, plain decoding is 1.00\n")
    print(f"{'workload':<10}{'items':>6}{'tokens':>8}{'passes':>8}{'tokens/pass':>13}"
          f"{'accepted':>10}{'score':>8}{'us/token':>10}")  # fmt: skip
    for name, row in workloads.items():
        accepted = row["accepted"] / row["drafted"] if row["drafted"] else 0.0
        print(f"{name:<10}{row['items']:>6}{row['tokens']:>8}{row['passes']:>8}"
              f"{row['tokens_per_pass']:>13.2f}{accepted:>10.0%}{row['score']:>8.2f}"
              f"{row['draft_us_per_token']:>10.1f}")  # fmt: skip


def _print_comparison(curve: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"curve {curve}: tokens per pass, and score (tokens per cost, plain decoding is 1.00)\n")
    print(f"{'workload':<10}" + "".join(f"{peer:>20}" for peer in results))
    for name in next(iter(results.values())):
        cells = [results[peer][name] for peer in results]
        line = "".join(f"{cell['tokens_per_pass']:>12.2f}{cell['score']:>8.2f}" for cell in cells)
        print(f"{name:<10}{line}")


def _record(options: argparse.Namespace) -> int:
    from akunu_py.bench.replay.record import read_prompts, record
    from akunu_py.bench.workloads import load_workloads
    from akunu_py.decoding.load import load_engine

    prompts = read_prompts(Path(options.prompts)) if options.prompts else load_workloads()
    engine = load_engine(options.model, options.weights)

    def progress(line: str) -> None:
        print(line, file=sys.stderr)

    count = record(engine, prompts, Path(options.record), options.max_tokens, progress)
    print(f"{options.record}: {count} tokens in answers to {len(prompts)} prompts")
    return 0
