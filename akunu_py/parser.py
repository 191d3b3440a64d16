"""The argument parser: short help and errors. Imports little, for a fast `--help`."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from akunu_py.text import did_you_mean, on_one_line


class _HelpFormatter(argparse.HelpFormatter):
    """Short usage lines, lists of commands without a heading, and the default of every option."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        arguments = [action for action in actions if not action.option_strings]
        if len(arguments) < len(actions):
            self._prog += " [OPTIONS]"
        super().add_usage(usage, arguments, [], prefix)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if "default" in text or default is False or default in (None, [], argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default){'g' if isinstance(default, float) else 's'})"


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage on one line and accepts only full option names."""

    def __init__(self, **options: Any) -> None:
        formatter = partial(_HelpFormatter, max_help_position=32)
        super().__init__(add_help=False, allow_abbrev=False, formatter_class=formatter, **options)
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action="help", help="Show this help and exit")
        # Without SUPPRESS, a command's parser would reset the value of its parent's parser.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            hint = did_you_mean(str(value), names) or f"; known: {', '.join(names)}"
            if isinstance(action, argparse._SubParsersAction):
                kind = str(action.metavar).strip("[]").lower()
                raise argparse.ArgumentError(None, f"unknown {kind} {value!r}{hint}")
            raise argparse.ArgumentError(action, f"unknown value {value!r}{hint}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here: the parser of all commands would name its own help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [str(each.metavar) for each in self._get_positional_actions()]
            hint = "; put the prompt in quotes" if "PROMPT" in names else ""
            if options := [word for word in unknown if word.startswith("-")]:
                unknown = options[:1]  # the other words may be its value
                names += self._option_string_actions
                known = {each.strip("-").lower(): each for each in names}
                hint = did_you_mean(unknown[0].partition("=")[0].strip("-"), known, known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            name = action.metavar or action.dest
            if action.choices and message.endswith(f"are required: {name}"):
                message = f"expected {name}: {', '.join(action.choices)}"
        self.exit(2, f"{on_one_line(f'{self.prog}: {message}')}; see: {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raise OSError if the disk is full; argparse ignores it."""
        (file or sys.stderr).write(message)


def add_actions(parser: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
    """Return a function that adds a subcommand, given its name, summary and `args.act`."""
    actions = parser.add_subparsers(
        title="commands", dest="action", metavar="COMMAND", required=True, parser_class=Parser
    )

    def add(name: str, summary: str, act: Callable[..., None]) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=summary, description=f"{summary}.")
        action.set_defaults(act=act)
        return action

    return add


def run_action(args: argparse.Namespace) -> int:
    """Run the subcommand that the user chose among those of `add_actions`."""
    args.act(args)
    return 0


def add_format(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add --format. others: formats besides text and JSON."""
    formats = ("text", *others, "json")
    parser.add_argument("--format", choices=formats, default="text", help="Output format")


def _integer(least: int, text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= least:
            return value
    raise argparse.ArgumentTypeError(f"expected an integer of {least} or more, got {text!r}")


positive, count = partial(_integer, 1), partial(_integer, 0)


def number(text: str, allowed: Callable[[float], bool], expected: str) -> float:
    """Parse the value of an option that must be a number that is `allowed`."""
    with contextlib.suppress(ValueError):
        if allowed(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


amount = partial(number, allowed=lambda value: 0 <= value <= 1e6, expected="0 to 1,000,000")
Option = tuple[str, str | None, Any, Any, str]  # name, metavar, type or choices, default, help


def add_values(group: argparse._ActionsContainer, *options: Option, action: str = "store") -> None:
    """Add options that have a value; with the action "append", they are repeatable."""
    for name, metavar, kind, default, text in options:
        values: Any = {"choices" if isinstance(kind, tuple) else "type": kind, "action": action}
        group.add_argument(name, metavar=metavar, default=default, help=text, **values)


def add_flags(group: argparse._ActionsContainer, *flags: tuple[str, str]) -> None:
    """Add options without a value, by name and help."""
    for name, text in flags:
        group.add_argument(name, action="store_true", help=text)
