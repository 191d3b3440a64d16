"""`akunu complete`: complete code at the cursor, for editors and scripts."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.arguments import add_drafting, add_loading, add_model, as_arguments, loading_from
from akunu_py.commands.servers import add_server, is_address, server_for
from akunu_py.completion.completion_queue import QueueOptions
from akunu_py.completion.completion_request import (
    DEFAULT_COMPLETION_TOKENS,
    CompleteOptions,
    CompletionRequest,
)
from akunu_py.engine.load import find_model, open_model
from akunu_py.errors import UsageError
from akunu_py.models.catalog.recommend import recommend
from akunu_py.parser import add_flags, add_values, count, positive
from akunu_py.paths import program_words
from akunu_py.settings import load_settings
from akunu_py.text import print_warnings

if TYPE_CHECKING:
    from akunu_py.completion.completer import Completer
    from akunu_py.engine.job import ModelLoop

_SUPPLIES = Path("/sys/class/power_supply")
_POWER_S = 60.0  # between two checks of the power source
_PMSET_S = 2.0  # time limit
_DIRECTORY = Path(__file__).parents[1] / "editors"
_EDITORS = {  # the template in each editor's directory, and the separator between string literals
    "vim": ("vimrc.in", ", "),
    "neovim": ("init.lua.in", ", "),
    "emacs": ("init.el.in", " "),
    "vscode": ("settings.json.in", ", "),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "completion_model or model in the settings")
    fim = "Fill-in-the-middle format of the model; none: use only the prefix"
    add_values(parser, ("--fim", "NAME", str, "auto", fim))
    modes = parser.add_argument_group("modes", "Default: JSON lines on stdin and stdout.")
    config = "Print the configuration for an editor, with the other options in its command"
    add_flags(modes, ("--lsp", "Run as a language server"))
    add_values(modes, ("--print-config", None, tuple(_EDITORS), None, config))
    add_flags(modes, ("--filter", "Complete the text on stdin, then exit"))
    filters = parser.add_argument_group("filter options")
    add_values(
        filters,
        ("--cursor", "LINE:COL", str, None, "Cursor position in lines and characters, from 1"),
        ("--offset", "N", str, None, "Cursor position in characters, from 0, instead of --cursor"),
        ("--path", "PATH", str, "", "Path of the text (default: unknown)"),
    )
    add_flags(filters, ("--whole", "Print the whole text, not only the completion"))
    file = "Another file of the project, for context and drafts; repeatable"
    add_values(filters, ("--file", "PATH", Path, None, file), action="append")
    add_values(
        parser.add_argument_group("limits", "For requests that set no limits."),
        ("--max-tokens", "N", positive, DEFAULT_COMPLETION_TOKENS, "Maximum tokens to generate"),
        ("--max-lines", "N", positive, 0, "Maximum lines (default: inferred from the cursor)"),
        ("--time-ms", "MS", positive, None, "Milliseconds from the first text (default: no limit)"),
        ("--temperature", "T", float, 0.0, "Sampling temperature; 0: greedy"),
        ("--prefix-tokens", "N", positive, 1536, "Maximum prompt tokens before the cursor"),
        ("--suffix-tokens", "N", count, 512, "Maximum prompt tokens after the cursor"),
        ("--file-tokens", "N", count, 3072, "Maximum prompt tokens from other files"),
    )
    add_drafting(parser.add_argument_group("drafting"))
    add_server(parser)
    add_loading(parser)


def run(args: argparse.Namespace) -> int:
    if sum(map(bool, (args.filter, args.lsp, args.print_config))) > 1:
        raise UsageError("expected one of --filter, --lsp and --print-config")
    names = ("cursor", "offset", "path", "whole", "file")
    used = [name for name in names if getattr(args, name)]
    if used and not args.filter:
        raise UsageError(f"--{used[0]} requires --filter")
    if args.print_config:
        print(editor_config(args.print_config, changed_options(args)), end="")
        return 0
    try:
        settings = load_settings()
    except UsageError:
        if args.whole:  # an editor replaces its buffer with the output
            sys.stdout.buffer.write(sys.stdin.buffer.read())
        raise
    requested, server = args.model, args.server or settings.server
    args.model = requested or settings.completion_model or settings.model
    load = partial(load_completer, args, requested, server)
    base = CompletionRequest(
        "",
        max_tokens=args.max_tokens,
        max_lines=args.max_lines,
        seconds=args.time_ms / 1000 if args.time_ms else None,
        temperature=args.temperature,
    )
    options = QueueOptions(settings.unload_s, settings.completion_exclude)
    if settings.save_battery:
        options = replace(options, saves_power=on_battery)
    if args.filter:
        from akunu_py.completion.protocols.filter import run_filter

        base = replace(base, path=args.path)
        exclude, files = settings.completion_exclude, args.file or ()
        run_filter(
            load, base, args.cursor, args.offset, files=files, whole=args.whole, exclude=exclude
        )
    elif args.lsp:
        from akunu_py.completion.protocols.lsp import serve_lsp

        serve_lsp(load, base, options)
    else:
        from akunu_py.completion.protocols.json_lines import serve_jsonl

        serve_jsonl(load, base, options, args.model or "")
        if not is_address(server):
            # Standard input may end before the model is loaded.
            find_model(requested, args.model)
    return 0


def load_completer(
    args: argparse.Namespace, requested: str | None, server: str
) -> Completer | ModelLoop:
    """Return a client of a running server, or load the model; call in the model's thread."""
    options = CompleteOptions(
        fim=args.fim,
        prefix_tokens=args.prefix_tokens,
        suffix_tokens=args.suffix_tokens,
        file_tokens=args.file_tokens,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
    )
    model = None if is_address(server) else find_model(requested, args.model)
    found = server_for(server, requested, model, loading_from(args))
    if found is not None:
        from akunu_py.serve.own.remote_loop import RemoteLoop

        client, facts = found
        if not facts.supports_fim:
            _warn_without_fim(args, facts.name)
        return RemoteLoop(client, facts.model, options)
    keep = not args.no_answer_cache
    engine, learned = open_model(model, loading_from(args), answer_cache=keep)
    from akunu_py.completion.completer import Completer, with_small_caches

    if args.prompt_cache_memory is None and not load_settings().prompt_cache_memory:
        engine = with_small_caches(engine)
    completer = Completer(engine, options, learned)
    if completer.family is None:
        _warn_without_fim(args, engine.name)
    return completer


