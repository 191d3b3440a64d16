"""`akunu complete`: completes code at a cursor, for an editor that feeds it or for a script."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from akunu_py import paths
from akunu_py.arguments import Parser, add_drafting, add_loading, loading_from, positive
from akunu_py.commands.servers import add_server, is_address, server_for
from akunu_py.completion.acceptance import Acceptance, read_counts, stats_table
from akunu_py.completion.request import CompleteOptions, CompletionMaker, CompletionRequest
from akunu_py.errors import UsageError
from akunu_py.models.catalog import recommend
from akunu_py.models.store import store
from akunu_py.settings import load_settings
from akunu_py.text import for_output, print_warnings


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=None, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--fim",
        default="auto",
        metavar="NAME",
        help="the format of fill-in-the-middle or of next edits; none continues what is before",
    )
    _add_editors(parser.add_argument_group("editors"))
    _add_filter(parser.add_argument_group("filter: one buffer in, its completion out"))
    _add_limits(parser.add_argument_group("limits, for requests that set none"))
    _add_budgets(parser.add_argument_group("what the model reads at most, in tokens"))
    add_drafting(parser.add_argument_group("drafting"))
    add_server(parser)
    add_loading(parser)


def run(args: argparse.Namespace) -> int:
    if sum(map(bool, (args.filter, args.lsp, args.print_config, args.stats))) > 1:
        raise UsageError("expected one of --filter, --lsp, --print-config and --stats")
    used = [name for name in ("cursor", "offset", "whole", "file") if getattr(args, name)]
    if used and not (args.filter or args.lsp):
        raise UsageError(f"--{used[0]} goes with --filter")
    if args.print_config:
        print(editor_config(args.print_config, passed_on(args)), end="")
        return 0
    if args.stats:
        print(for_output("\n".join(stats_table(read_counts(paths.acceptance_file())))))
        return 0
    settings = load_settings()
    asked, server = args.model, args.server or settings.server
    args.model = asked or settings.completion_model or settings.model
    load, base = partial(load_completer, args, asked, server), base_request(args)
    acceptance = Acceptance(None if args.no_memory else paths.acceptance_file())
    if args.filter:
        from akunu_py.completion.protocols.filter import run_filter

        base = replace(base, path=args.path)
        run_filter(load, base, args.cursor, args.offset, files=args.file or (), whole=args.whole)
    elif args.lsp:
        from akunu_py.completion.protocols.lsp import serve_lsp

        serve_lsp(load, base, acceptance, settings.unload_s)
    else:
        from akunu_py.completion.protocols.json_lines import serve_jsonl

        if not is_address(server):
            store.check(store.resolve(args.model))  # before it is loaded
        serve_jsonl(load, base, acceptance, settings.unload_s)
    return 0


def load_completer(args: argparse.Namespace, asked: str | None, server: str) -> CompletionMaker:
    """A server that runs, or the model, loaded; to be called in the thread that will use it. asked:
    the model on the command line."""
    options = CompleteOptions(
        fim=args.fim,
        prefix_tokens=args.prefix_tokens,
        suffix_tokens=args.suffix_tokens,
        file_tokens=args.file_tokens,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
    )
    model = store.resolve(args.model) if server == "auto" else None
    found = server_for(server, asked, model, loading_from(args))
    if found is not None:
        from akunu_py.serve.own.served import ServedCompleter

        client, facts = found
        if not facts.fills_in and _should_fill_in(args):
            print_warnings([_better_model(facts.name)])
        return ServedCompleter(client, facts.name, options)
    from akunu_py.decoding.load import engine_from, load_learned

    engine = engine_from(args)
    from akunu_py.completion.completer import Completer

    completer = Completer(engine, options, load_learned(engine, no_memory=args.no_memory))
    if completer.family is None and not completer.edit_format and _should_fill_in(args):
        print_warnings([_better_model(engine.name)])
    return completer


def _should_fill_in(args: argparse.Namespace) -> bool:
    """Whether a user is to know that the model cannot."""
    return args.fim == "auto" and not (args.filter or args.lsp)


def _better_model(name: str) -> str:
    """What a user should know whose model cannot fill in the middle, in one line."""
    from akunu_py.decoding import device

    machine = device.machine()
    best = recommend(machine.memory, machine.suits)[1].entry
    line = f"{name} is not known to fill in the middle: it does not read behind the cursor"
    return f"{line}; akunu models pull {best.name} gets one that does" if best else line


def base_request(args: argparse.Namespace) -> CompletionRequest:
    """A request with the limits that `args` set, and nothing else."""
    request = CompletionRequest(
        "",
        max_lines=args.max_lines,
        seconds=args.time_ms / 1000 if args.time_ms else None,
        temperature=args.temperature,
    )
    return replace(request, max_tokens=args.max_tokens) if args.max_tokens else request


def passed_on(args: argparse.Namespace) -> list[str]:
    """The options that differ from their defaults, to give to another `akunu complete`."""
    parser = Parser()
    add_options(parser)
    found = []
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(args, name)
        if value == default or name in ("print_config", "lsp"):
            continue
        if name in ("model", "draft_model") and Path(value).exists():
            value = Path(value).resolve()  # an editor starts it in any directory
        option = f"--{name.replace('_', '-')}"
        found += [option] if value is True else [option, str(value)]
    return found


def _add_editors(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lsp",
        action="store_true",
        help="speak the Language Server Protocol (textDocument/inlineCompletion), not JSON lines",
    )
    group.add_argument(
        "--print-config",
        choices=EDITORS,
        help="print what to paste into an editor's configuration; other options go along",
    )
    group.add_argument(
        "--stats", action="store_true", help="print how many completions were shown and accepted"
    )


def _add_filter(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--filter", action="store_true", help="complete the buffer on stdin")
    group.add_argument(
        "--cursor", metavar="LINE:COL", help="where, both from 1; COL counts characters"
    )
    group.add_argument("--offset", metavar="N", help="where, in characters from the start, from 0")
    group.add_argument(
        "--whole", action="store_true", help="print the completed buffer, not the completion"
    )
    group.add_argument("--path", default="", metavar="PATH", help="what the buffer is called")
    group.add_argument(
        "--file",
        action="append",
        type=Path,
        metavar="PATH",
        help="another file of the project, to draft from; may be repeated",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=positive, default=None, metavar="N")
    group.add_argument(
        "--max-lines", type=positive, default=0, metavar="N", help="else what the cursor tells"
    )
    group.add_argument(
        "--time-ms", type=positive, default=None, metavar="MS", help="then the best text so far"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (the default)"
    )


def _add_budgets(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prefix-tokens", type=positive, default=1536, metavar="N")
    group.add_argument("--suffix-tokens", type=_count, default=512, metavar="N")
    group.add_argument(
        "--file-tokens",
        type=_count,
        default=3072,
        metavar="N",
        help="of all other files; what is not read is drafted from all the same",
    )


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


_DIRECTORY = Path(__file__).parents[1] / "editors"


@dataclass(frozen=True, slots=True)
class _Editor:
    """How the snippet of an editor is filled in."""

    template: str  # a file in the editor's directory
    quote: Callable[[str], str]  # makes a string literal of the editor's language
    directory_quote: Callable[[str], str]  # the same for the plugin's directory
    between: str = ", "  # two literals


def _vim_string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _lua_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _lisp_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_EDITORS = {
    "vim": _Editor("vimrc.in", _vim_string, _vim_string),
    "neovim": _Editor("init.lua.in", _lua_string, _lua_string),
    "emacs": _Editor("init.el.in", _lisp_string, _lisp_string, between=" "),
    "vscode": _Editor("settings.json.in", json.dumps, shlex.quote),
}
EDITORS = tuple(_EDITORS)


def editor_config(editor: str, options: Sequence[str] = ()) -> str:
    """Return the snippet for one of EDITORS, whose command passes `options`.

    In the template @DIRECTORY@ stands for the plugin's directory and @COMMAND@ for the command. The
    program has its absolute path, because editors that a desktop starts have another PATH.
    """
    config = _EDITORS[editor]
    template = (_DIRECTORY / editor / config.template).read_text()
    command = config.between.join(map(config.quote, [*_program(), "complete", *options]))
    directory = config.directory_quote(str(_DIRECTORY / editor))
    for name, value in (
        ("@DIRECTORY@", directory),
        ("@PYTHON@", shlex.quote(sys.executable)),
        ("@COMMAND@", command),
    ):
        template = template.replace(name, value)
    return template


def _program() -> list[str]:
    """Return the command that starts this installation from anywhere."""
    script = Path(sys.executable).with_name("akunu")
    return [str(script)] if script.exists() else [sys.executable, "-m", "akunu_py"]
