"""`akunu bench replay`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.arguments import positive
from akunu_py.bench.commands.arguments import add_curve, add_format, add_model
from akunu_py.bench.commands.output import print_line, show
from akunu_py.bench.curve import parse_curve
from akunu_py.bench.workloads import load_workloads
from akunu_py.errors import UsageError
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DRAFT_MODES, LoadOptions

if TYPE_CHECKING:
    from akunu_py.bench.curve import Curve
    from akunu_py.bench.networks import NetworkFigures
    from akunu_py.bench.trace import Trace


SUMMARY = "count the passes over recorded answers, without a model: the noise-free measure"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="TRACES", help="a trace file, gzipped or not")
    add_curve(parser)
    parser.add_argument(
        "--device",
        nargs="?",
        const="",
        metavar="GAP:...",
        help="through the decode loop on a simulated device, such as gap:0.15,noise:0.05,first:5",
    )
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument(
        "--network",
        action="append",
        metavar="NAME:COST:SHARE,...",
        help="drafts too: its draft mode, what a token costs (a plain step: 1), and the shares "
        "accepted by position, such as mtp:0.06:0.8,0.65,0.5; may be repeated",
    )
    parser.add_argument(
        "--even", action="store_true", help="ten times, in which no luck is left to networks"
    )
    parser.add_argument("--draft-tokens", type=positive, default=DEFAULT_DRAFT_TOKENS, metavar="N")
    parser.add_argument(
        "--latency",
        type=_milliseconds,
        default=0.0,
        metavar="MS",
        help="that each pass waits for the network, the model being divided among hosts",
    )
    parser.add_argument(
        "--step",
        type=_milliseconds,
        default=25.0,
        metavar="MS",
        help="that a plain step takes without the network (default: %(default)g)",
    )
    parser.add_argument("--memory", action="store_true", help="learn from item to item")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="beside fixed 4 and prompt lookup, or networks beside the n-grams and each alone",
    )
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--record", metavar="OUT", help="answer prompts and write a trace file")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="for --record: a prompt a line, or JSON lines"
    )
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from akunu_py.bench.networks import parse_network
    from akunu_py.bench.replay import COMPARED, replay_trace
    from akunu_py.bench.report.printing import print_replay, print_replays
    from akunu_py.bench.trace import load_trace

    if options.record:
        return _record(options)
    if not options.file:
        raise UsageError("expected a trace file: akunu bench replay TRACES (--record makes one)")
    curve = parse_curve(options.curve)
    if options.latency:
        curve = curve.behind(options.latency / options.step)
        options.curve += f" + {options.latency:g} ms for the network a step of {options.step:g} ms"
    trace = load_trace(options.file)
    if unknown := sorted(set(options.workload or ()) - set(trace.workloads)):
        there = ", ".join(trace.workloads)
        raise UsageError(f"no workload {', '.join(unknown)} in the trace; there are: {there}")
    networks = [parse_network(text) for text in options.network or ()]
    alone = dict.fromkeys(each.name for each in networks)
    compared = ("ngram", *alone, "auto") if networks else COMPARED
    if options.device is not None:
        return _replay_on_device(options, curve, trace, networks)
    found = {
        drafter: replay_trace(
            trace,
            curve,
            drafter,
            workloads=options.workload or (),
            draft_tokens=options.draft_tokens,
            memory=options.memory,
            networks=networks,
            even=options.even,
        )
        for drafter in (compared if options.compare else (options.draft,))
    }
    name, draft = options.curve, options.draft
    if options.compare:
        show(options, {"curve": name, "drafters": found}, lambda: print_replays(name, found))
    else:
        as_json = {"curve": name, "draft": draft, "workloads": found[draft]}
        show(options, as_json, lambda: print_replay(name, draft, found[draft]))
    return 0


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected milliseconds above 0, got {text!r}")
    return value


def _replay_on_device(
    options: argparse.Namespace, curve: Curve, trace: Trace, networks: Sequence[NetworkFigures]
) -> int:
    from akunu_py.bench import device
    from akunu_py.bench.report.printing import print_replay

    if options.compare:
        raise UsageError("--device and --compare do not go together; use --draft")
    found = device.replay_on_device(
        trace,
        curve,
        options.draft,
        device.parse_device(options.device),
        workloads=options.workload or (),
        draft_tokens=options.draft_tokens,
        memory=options.memory,
        figures=networks,
    )
    name = f"{options.curve} on a device ({options.device or 'ideal'})"
    as_json = {
        "curve": options.curve,
        "draft": options.draft,
        "device": options.device,
        "workloads": found,
    }
    show(options, as_json, lambda: print_replay(name, options.draft, found))
    return 0


def _record(options: argparse.Namespace) -> int:
    from akunu_py.bench.trace import read_prompts, record
    from akunu_py.decoding.load import load_engine

    prompts = read_prompts(options.prompts) if options.prompts else load_workloads()
    engine = load_engine(options.model, LoadOptions(options.weights))
    count = record(engine, prompts, Path(options.record), options.max_tokens, print_line)
    print(f"{options.record}: {count} tokens in answers to {len(prompts)} prompts")
    return 0
