"""The command line: options, exit codes, and nothing heavy imported before it is needed.

Exit codes: 0 done; 1 failed, with one line on stderr; 2 wrong usage; 130 interrupted. A broken
pipe is quiet. Only this module turns exceptions into exit codes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from akunu_py.arguments import Parser, add_generation
from akunu_py.commands import chats_options, complete_options
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.interrupts import end_at_once, raise_again
from akunu_py.text import print_warnings
from akunu_py.version import __version__

_TOP_LEVEL = ("-h", "--help", "--version")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="akunu",
        description="Talk to a local model. It drafts with n-gram tables and verifies the draft "
        "in one pass: the same words, in fewer passes.",
        epilog="Without a command: akunu chat.",
    )
    parser.add_argument("--version", action="version", version=f"akunu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_chat(commands)
    _add_run(commands)
    _add_complete(commands)
    _add_models(commands)
    _add_chats(commands)
    _add_command(commands, "info", "this machine, versions, store: for a bug report")
    _add_command(commands, "bench", "measure the speed of decoding", add_help=False)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    summary: str,
    module: str | None = None,
    *,
    add_help: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary, add_help=add_help)
    parser.set_defaults(module=module or f"akunu_py.commands.{name}")
    return parser


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_command(commands, "chat", "talk to a model in the terminal")
    parser.add_argument("model", nargs="?", default=None, metavar="MODEL")
    # Not greedy, as the settings say: a small model goes round in circles, and a person notices.
    add_generation(parser, temperature=None, top_p=0.95)


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_command(commands, "run", "one answer to stdout, statistics to stderr")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads stdin")
    parser.add_argument("--model", default=None, metavar="NAME_OR_PATH")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT, without the template")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--quiet", action="store_true", help="no statistics")
    parser.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE",
        help="keep what was read and said in FILE, and do not read again what it holds",
    )
    add_generation(parser, temperature=0.0, top_p=1.0)


def _add_complete(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_command(commands, "complete", "complete code, for an editor that feeds it")
    complete_options.add_options(parser)


def _add_chats(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_command(commands, "chats", "the conversations that were kept")
    chats_options.add_options(parser)


def _add_models(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_command(commands, "models", "the models on this machine")
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=summary)

    add("list", "models that are here, and models that can be pulled")
    pull = add("pull", "fetch a model")
    pull.add_argument(
        "name",
        metavar="NAME",
        help="of the catalogue, or owner/repository of the hub; either with @revision",
    )
    pull.add_argument("--name", dest="as_name", metavar="NAME", help="what to call it here")
    pull.add_argument("--if-missing", action="store_true", help="say nothing where it is here")
    suited = add("recommend", "the best models for this machine's memory, and why")
    suited.add_argument("--memory", metavar="16G", help="for a Mac with so much memory")
    suited.add_argument("--format", choices=("text", "json"), default="text")
    bring = add("import", "take in a folder or a GGUF file of this machine")
    bring.add_argument("path", metavar="PATH", help="a folder with config.json, or a .gguf file")
    bring.add_argument("--name", metavar="NAME", help="what to call it (else after the file)")
    bring.add_argument(
        "--quantize", type=int, choices=(4, 8), metavar="4|8", help="bits for plain weights"
    )
    show = add("show", "everything known about a model")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--verify", action="store_true", help="read and check every byte")
    verify = add("verify", "read every byte of a model, or of all, and compare")
    verify.add_argument("name", nargs="?", metavar="NAME")
    clean = add("gc", "remove what interrupted pulls and removed models left behind")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    forget = add("forget", "delete what was remembered of a model's answers")
    forget.add_argument("name", metavar="MODEL")
    remove = add("rm", "remove a model")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    remove.add_argument(
        "--hub-files", action="store_true", help="delete its files from the hub's cache too"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _replace_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in _TOP_LEVEL):
        arguments = ["chat", *arguments]
    # The bench has a parser of its own, too heavy to build for every other command.
    own, rest = (arguments[:1], arguments[1:]) if arguments[0] == "bench" else (arguments, [])
    try:
        args = build_parser().parse_args(own)
        args.rest = rest
        command = importlib.import_module(args.module)
        code: int = command.run(args)
        sys.stdout.flush()
        return code
    except AkunuError as error:
        print_warnings([str(error)])
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        print_warnings([f"{error.strerror or error}{_at(error.filename)}"])
        return 1


def _replace_closed_streams() -> None:
    """Python has None for a stream that the caller closed (`>&-`)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the whole run


def _discard_output() -> None:
    """Nothing can be written any more. Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _at(path: object) -> str:
    return f": {path}" if path else ""


def entry(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    raise_again()
    code = main(argv)
    end_at_once()
    sys.exit(code)