def _warn_without_fim(args: argparse.Namespace, name: str) -> None:
    if args.fim != "auto" or args.filter or args.lsp:
        return
    from akunu_py.engine.model import device

    best = recommend(device.machine())[1].entry
    line = f"{name} is not known to fill in the middle, so it ignores text after the cursor"
    advice = f"; for a model that can, run: akunu models pull {best.name}" if best else ""
    print_warnings([line + advice])


def changed_options(args: argparse.Namespace) -> list[str]:
    """Return the options that differ from their defaults, for the editor's configuration."""
    others = argparse.Namespace(**vars(args) | {"print_config": None})
    for name in ("model", "draft_model"):
        if (value := getattr(args, name)) and Path(value).exists():
            setattr(others, name, str(Path(value).resolve()))  # editors start in any directory
    return as_arguments(others, add_options)


def on_battery() -> bool:
    """Return True if this machine runs on battery; checked at most once a minute."""
    return _is_on_battery(int(time.monotonic() / _POWER_S))


@lru_cache(maxsize=1)
def _is_on_battery(minute: int) -> bool:
    """Return False if the power source is unknown. minute: only a key for the cache."""
    if sys.platform == "darwin":
        command = ["/usr/bin/pmset", "-g", "batt"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            shown = subprocess.run(command, capture_output=True, text=True, timeout=_PMSET_S)
            return "'Battery Power'" in shown.stdout
        return False
    return any(_is_discharging(supply) for supply in _SUPPLIES.glob("*"))


def _is_discharging(supply: Path) -> bool:
    """Return True for a battery of this machine, not of a mouse, that is discharging."""

    def read(name: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            return (supply / name).read_text().strip()
        return ""

    discharges = (read("type"), read("status")) == ("Battery", "Discharging")
    return discharges and read("scope") != "Device"


def editor_config(editor: str, options: Sequence[str] = ()) -> str:
    """Return the snippet for an editor, whose command passes `options`."""
    name, separator = _EDITORS[editor]
    template = (_DIRECTORY / editor / name).read_text()
    words = [*program_words(), "complete", *options]
    directory = str(_DIRECTORY / editor)
    for slot, value in (
        ("@DIRECTORY@", shlex.quote(directory) if editor == "vscode" else _quote(directory)),
        ("@PYTHON@", shlex.quote(sys.executable)),
        ("@COMMAND@", separator.join(map(_quote, words))),
    ):
        template = template.replace(slot, value)
    return template


def _quote(text: str) -> str:
    """Return a string literal of JSON, Vim script, Lua and Emacs Lisp."""
    return json.dumps(text, ensure_ascii=False)
