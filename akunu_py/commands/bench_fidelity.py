"""`akunu bench fidelity`: whether drafting changes answers, precision by precision."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from akunu_py.commands.bench_common import add_format, progress
from akunu_py.commands.parser import positive
from akunu_py.errors import INTERRUPTED
from akunu_py.types import DEFAULT_MODEL, WEIGHT_MODES

if TYPE_CHECKING:
    from akunu_py.bench.fidelity import Fidelity

_NOTE = """\
Greedy answers with drafts beside the same without. Where one differs it is at a near-tie: a pass
over several rows rounds otherwise than a pass over one. Margin: by how much the likeliest token's
logit exceeds the second's where an answer first differs, the largest and the median of them.
"""
_SHOWN = 5  # first differences printed for each precision and mode; --format json has all


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--weights",
        action="append",
        choices=[mode for mode in WEIGHT_MODES if mode != "auto"],
        help="the precision; may be repeated (default: all)",
    )
    parser.add_argument("--answers", type=positive, default=100, metavar="N", help="300 at most")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N")
    add_format(parser)


def fidelity(options: argparse.Namespace) -> int:
    from akunu_py.bench import machine
    from akunu_py.bench.fidelity import compare, load_prompts
    from akunu_py.commands.load import load_engine

    modes = options.weights or [mode for mode in WEIGHT_MODES if mode != "auto"]
    prompts = load_prompts(options.answers)
    found: list[Fidelity] = []
    interrupted = False
    try:
        for weights in modes:
            engine = load_engine(options.model, weights)
            for sofar in compare(engine, prompts, options.max_tokens, progress):
                found = [*(each for each in found if each not in sofar), *sofar]
    except KeyboardInterrupt:
        interrupted = True
    progress("")
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


def _as_dict(each: Fidelity) -> dict[str, Any]:
    differences = [
        {"prompt": prompt} | asdict(difference) for prompt, difference in each.differences
    ]
    return asdict(each) | {"differences": differences}


def _print(found: list[Fidelity]) -> None:
    from akunu_py.bench.rows import to_text
    from akunu_py.bench.samples import median

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
