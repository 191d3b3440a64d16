"""`akunu bench`; imports only the requested action's module."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from akunu_py.bench import command
from akunu_py.parser import Parser

ACTIONS = {  # name of the action: summary
    "speed": "Measure tokens per second on your machine, compared with mlx-lm's own loop",
    "replay": "Count the passes over recorded answers; needs no model and has no noise",
    "curve": "Measure the cost of passes over 1 to 32 tokens, and print the planned draft lengths",
    "compare": "Compare two results; exit code 1 if the second is slower",
    "report": "Print tables from result files, or write them as Markdown",
}


def with_action(words: list[str]) -> list[str]:
    """Return the words after `akunu bench`, with the default action if they name none."""
    first = next((word for word in words if word != "--debug"), "")
    return words if first in (*ACTIONS, "-h", "--help") else ["speed", *words]


def run(options: argparse.Namespace) -> int:
    """Run an action and return its exit code."""
    code: int = _module(options.action).run(options)
    return code


def add_actions(parser: argparse.ArgumentParser, wanted: Iterable[str]) -> None:
    """Add all actions; only the `wanted` ones are imported and have their options."""
    parser.epilog = "Without an action: speed."
    actions = parser.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=f"{summary}.")
        if name in wanted and name == "speed":
            command.add_speed_options(action)
        elif name in wanted:
            _module(name).add_options(action)


def _module(action: str) -> ModuleType:
    return import_module(f"akunu_py.bench.{'tables' if action == 'report' else action}")
