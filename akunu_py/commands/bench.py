"""`akunu bench` = `python -m akunu_py.bench`: prints what `akunu_py.bench` measures."""

from __future__ import annotations

import argparse
import json
import sys

from akunu_py import backend
from akunu_py.bench.curve import CONTEXT, measure_curve
from akunu_py.bench.speed import BASELINE, Series, measure
from akunu_py.bench.workloads import load_workloads
from akunu_py.cli import Parser, positive
from akunu_py.commands.load import load_engine
from akunu_py.errors import UsageError
from akunu_py.types import DEFAULT_MODEL

_CURVE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


def run(args: argparse.Namespace) -> int:
    options = _parser().parse_args(args.rest)
    workloads = load_workloads()
    if options.workload:
        known = [workload.name for workload in workloads]
        if unknown := sorted(set(options.workload) - set(known)):
            raise UsageError(f"no workload {', '.join(unknown)}; there are: {', '.join(known)}")
        workloads = [workload for workload in workloads if workload.name in options.workload]
    engine = load_engine(options.model, options.weights)
    curve = measure_curve(engine, _CURVE_ROWS, max(3, options.repeats))
    rows: list[Series] = []
    try:
        for group in measure(
            engine,
            workloads,
            ("off", "fixed"),
            max_tokens=options.max_tokens,
            repeats=options.repeats,
            progress=_progress,
        ):
            rows += group
    except KeyboardInterrupt:
        _progress("")
        print("interrupted: what was measured so far follows", file=sys.stderr)
    _progress("")
    if options.format == "json":
        print(json.dumps(_as_dict(engine.name, engine.weights, curve, rows), indent=1))
    else:
        _print_tables(engine.name, engine.weights, curve, rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="akunu bench", allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument("--weights", choices=backend.WEIGHT_MODES, default="auto")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _as_dict(
    model: str, weights: str, curve: dict[int, float], rows: list[Series]
) -> dict[str, object]:
    return {
        "model": model,
        "weights": weights,
        "device": backend.device_name(),
        "blas": backend.blas_name(),
        "curve_s": {str(count): round(seconds, 6) for count, seconds in curve.items()},
        "runs": [
            {
                "workload": row.workload,
                "contestant": row.contestant,
                "prompt_tokens": row.prompt_tokens,
                "generated_tokens": len(row.tokens),
                "tokens_per_s": round(row.tokens_per_s, 2),
                "tokens_per_pass": round(row.tokens_per_pass, 3),
                "acceptance_rate": round(row.acceptance_rate, 3),
                "prefill_s": row.prefill_s,
                "decode_s": row.decode_s,
                "identical": row.identical,
            }
            for row in rows
        ],
    }


def _print_tables(model: str, weights: str, curve: dict[int, float], rows: list[Series]) -> None:
    print(f"{model} ({weights}) on {backend.device_name()}, BLAS {backend.blas_name()}\n")
    print(f"one pass over N positions, {CONTEXT} in the cache:")
    print("  N       " + "".join(f"{count:>7}" for count in curve))
    print("  ms      " + "".join(f"{seconds * 1e3:>7.1f}" for seconds in curve.values()))
    print("  passes  " + "".join(f"{seconds / curve[1]:>7.2f}" for seconds in curve.values()))
    print(
        f"\n{'workload':<10}{'':<8}{'tokens':>7}{'tokens/s':>10}{'x mlx-lm':>10}"
        f"{'tokens/pass':>13}{'accepted':>10}  identical"
    )
    baseline = 0.0
    for row in rows:
        if row.contestant == BASELINE:
            baseline = row.tokens_per_s
        ratio = row.tokens_per_s / baseline if baseline else 0.0
        print(
            f"{row.workload:<10}{row.contestant:<8}{len(row.tokens):>7}{row.tokens_per_s:>10.1f}"
            f"{ratio:>10.2f}{row.tokens_per_pass:>13.2f}{row.acceptance_rate:>10.0%}"
            f"  {'yes' if row.identical else 'NO'}"
        )
