"""`akunu bench`, and what its actions share. Imports only the requested action."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from akunu_py.arguments import add_hosts, parse_temperature
from akunu_py.bench.workloads import NAMES
from akunu_py.parser import Parser, add_flags, add_format, add_values, positive
from akunu_py.text import on_one_line
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DEFAULT_MODEL, WEIGHT_MODES

FAILED = 1  # the exit code of a comparison or check that fails
Options = argparse._ActionsContainer


ACTIONS = {  # name of the action: summary
    "speed": "Measure tokens per second on your machine, compared with mlx-lm's own loop",
    "replay": "Count the passes over recorded answers; needs no model and has no noise",
    "curve": "Measure the cost of passes over 1 to 32 tokens, and print the planned draft lengths",
    "compare": "Compare two results; exit code 1 if the second is slower",
    "report": "Print tables from result files, or write them as Markdown",
}


def with_action(words: list[str]) -> list[str]:
    """Return the words after `akunu bench`, with the default action if they name none."""
    first = next((word for word in words if word != "--debug"), "")
    return ["speed", *words] if first[:1] in ("", "-") and first not in ("-h", "--help") else words


def run(options: argparse.Namespace) -> int:
    code: int = _module(options.action).run(options)
    return code


def add_actions(parser: argparse.ArgumentParser, wanted: Iterable[str]) -> None:
    """Add all actions; only the `wanted` ones are imported and have their options."""
    parser.epilog = "Without an action: speed. Its options: akunu bench speed --help"
    actions = parser.add_subparsers(
        title="actions", dest="action", metavar="[ACTION]", required=True, parser_class=Parser
    )
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=f"{summary}.")
        if name in wanted and name == "speed":
            add_speed_options(action)
        elif name in wanted:
            _module(name).add_options(action)


def _module(action: str) -> ModuleType:
    return import_module(f"akunu_py.bench.{'tables' if action == 'report' else action}")


def lengths(text: str) -> list[int]:
    """Parse token counts such as 512 or 0,1024."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers such as 512 or 0,1024, got {text!r}")
    return values


def add_lengths(parser: Options, *names: str, default: Sequence[int], what: str) -> None:
    """Add an option that takes token counts or other numbers."""
    parser.add_argument(*names, type=lengths, default=default, metavar="N,...", help=what)


def add_model(parser: argparse.ArgumentParser, *, weights: bool = True) -> None:
    add_values(parser, ("--model", "NAME_OR_PATH", str, DEFAULT_MODEL, "Model name or directory"))
    if weights:
        add_values(parser, ("--weights", None, WEIGHT_MODES, "auto", "Weight format"))


def add_count(parser: Options, name: str, default: int, what: str) -> None:
    add_values(parser, (name, "N", positive, default, what))


def progress(line: str) -> None:
    """Show progress on stderr: one rewritten line on a terminal, separate lines elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{on_one_line(line)}", end="", file=sys.stderr, flush=True)
    elif line:
        print_line(line)


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(options: argparse.Namespace, as_json: Any, print_text: Callable[[], None]) -> None:
    if options.format == "json":
        print(json.dumps(as_json, indent=1))
    else:
        print_text()


# The options of the default action are here, because `speed` loads MLX.
MEMORY = "memory"
MODES = ("off", "fixed", "auto", "ngram", "mtp", "exit", MEMORY)


@dataclass(frozen=True, slots=True)
class DefaultScope:
    """Default workloads, draft modes and answer length."""

    workloads: Sequence[str]
    modes: Sequence[str]
    max_tokens: int


QUICK = DefaultScope(("chat", "edit", "json"), ("auto",), 48)
FULL = DefaultScope(NAMES, ("off", "fixed", "auto"), 256)


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--full", "Measure all workloads, all draft modes, and longer answers"))
    group = parser.add_argument_group("tests of given lengths, as in llama-bench (0: none)")
    cached = "Numbers of tokens in the cache before each test (default: 0)"
    add_lengths(group, "-p", "--n-prompt", default=[], what="Prompt lengths to prefill")
    add_lengths(group, "-n", "--n-gen", default=[], what="Numbers of tokens to generate")
    add_lengths(group, "-d", "--n-depth", default=[0], what=cached)
    group = parser.add_argument_group("workloads")
    workloads = f"{', '.join(NAMES)}, or none; repeatable (default: {', '.join(QUICK.workloads)}; "
    modes = "Draft mode; memory is auto with the answers to the other workloads; repeatable "
    add_values(
        group,
        ("--workload", "NAME", str, None, f"{workloads}none with -p or -n)"),
        ("--draft", "MODE", MODES, None, f"{modes}(default: {', '.join(QUICK.modes)})"),
        action="append",
    )
    add_count(group, "--draft-tokens", DEFAULT_DRAFT_TOKENS, "Draft length of --draft fixed")
    temperatures = "Sampling temperature; repeatable (default: 0)"
    add_values(
        group, ("--temperature", "T", parse_temperature, None, temperatures), action="append"
    )
    default = f"(default: {QUICK.max_tokens}, with --full {FULL.max_tokens})"
    add_values(
        group, ("--max-tokens", "N", positive, None, f"Maximum tokens of an answer {default}")
    )
    drafts = "Draft model for akunu and mlx-lm"
    add_values(parser, ("--draft-model", "NAME_OR_PATH", str, None, drafts))
    add_count(parser, "--repeats", 3, "Number of repetitions")
    add_model(parser)
    add_hosts(parser)
    add_format(parser, "md")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="Result file to write, as JSON"
    )
