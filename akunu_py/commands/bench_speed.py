"""`akunu bench [speed]`: tokens per second, side by side on the same weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from akunu_py.arguments import positive
from akunu_py.bench.workloads import NAMES, load_workloads
from akunu_py.commands.bench_common import add_model, add_output, progress, write
from akunu_py.errors import INTERRUPTED, UsageError
from akunu_py.types import DEFAULT_DRAFT_TOKENS

CURVE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_MODES = ("off", "fixed", "auto", "memory")


def add_options(parser: argparse.ArgumentParser) -> None:
    tests = parser.add_argument_group("tests of given lengths, as in llama-bench (0: none)")
    tests.add_argument("-p", "--n-prompt", type=lengths, default=[], metavar="N,...")
    tests.add_argument("-n", "--n-gen", type=lengths, default=[], metavar="N,...")
    tests.add_argument("-d", "--n-depth", type=lengths, default=[0], metavar="N,...")
    texts = parser.add_argument_group("workloads: what drafting is worth depends on the text")
    texts.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help=f"{', '.join(NAMES)}, or none; may be repeated (default: all, or none with -p or -n)",
    )
    texts.add_argument(
        "--draft",
        action="append",
        choices=_MODES,
        metavar="MODE",
        help="off, fixed, auto, or memory: auto with a memory of the answers to the other "
        "workloads; may be repeated (default: off, fixed, auto)",
    )
    texts.add_argument("--draft-tokens", type=positive, default=DEFAULT_DRAFT_TOKENS, metavar="N")
    texts.add_argument("--memory-from", metavar="TRACES", help="what else the memory has heard")
    texts.add_argument(
        "--temperature", type=temperature, action="append", metavar="T", help="may be repeated"
    )
    texts.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="of an answer")
    others = parser.add_argument_group("others, each beside its own plain loop")
    others.add_argument("--draft-model", metavar="NAME_OR_PATH", help="mlx-lm drafts with it")
    others.add_argument("--llama-cpp", metavar="GGUF", help="needs llama-cpp-python")
    others.add_argument("--transformers", metavar="FOLDER", help="needs torch")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    add_model(parser)
    add_output(parser)


def speed(options: argparse.Namespace) -> int:
    """Prints what was measured, also where it was interrupted."""
    from akunu_py.bench.run import Request, run_speed
    from akunu_py.bench.runners.setup import Asked
    from akunu_py.bench.speed import Plan
    from akunu_py.decoding.load import load_engine

    by_length = any(options.n_prompt) or any(options.n_gen)
    wanted = options.workload or (["none"] if by_length else None)
    workloads = [] if wanted == ["none"] else load_workloads(wanted)
    if not workloads and not by_length:
        raise UsageError("nothing to measure: name a workload, or lengths with -p and -n")
    engine = load_engine(options.model, options.weights)
    small = load_engine(options.draft_model, options.weights) if options.draft_model else None
    request = Request(
        Plan(workloads, options.temperature or [0.0], options.max_tokens, options.repeats),
        Asked(
            options.draft or ["off", "fixed", "auto"],
            [options.draft_tokens],
            small,
            _path(options.llama_cpp),
            _path(options.transformers),
        ),
        prompts=options.n_prompt,
        generates=options.n_gen,
        depths=options.n_depth,
        curve_rows=CURVE_ROWS,
        memory_from=_path(options.memory_from),
    )
    result = run_speed(engine, request, options.command_line, progress)
    write(options, result)
    if not result.complete:
        print("interrupted: this is what was measured so far", file=sys.stderr)
        return INTERRUPTED
    return 0


def lengths(text: str) -> list[int]:
    """Numbers of tokens, such as 512 or 0,1024."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers such as 512 or 0,1024, got {text!r}")
    return values


def temperature(text: str) -> float:
    """0 is greedy."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a temperature from 0 to 100, got {text!r}")
    return value


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
