"""`akunu bench` = `python -m akunu_py.bench`: the options of every action."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from akunu_py.arguments import Parser, positive
from akunu_py.bench import actions
from akunu_py.bench.curve import CURVES
from akunu_py.bench.workloads import NAMES
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DEFAULT_MODEL, DRAFT_MODES, WEIGHT_MODES


def run(args: argparse.Namespace) -> int:
    """args.rest: the words after `akunu bench`. Returns the exit code."""
    rest = args.rest
    if not rest or rest[0] not in (*_ACTIONS, "-h", "--help"):
        rest = ["speed", *rest]
    options = _parser().parse_args(rest)
    options.command_line = shlex.join(["akunu", "bench", *args.rest])
    return _ACTIONS[options.action].run(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="akunu bench", description="Measure the speed of decoding. Without an action: speed."
    )
    subparsers = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    for name, action in _ACTIONS.items():
        added = subparsers.add_parser(name, help=action.summary, description=action.summary)
        action.add_options(added)
    return parser


def _add_speed(parser: argparse.ArgumentParser) -> None:
    tests = parser.add_argument_group("tests of given lengths, as in llama-bench (0: none)")
    tests.add_argument("-p", "--n-prompt", type=_lengths, default=[], metavar="N,...")
    tests.add_argument("-n", "--n-gen", type=_lengths, default=[], metavar="N,...")
    tests.add_argument("-d", "--n-depth", type=_lengths, default=[0], metavar="N,...")
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
        "--temperature", type=_temperature, action="append", metavar="T", help="may be repeated"
    )
    texts.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="of an answer")
    others = parser.add_argument_group("others, each beside its own plain loop")
    others.add_argument("--draft-model", metavar="NAME_OR_PATH", help="for us and mlx-lm")
    others.add_argument("--llama-cpp", type=Path, metavar="GGUF", help="needs llama-cpp-python")
    others.add_argument("--transformers", type=Path, metavar="FOLDER", help="needs torch")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    _add_model(parser)
    parser.add_argument(
        "--format",
        choices=("text", "md", "csv", "json", "jsonl"),
        default="text",
        help="of what is printed",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also keep all figures there, as JSON"
    )


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="TRACES", help="a trace file, gzipped or not")
    parser.add_argument(
        "--curve",
        default="m5max",
        metavar="CURVE",
        help=f"{', '.join(CURVES)}, points such as 1:1,3:1.11,5:1.42, or both: m5max,33:7",
    )
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
    parser.add_argument("--compare", action="store_true", help="beside fixed 4 and prompt lookup")
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--record", metavar="OUT", help="answer prompts and write a trace file")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="for --record: a prompt a line, or JSON lines"
    )
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    _add_model(parser)
    _add_format(parser)


def _add_curve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=7, metavar="N")
    parser.add_argument("--context", type=positive, metavar="TOKENS")
    _add_model(parser)
    _add_format(parser)


def _add_exit(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_format(parser)


def _add_theory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="results of akunu bench; none: measure now",
    )
    parser.add_argument("--draft-tokens", type=_lengths, default=[2, 4, 8], metavar="N,...")
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--temperature", type=_temperature, action="append", metavar="T")
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="keep what was measured there"
    )
    _add_model(parser)
    _add_format(parser)


def _add_fidelity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--weights",
        action="append",
        choices=list(dict.fromkeys((*actions.GPU_PRECISIONS, *actions.CPU_PRECISIONS))),
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
    _add_format(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    _add_model(parser)
    _add_format(parser)


def _add_complete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--curve",
        default="m5max",
        metavar="CURVE",
        help=f"costs to plan with: {', '.join(CURVES)}, or points such as 1:1,3:1.11,5:1.42",
    )
    parser.add_argument(
        "--live",
        type=int,
        default=6,
        metavar="N",
        help="places that the model itself completes too (default: %(default)s)",
    )
    parser.add_argument("--fim", default="auto", metavar="NAME")
    parser.add_argument(
        "--oracle",
        type=Path,
        metavar="DIR",
        help="instead: what the rules keep of the true text at places in the source files there",
    )
    parser.add_argument(
        "--definitions",
        type=Path,
        metavar="DIR",
        help="instead: how often the model reads the definition of what is called there",
    )
    parser.add_argument(
        "--places",
        type=positive,
        default=10,
        metavar="N",
        help="of each file (default: %(default)s)",
    )
    parser.add_argument("--faults", action="store_true", help="print every place that is not right")
    _add_model(parser)
    _add_format(parser)


def _add_structured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="SCHEMAS",
        help="JSON schemas with valid instances, as JSONSchemaBench has them, gzipped or not: "
        "these are the answers then",
    )
    parser.add_argument(
        "--curve",
        default="m5max",
        metavar="CURVE",
        help=f"costs to plan with: {', '.join(CURVES)}, or points such as 1:1,3:1.11,5:1.42",
    )
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="of an answer")
    _add_model(parser)
    _add_format(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=4, metavar="N")
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="N", help="an answer")
    parser.add_argument(
        "--keys", type=positive, default=24, metavar="N", help="typed while it decodes, a repeat"
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="also type in a chat that has a long answer, and in one of 300 turns, with a table of "
        "200 rows and a prompt of 250,000 characters",
    )
    parser.add_argument("--workload", default="chat", metavar="NAME", help="its last turn is asked")
    parser.add_argument("--draft", choices=DRAFT_MODES, default="auto")
    parser.add_argument("--force", action="store_true", help="load a model that will not fit")
    _add_model(parser)
    _add_format(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME_OR_PATH",
        help="beside the starter; may be repeated (default: the largest 4-bit model of the store "
        "up to 3.5 GB)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=_json_file,
        default="akunu-check.json",
        metavar="FILE.json",
        help="all figures; a page, FILE.html, is written beside it (default: %(default)s)",
    )
    _add_format(parser)


def _json_file(text: str) -> Path:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .json, got {text!r}")
    return Path(text)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="results of akunu bench"
    )
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="OUT",
        help="by its ending a page (.html), Markdown tables (.md) or plots in characters (.txt); "
        "may be repeated (default: plots and tables to stdout)",
    )
    parser.add_argument("--readme", type=Path, metavar="FILE", help="make the tables in FILE again")
    parser.add_argument("--check", action="store_true", help="only say whether --readme agrees")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")
    parser.add_argument(
        "--threshold", type=_percent, default=0.05, metavar="PERCENT", help="differences up to "
        "this are none (default: 5)",
    )  # fmt: skip
    parser.add_argument(
        "--alpha", type=_percent, default=0.01, metavar="PERCENT", help="how often noise alone may "
        "be called a difference (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--against-baseline",
        action="store_true",
        help="compare how many times as fast as the plain loop of the same round each is: for "
        "machines that are not equally fast every day",
    )
    _add_format(parser)


def _lengths(text: str) -> list[int]:
    """Numbers of tokens, such as 512 or 0,1024."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers such as 512 or 0,1024, got {text!r}")
    return values


