"""`akunu bench` = `python -m akunu_py.bench`: a module for each action.

An action imports MLX in its functions, so that `--help` and actions without a model stay fast.
"""

from __future__ import annotations

import argparse
import shlex
from types import ModuleType

from akunu_py.arguments import Parser
from akunu_py.bench import check, compare, curve, fidelity, replay, report, serve, speed, theory


def run(args: argparse.Namespace) -> int:
    """args.rest: the words after `akunu bench`. Returns the exit code."""
    rest = args.rest
    if not rest or rest[0] not in (*_ACTIONS, "-h", "--help"):
        rest = ["speed", *rest]
    options = _parser().parse_args(rest)
    options.command_line = shlex.join(["akunu", "bench", *args.rest])
    return _ACTIONS[options.action].run(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="akunu bench", description="Measure the speed of decoding. Without an action: speed."
    )
    subparsers = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    for name, module in _ACTIONS.items():
        added = subparsers.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_options(added)
    return parser


_ACTIONS: dict[str, ModuleType] = {
    "speed": speed,
    "replay": replay,
    "curve": curve,
    "compare": compare,
    "report": report,
    "fidelity": fidelity,
    "theory": theory,
    "serve": serve,
    "check": check,
}
