"""`akunu bench speed`."""

from __future__ import annotations

import argparse
from pathlib import Path

from akunu_py.arguments import add_hosts, check_hosts, positive
from akunu_py.bench.commands.arguments import add_model, lengths, temperature
from akunu_py.bench.commands.output import exit_code, progress
from akunu_py.bench.workloads import NAMES, load_workloads
from akunu_py.errors import HostLost, UsageError
from akunu_py.types import DEFAULT_DRAFT_TOKENS, LoadOptions

SUMMARY = "tokens/s beside other loops, in one process on the same weights"


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
        choices=("off", "fixed", "auto", "ngram", "mtp", "exit", "memory"),
        metavar="MODE",
        help="off, fixed, auto, ngram, mtp, exit, or memory: auto with a memory of the answers to "
        "the other workloads; may be repeated (default: off, fixed, auto)",
    )
    texts.add_argument("--draft-tokens", type=positive, default=DEFAULT_DRAFT_TOKENS, metavar="N")
    texts.add_argument(
        "--memory-from", type=Path, metavar="TRACES", help="what else the memory has heard"
    )
    texts.add_argument(
        "--temperature", type=temperature, action="append", metavar="T", help="may be repeated"
    )
    texts.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="of an answer")
    others = parser.add_argument_group("others, each beside its own plain loop")
    others.add_argument("--draft-model", metavar="NAME_OR_PATH", help="for us and mlx-lm")
    others.add_argument("--llama-cpp", type=Path, metavar="GGUF", help="needs llama-cpp-python")
    others.add_argument("--transformers", type=Path, metavar="FOLDER", help="needs torch")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    add_model(parser)
    add_hosts(parser)
    parser.add_argument(
        "--format",
        choices=("text", "md", "csv", "json", "jsonl"),
        default="text",
        help="of what is printed",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also keep all figures there, as JSON"
    )


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.report.printing import print_speed
    from akunu_py.bench.speed import Plan, Setup, run_speed
    from akunu_py.decoding.load import load_engine

    by_length = any(options.n_prompt) or any(options.n_gen)
    wanted = options.workload or (["none"] if by_length else None)
    workloads = [] if wanted == ["none"] else load_workloads(wanted)
    if not workloads and not by_length:
        raise UsageError("nothing to measure: name a workload, or lengths with -p and -n")
    check_hosts(options.hosts, options.draft or (), draft_model=options.draft_model)
    engine = load_engine(options.model, LoadOptions(options.weights, hosts=options.hosts))
    small = (
        load_engine(options.draft_model, LoadOptions(options.weights))
        if options.draft_model
        else None
    )
    setup = Setup(
        options.draft or ["off", "fixed", "auto"],
        [options.draft_tokens],
        small,
        options.llama_cpp,
        options.transformers,
    )
    plan = Plan(
        workloads,
        options.temperature or [0.0],
        options.max_tokens,
        options.repeats,
        prompts=options.n_prompt,
        generates=options.n_gen,
        depths=options.n_depth,
        memory_from=options.memory_from,
    )
    result = run_speed(engine, setup, plan, options.command_line, progress)
    if options.output:
        result.save(options.output)
    print_speed(result, options.format)
    if result.lost:
        raise HostLost(result.lost)
    return exit_code(not result.complete)
