"""`akunu bench` = `python -m akunu_py.bench`; imports only the requested action's module."""

from __future__ import annotations

import argparse
import shlex
from importlib import import_module

from akunu_py.bench import command
from akunu_py.parser import Parser

_ACTIONS = {  # name of the action: summary
    "speed": "Measure tokens per second on your machine, compared with mlx-lm's own loop",
    "replay": "Count the passes over recorded answers, without a model and without noise",
    "curve": "Measure the cost of passes over 1 to 32 positions, and print the planned drafts",
    "compare": "Compare two results; exit code 1 if the second is slower",
    "report": "Print tables from result files, or write them as Markdown",
    "fidelity": "Compare answers with drafts to answers without, and rate the differences",
    "theory": "Compare the predictions of Leviathan et al. with measurements on this machine",
    "serve": "Compare the latencies of akunu serve and of mlx-lm's own server",
    "check": "Check what only this machine can show; exit code 1 if a line fails",
}
_MODULES = {"serve": "serving"}  # name of the action: its module, if different


def run(args: argparse.Namespace) -> int:
    """Run an action and return its exit code. args.rest: the words after `akunu bench`."""
    rest = args.rest
    if not rest or rest[0] not in (*_ACTIONS, "-h", "--help"):
        rest = ["speed", *rest]
    parser = Parser(
        prog="akunu bench", description="Measure the speed of decoding. Without an action: speed."
    )
    actions = parser.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    parsers = {
        name: actions.add_parser(name, help=summary, description=summary)
        for name, summary in _ACTIONS.items()
    }
    module = f"akunu_py.bench.{_MODULES.get(rest[0], rest[0])}"
    if rest[0] == "speed":
        command.add_speed_options(parsers["speed"])
    elif rest[0] in _ACTIONS:
        import_module(module).add_options(parsers[rest[0]])
    options = parser.parse_args(rest)
    options.command_line = shlex.join(["akunu", "bench", *args.rest])
    code: int = import_module(module).run(options)
    return code
