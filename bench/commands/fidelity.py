"""`akunu bench fidelity`."""

from __future__ import annotations

import argparse
from pathlib import Path

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_format
from akunu_py.bench.commands.output import exit_code, progress, show, was_interrupted
from akunu_py.types import DEFAULT_MODEL

SUMMARY = "whether drafting changes answers, and how near a tie it was where it does"
# On a processor a token takes seconds in the formats that checkpoints have: see `bench.fidelity`.
GPU_PRECISIONS = ("float32", "bfloat16", "keep")
CPU_PRECISIONS = ("float32", "bfloat16", "keep-float32", "bfloat16-blas", "keep-blas")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--weights",
        action="append",
        choices=list(dict.fromkeys((*GPU_PRECISIONS, *CPU_PRECISIONS))),
        help="the precision; may be repeated (default: all, on a processor all but keep). keep: as "
        "the model has them; keep-float32: so, but all that is not quantized in float32; -blas: "
        "products added up in float32, in an order that depends on the rows, then rounded, as GPUs "
        "do",
    )
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="of the KV cache")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="above 0: sampled, with seeds"
    )
    parser.add_argument("--answers", type=positive, default=100, metavar="N", help="300 at most")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="keep each comparison there as it is made, and do not make again what it has",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench import fidelity
    from akunu_py.bench.report.printing import print_fidelity
    from akunu_py.bench.result import describe_machine, today
    from akunu_py.decoding.device import on_metal

    prompts = fidelity.load_prompts(options.answers)
    comparisons = fidelity.load_comparisons(options.keep) if options.keep else []
    precisions = options.weights or (GPU_PRECISIONS if on_metal() else CPU_PRECISIONS)

    def measure() -> None:
        fidelity.compare_precisions(
            options.model,
            precisions,
            prompts,
            options.max_tokens,
            comparisons,
            options.keep,
            progress,
            options.kv_bits,
            options.temperature,
        )

    interrupted = was_interrupted(measure)
    summaries = fidelity.summarize(comparisons)
    as_json = {
        "command": options.command_line,
        "date": today(),
        "machine": describe_machine(),
        "fidelity": [each.as_dict() for each in summaries],
    }
    show(options, as_json, lambda: print_fidelity(summaries))
    return exit_code(interrupted, "compared")
