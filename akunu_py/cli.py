"""The command line: which command is asked for, and its exit code.

Each command is a module with `add_options(parser)` and `run(args) -> exit code`, imported only when
it is asked for. Exit codes: 0 done; 1 failed, with one line on stderr; 2 wrong usage; 130
interrupted. A broken pipe is quiet. Only this module turns exceptions into exit codes; of one that
nobody foresaw it leaves the details in a file, and `--debug` shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from akunu_py import crashes
from akunu_py.arguments import Parser
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.sigint import end_at_once, raise_again
from akunu_py.text import escape_what_cannot_be_encoded, print_warnings
from akunu_py.version import __version__

_TOP_LEVEL = ("-h", "--help", "--version")
_COMMANDS = {  # name: (module, summary)
    "chat": ("akunu_py.commands.chat", "talk to a model in the terminal"),
    "run": ("akunu_py.commands.run", "one answer to stdout, statistics to stderr"),
    "complete": ("akunu_py.commands.complete", "complete code, for an editor that feeds it"),
    "serve": ("akunu_py.commands.serve", "the model for other programs, over HTTP"),
    "launch": ("akunu_py.commands.launch", "a coding agent on a model of yours"),
    "models": ("akunu_py.commands.models", "the models on this machine"),
    "chats": ("akunu_py.commands.chats", "the conversations that were kept"),
    "cache": ("akunu_py.commands.cache", "what models had read, kept on disk"),
    "info": ("akunu_py.commands.info", "this machine, versions, store: for a bug report"),
    "bench": ("akunu_py.bench.cli", "measure the speed of decoding"),
}
_LAUNCH = "launch"
_BENCH = "bench"  # its module has a parser of its own, with a default action


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _replace_closed_streams()
    escape_what_cannot_be_encoded()
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except AkunuError as error:
        if debug:
            crashes.print_traceback(error)
        print_warnings([str(error)])
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        if debug:
            crashes.print_traceback(error)
        print_warnings([f"{error.strerror or error}{_at(error.filename)}"])
        return 1
    except BaseException as error:  # noqa: BLE001 - Rust's panics are no Exception
        if _is_interrupt(error):
            return INTERRUPTED
        crashes.report(error, debug=debug)
        return 1


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--debug"]:
        arguments = [*arguments[1:2], "--debug", *arguments[2:]]  # after the command
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in _TOP_LEVEL):
        arguments = ["chat", *arguments]
    own, rest = _for_others(arguments)
    try:
        args = _parser(arguments[0]).parse_args(own)
        args.rest = rest
        code: int = args.run(args)
    except SystemExit as end:  # argparse's, after --help or wrong usage
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return code


def _for_others(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments that are parsed here, and those that another program or parser gets."""
    if arguments[0] == _BENCH:
        return arguments[:1], arguments[1:]
    if arguments[0] == _LAUNCH and "--" in arguments:
        at = arguments.index("--")
        return arguments[:at], arguments[at + 1 :]
    return arguments, []


def _parser(asked: str) -> argparse.ArgumentParser:
    """Knows the names of all commands, and the options of the one that is `asked` for."""
    parser = Parser(
        prog="akunu",
        description="Talk to a local model. It drafts with n-gram tables and verifies the draft "
        "in one pass: the same words, in fewer passes.",
        epilog="Without a command: akunu chat. --debug after any of them shows errors in full.",
    )
    parser.add_argument("--version", action="version", version=f"akunu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (path, summary) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, add_help=name != _BENCH
        )
        if name == asked:
            module = importlib.import_module(path)
            command.set_defaults(run=module.run)
            if name != _BENCH:
                module.add_options(command)
    return parser


def _is_interrupt(error: BaseException | None) -> bool:
    """An import of MLX that is interrupted fails with an ImportError whose cause tells."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _replace_closed_streams() -> None:
    """Python has None for a stream that the caller closed (`>&-`)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the whole run


def _discard_output() -> None:
    """Nothing can be written any more. Python would complain again when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):  # stdout may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _at(path: object) -> str:
    return f": {path}" if path else ""


def entry(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    raise_again()
    code = main(argv)
    end_at_once()
    sys.exit(code)
