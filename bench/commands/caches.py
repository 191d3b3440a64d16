"""`akunu bench caches`."""

from __future__ import annotations

import argparse

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_format, lengths
from akunu_py.bench.commands.output import show

SUMMARY = "which prompt caches stay when memory is short, by recorded sessions"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="TRACES", help="recorded sessions of agents, gzipped or not"
    )
    parser.add_argument(
        "--budget",
        type=lengths,
        default=[12_000, 16_000, 24_000, 32_000, 48_000],
        metavar="N,...",
        help="tokens that memory holds (default: 12000,16000,24000,32000,48000)",
    )
    parser.add_argument("--agents", type=positive, default=4, metavar="N", help="at once")
    parser.add_argument("--repeats", type=positive, default=4, metavar="N", help="in other orders")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.caches import compare_policies, print_policies
    from akunu_py.bench.trace import load_trace

    found = compare_policies(
        load_trace(options.file), options.budget, options.agents, options.repeats
    )
    show(options, found, lambda: print_policies(found))
    return 0
