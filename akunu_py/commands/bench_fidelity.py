"""`akunu bench fidelity`: whether drafting changes answers, precision by precision."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py.arguments import positive
from akunu_py.commands.bench_common import add_format, progress
from akunu_py.errors import INTERRUPTED
from akunu_py.types import DEFAULT_MODEL

if TYPE_CHECKING:
    from akunu_py.bench.fidelity import Compared, Fidelity

_NOTE = """\
Greedy answers with drafts beside the same without. Where one differs it is at a near-tie: a pass
over several rows rounds otherwise than a pass over one. Margin: by how much the likeliest token's
logit exceeds the second's where an answer first differs, the largest and the median of them.
"""
_SHOWN = 5  # first differences printed for each precision and mode; --format json has all
# On a processor a token takes seconds in the formats that checkpoints have: see `bench.rounding`.
_ON_GPU = ("float32", "bfloat16", "keep")
_ON_CPU = ("float32", "bfloat16", "keep-float32", "bfloat16-blas", "keep-blas")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--weights",
        action="append",
        choices=[*_ON_GPU, *(name for name in _ON_CPU if name not in _ON_GPU)],
        help="the precision; may be repeated (default: all, on a processor all but keep). keep: as "
        "the model has them; keep-float32: so, but all that is not quantised in float32; -blas: "
        "products added up in float32, in an order that depends on the rows, then rounded, as GPUs "
        "do",
    )
    parser.add_argument("--answers", type=positive, default=100, metavar="N", help="300 at most")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N")
    parser.add_argument(
        "--keep",
        metavar="FILE",
        help="keep each comparison there as it is made, and do not make again what it has",
    )
    add_format(parser)


def fidelity(options: argparse.Namespace) -> int:
    from akunu_py.bench import machine
    from akunu_py.bench.fidelity import load_prompts, read_compared, summed
    from akunu_py.decoding.device import on_metal

    prompts = load_prompts(options.answers)
    compared = read_compared(Path(options.keep)) if options.keep else []
    interrupted = False
    try:
        for name in options.weights or (_ON_GPU if on_metal() else _ON_CPU):
            _compare(options, name, prompts, compared)
    except KeyboardInterrupt:
        interrupted = True
    progress("")
    found = summed(compared)
    if options.format == "json":
        about = {
            "command": options.command_line,
            "date": machine.today(),
            "machine": machine.describe_machine(),
        }
        print(json.dumps(about | {"fidelity": [_as_dict(each) for each in found]}, indent=1))
    else:
        _print(found)
    if interrupted:
        print("interrupted: this is what was compared so far", file=sys.stderr)
        return INTERRUPTED
    return 0


def _compare(
    options: argparse.Namespace, name: str, prompts: list[str], compared: list[Compared]
) -> None:
    """Adds to `compared` what the precision `name` says, and to the file where one is kept."""
    from akunu_py.bench.fidelity import PRECISIONS, append_compared, compare
    from akunu_py.decoding.load import load_engine

    weights, altered = PRECISIONS[name]
    engine = load_engine(options.model, weights)
    engine = altered(engine) if altered else engine
    for each in compare(engine, prompts, options.max_tokens, progress, tuple(compared)):
        compared.append(each)
        if options.keep:
            append_compared(Path(options.keep), each)


def _as_dict(each: Fidelity) -> dict[str, Any]:
    differences = [
        {"prompt": prompt} | asdict(difference) for prompt, difference in each.differences
    ]
    return asdict(each) | {"differences": differences}


def _print(found: list[Fidelity]) -> None:
    from akunu_py.bench.report.tables import to_text
    from akunu_py.bench.statistics import median

    print(_NOTE)
    headings = ["weights", "drafts", "answers", "tokens", "drafted", "drafting passes",
                "differing", "largest margin", "median"]  # fmt: skip
    cells = []
    for each in found:
        margins = [m for _, difference in each.differences if (m := difference.margin) is not None]
        cells.append(
            [each.weights, each.mode, str(each.answers), str(each.tokens), str(each.drafted),
             str(each.drafting_passes), str(len(each.differences)),
             f"{max(margins):.2g}" if margins else "-",
             f"{median(margins):.2g}" if margins else "-"]
        )  # fmt: skip
    print(to_text((headings, cells)), end="")
    for each in found:
        for prompt, difference in each.differences[:_SHOWN]:
            margin = "?" if difference.margin is None else f"{difference.margin:.2g}"
            print(f"{each.weights}, {each.mode}: token {difference.position} after {prompt!r}, "
                  f"margin {margin}")  # fmt: skip