def _temperature(text: str) -> float:
    """0 is greedy."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a temperature from 0 to 100, got {text!r}")
    return value


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected milliseconds above 0, got {text!r}")
    return value


def _percent(text: str) -> float:
    """A share, given in per cent."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"expected per cent above 0 and below 100, got {text!r}")
    return value / 100


def _add_caches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="TRACES", help="recorded sessions of agents, gzipped or not"
    )
    parser.add_argument(
        "--budget",
        type=_lengths,
        default=[12_000, 16_000, 24_000, 32_000, 48_000],
        metavar="N,...",
        help="tokens that memory holds (default: 12000,16000,24000,32000,48000)",
    )
    parser.add_argument("--agents", type=positive, default=4, metavar="N", help="at once")
    parser.add_argument("--repeats", type=positive, default=4, metavar="N", help="in other orders")
    _add_format(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
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
        "--clients", type=_lengths, default=[1, 2, 4], metavar="N,...", help="at once"
    )
    _add_format(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument("--weights", choices=WEIGHT_MODES, default="auto")


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text")


class _Action(NamedTuple):
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


_ACTIONS = {
    "serve": _Action(
        "what clients of akunu serve wait for, beside mlx-lm's own server",
        _add_serve,
        actions.serve,
    ),
    "speed": _Action(
        "tokens/s beside other loops, in one process on the same weights", _add_speed, actions.speed
    ),
    "replay": _Action(
        "count the passes over recorded answers, without a model: the noise-free measure",
        _add_replay,
        actions.replay,
    ),
    "curve": _Action(
        "what a pass over 1 to 32 positions costs here, and what the planner makes of it",
        _add_curve,
        actions.curve,
    ),
    "exit": _Action(
        "how often a model's first layers agree with all of them, and what that promises",
        _add_exit,
        actions.early_exit,
    ),
    "theory": _Action(
        "what Leviathan et al. predict for this machine, beside what it does",
        _add_theory,
        actions.theory,
    ),
    "fidelity": _Action(
        "whether drafting changes answers, and how near a tie it was where it does",
        _add_fidelity,
        actions.fidelity,
    ),
    "profile": _Action("where the time of a pass goes", _add_profile, actions.profile),
    "complete": _Action(
        "completing code: what drafting from the buffer is worth, what a keystroke costs",
        _add_complete,
        actions.complete,
    ),
    "structured": _Action(
        "tokens a pass of answers in JSON: drafted from the grammar, from n-grams, from both",
        _add_structured,
        actions.structured,
    ),
    "caches": _Action(
        "which prompt caches stay when memory is short, by recorded sessions",
        _add_caches,
        actions.caches,
    ),
    "chat": _Action(
        "how soon the chat answers a key, and what drawing takes from decoding",
        _add_chat,
        actions.chat,
    ),
    "check": _Action(
        "what only this machine can show, judged line by line; exit code 1 where a line fails",
        _add_check,
        actions.check,
    ),
    "report": _Action(
        "charts and tables from results, as a page, as Markdown or for a terminal",
        _add_report,
        actions.report,
    ),
    "compare": _Action(
        "whether the second of two results is slower; exit code 1 where it is",
        _add_compare,
        actions.compare,
    ),
}
