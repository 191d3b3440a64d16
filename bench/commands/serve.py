"""`akunu bench serve`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_format, lengths
from akunu_py.bench.commands.output import progress, show
from akunu_py.types import DEFAULT_MODEL

SUMMARY = "what clients of akunu serve wait for, beside mlx-lm's own server"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--layers", type=positive, default=4, metavar="N", help="of the model that are kept"
    )
    parser.add_argument(
        "--words", type=positive, default=5000, metavar="N", help="of a long prompt"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="of an answer"
    )
    parser.add_argument(
        "--clients", type=lengths, default=[1, 2, 4], metavar="N,...", help="at once"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.serve import compare_servers, print_servers
    from akunu_py.models.store import store

    found = compare_servers(
        store.resolve(options.model).path,
        options.layers,
        options.words,
        options.max_tokens,
        options.clients,
        progress,
    )
    as_json = {name: asdict(each) for name, each in found.items()}
    show(options, as_json, lambda: print_servers(found))
    return 0
