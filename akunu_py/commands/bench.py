"""`akunu bench` = `python -m akunu_py.bench`: prints what `akunu_py.bench` measures."""

from __future__ import annotations

import argparse
import json
import sys

from akunu_py import backend
from akunu_py.commands import bench_replay, bench_tables
from akunu_py.commands.load import load_engine, load_experience
from akunu_py.commands.parser import Parser, positive
from akunu_py.errors import UsageError
from akunu_py.types import DEFAULT_MODEL, DRAFT_MODES

_SPEED_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_ACTIONS = ("speed", "replay", "curve")


def run(args: argparse.Namespace) -> int:
    rest = args.rest
    if not rest or rest[0] not in (*_ACTIONS, "-h", "--help"):
        rest = ["speed", *rest]
    options = _parser().parse_args(rest)
    actions = {"speed": speed, "replay": bench_replay.replay, "curve": curve}
    return actions[options.action](options)


def speed(options: argparse.Namespace) -> int:
    from akunu_py.bench.curve import measure_curve
    from akunu_py.bench.speed import Series, measure
    from akunu_py.bench.workloads import load_workloads

    workloads = load_workloads()
    if options.workload:
        known = [workload.name for workload in workloads]
        if unknown := sorted(set(options.workload) - set(known)):
            raise UsageError(f"no workload {', '.join(unknown)}; there are: {', '.join(known)}")
        workloads = [workload for workload in workloads if workload.name in options.workload]
    engine = load_engine(options.model, options.weights)
    costs = measure_curve(engine, _SPEED_ROWS, max(5, options.repeats))
    rows: list[Series] = []
    modes = tuple(options.draft or ("off", "fixed", "auto"))
    groups = measure(
        engine,
        load_experience(engine, no_memory=True),
        workloads,
        modes,
        max_tokens=options.max_tokens,
        repeats=options.repeats,
        progress=_progress,
    )
    try:
        for group in groups:
            rows += group
    except KeyboardInterrupt:
        _progress("")
        print("interrupted: what was measured so far follows", file=sys.stderr)
    _progress("")
    if options.format == "json":
        print(json.dumps(bench_tables.speed_as_dict(engine, costs, rows), indent=1))
    else:
        bench_tables.print_speed(engine, costs, rows)
    return 0


def curve(options: argparse.Namespace) -> int:
    from akunu_py.bench.curve import measure_curve

    engine = load_engine(options.model, options.weights)
    costs = measure_curve(engine, range(1, 33), options.repeats, options.context)
    if options.format == "json":
        print(json.dumps(bench_tables.curve_as_dict(engine, costs, options.context), indent=1))
    else:
        bench_tables.print_curve(engine, costs, options.context)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="akunu bench", description="Measure the speed of decoding. Without an action: speed."
    )
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    summary = "tokens/s beside mlx-lm's own loop, in one process on the same weights"
    speed = actions.add_parser("speed", help=summary, description=summary)
    speed.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    speed.add_argument("--draft", action="append", choices=DRAFT_MODES, metavar="MODE")
    speed.add_argument("--max-tokens", type=positive, default=128, metavar="N")
    speed.add_argument("--repeats", type=positive, default=3, metavar="N")
    _add_model(speed)

    summary = "count the passes over recorded answers, without a model: the noise-free measure"
    replay = actions.add_parser("replay", help=summary, description=summary)
    bench_replay.add_options(replay)
    _add_model(replay)

    summary = "what a pass over 1 to 32 positions costs here, and what the planner makes of it"
    curve = actions.add_parser("curve", help=summary, description=summary)
    curve.add_argument("--repeats", type=positive, default=7, metavar="N")
    curve.add_argument("--context", type=positive, default=256, metavar="TOKENS")
    _add_model(curve)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument("--weights", choices=backend.WEIGHT_MODES, default="auto")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
