"""The command line: runs one command and maps exceptions to exit codes.

Exit codes: 0 success; 1 failure, with one line on stderr; 2 wrong usage; 130 interrupted. A broken
pipe is silent. An unexpected exception is saved to a file, and `--debug` prints it.
"""

import argparse
import contextlib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from akunu_py import crashes, exit_on_interrupt, raise_on_interrupt
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.parser import Parser, add_flags, run_action
from akunu_py.text import escape_unencodable, print_warnings
from akunu_py.version import __version__, package_version

_TOP_LEVEL = ("-h", "--help", "--version")
_COMMANDS = {  # name: summary
    "chat": "Chat with a model in the terminal (the default command)",
    "run": "Answer one prompt: the answer to stdout, statistics to stderr",
    "complete": "Complete code at the cursor, for editors and scripts",
    "serve": "Serve a model over HTTP with OpenAI, Anthropic, Ollama and llama.cpp APIs",
    "launch": "Start a coding agent with a local model",
    "models": "Download, list, verify and remove models",
    "drafter": "Train a small network that drafts for a model",
    "chats": "List, search, export and delete saved chats",
    "cache": "List, verify and delete prompt caches on disk",
    "info": "Show versions, hardware and file locations for a bug report",
    "doctor": "Check what akunu needs on this machine, with advice for each problem",
    "bench": "Measure decoding speed",
    "completions": "Print a completion script for bash, zsh or fish",
    "uninstall": "Show how to remove the program, or delete its data",
}
_MODULES = {  # of commands whose module is not in commands/ or has another name
    "bench": "akunu_py.bench.command",
    "completions": "akunu_py.commands.shell_completions",
    "drafter": "akunu_py.commands.drafter_actions",
}


def main(argv: Sequence[str] | None = None) -> int:
    _replace_closed_streams()
    escape_unencodable()
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
        where = f": {error.filename}" if error.filename else ""
        print_warnings([f"{error.strerror or error}{where}"])
        return 1
    except BaseException as error:  # noqa: BLE001 - a Rust panic is not an Exception
        if _is_interrupt(error):
            return INTERRUPTED
        crashes.report(error, debug=debug)
        return 1


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--debug"]:
        arguments = [*arguments[1:2], "--debug", *arguments[2:]]  # move it after the command
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in _TOP_LEVEL):
        arguments = ["chat", *arguments]
    if arguments[0] == "--version":  # with MLX and mlx-lm, which a bug report needs
        libraries = ", ".join(f"{name} {package_version(name)}" for name in ("mlx", "mlx-lm"))
        print(f"akunu {__version__} ({libraries})")
        return 0
    ours, rest = arguments, list[str]()  # rest: for the program to launch
    if arguments[0] == "bench":
        from akunu_py.bench.command import with_action

        ours = ["bench", *with_action(arguments[1:])]
    elif arguments[0] == "launch" and "--" in arguments:
        at = arguments.index("--")
        ours, rest = arguments[:at], arguments[at + 1 :]
    try:
        args = _parser(arguments[0], actions=ours[1:]).parse_args(ours)
        args.rest, args.whole_parser = rest, partial(_parser, *_COMMANDS)
        args.typed = shlex.join(arguments)
        args.command_line = f"akunu {args.typed}"
        code: int = args.run(args)
    except SystemExit as end:  # argparse's, after --help or wrong usage
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return code


def _parser(*wanted: str, actions: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of all commands; imports the `wanted` ones, and only `actions` of bench."""
    parser = Parser(
        prog="akunu",
        description="Chat with local models, complete code in your editor, and serve models over "
        "HTTP. Drafting makes decoding faster without changing the output.",
        epilog="Without a command, akunu starts a chat. 'akunu COMMAND --help' shows the options "
        "of a command. Every command accepts --debug, which prints errors with tracebacks.",
    )
    add_flags(parser, ("--version", "Show the versions and exit"))
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", parser_class=Parser
    )
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.")
        if name in wanted:
            module = importlib.import_module(_MODULES.get(name, f"akunu_py.commands.{name}"))
            command.set_defaults(run=getattr(module, "run", run_action))
            if name == "bench":
                module.add_actions(command, actions or module.ACTIONS)
            else:
                module.add_options(command)
    return parser


def _is_interrupt(error: BaseException | None) -> bool:
    """Return True if an interrupt caused `error`, as when it stops the import of MLX."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _replace_closed_streams() -> None:
    """Open the null device for streams that the caller closed (`>&-`): Python has None there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open for the whole run


def _discard_output() -> None:
    """Redirect a broken stdout to the null device: Python flushes it again at exit."""
    with contextlib.suppress(OSError, ValueError):  # stdout may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def entry(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the console script."""
    raise_on_interrupt()
    code = main(argv)
    exit_on_interrupt()
    sys.exit(code)
