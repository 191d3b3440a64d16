"""`akunu bench` = `python -m akunu_py.bench`: prints what `akunu_py.bench` measures.

Owns the list of actions; each has a module of its own.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import NamedTuple

from akunu_py.arguments import Parser
from akunu_py.commands import (
    bench_chat,
    bench_compare,
    bench_complete,
    bench_curve,
    bench_fidelity,
    bench_profile,
    bench_replay,
    bench_report,
    bench_speed,
    bench_theory,
)


class _Action(NamedTuple):
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace], int]


_ACTIONS = {
    "speed": _Action(
        "tokens/s beside other loops, in one process on the same weights",
        bench_speed.add_options,
        bench_speed.speed,
    ),
    "replay": _Action(
        "count the passes over recorded answers, without a model: the noise-free measure",
        bench_replay.add_options,
        bench_replay.replay,
    ),
    "curve": _Action(
        "what a pass over 1 to 32 positions costs here, and what the planner makes of it",
        bench_curve.add_options,
        bench_curve.curve,
    ),
    "theory": _Action(
        "what Leviathan et al. predict for this machine, beside what it does",
        bench_theory.add_options,
        bench_theory.theory,
    ),
    "fidelity": _Action(
        "whether drafting changes answers, and how near a tie it was where it does",
        bench_fidelity.add_options,
        bench_fidelity.fidelity,
    ),
    "profile": _Action(
        "where the time of a pass goes",
        bench_profile.add_options,
        bench_profile.profile,
    ),
    "complete": _Action(
        "completing code: what drafting from the buffer is worth, what a keystroke costs",
        bench_complete.add_options,
        bench_complete.complete,
    ),
    "chat": _Action(
        "how soon the chat answers a key, and what drawing takes from decoding",
        bench_chat.add_options,
        bench_chat.chat,
    ),
    "report": _Action(
        "charts and tables from results, as a page, as Markdown or for a terminal",
        bench_report.add_options,
        bench_report.report,
    ),
    "compare": _Action(
        "whether the second of two results is slower; exit code 1 where it is",
        bench_compare.add_options,
        bench_compare.compare,
    ),
}


def run(args: argparse.Namespace) -> int:
    rest = args.rest
    if not rest or rest[0] not in (*_ACTIONS, "-h", "--help"):
        rest = ["speed", *rest]
    options = _parser().parse_args(rest)
    options.command_line = shlex.join(["akunu", "bench", *args.rest])
    return _ACTIONS[options.action].act(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="akunu bench", description="Measure the speed of decoding. Without an action: speed."
    )
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    for name, action in _ACTIONS.items():
        added = actions.add_parser(name, help=action.summary, description=action.summary)
        action.add_options(added)
    return parser
