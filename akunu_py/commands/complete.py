"""`akunu complete`: completes code at a cursor, for an editor that feeds it or for a script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from akunu_py.commands import complete_options
from akunu_py.completion.types import CompletionRequest
from akunu_py.errors import INTERRUPTED, ModelError, UsageError
from akunu_py.models import store
from akunu_py.settings import load_settings

if TYPE_CHECKING:  # a second or two, which the thread that completes spends, not we
    from akunu_py.completion.completer import Completer

_PATIENCE_S = 2.0  # for a pass that is running; a model that is being loaded takes longer


def run(args: argparse.Namespace) -> int:
    if sum(map(bool, (args.filter, args.lsp, args.print_config))) > 1:
        raise UsageError("expected one of --filter, --lsp and --print-config")
    if args.filter:
        from akunu_py.commands.complete_filter import run_filter

        return run_filter(args)
    if used := [name for name in ("cursor", "offset", "whole", "file") if getattr(args, name)]:
        raise UsageError(f"--{used[0]} goes with --filter")
    if args.print_config:
        from akunu_py.completion.editor_config import editor_config

        print(editor_config(args.print_config, complete_options.passed_on(args)), end="")
        return 0
    if args.lsp:
        from akunu_py.completion.lsp import serve_lsp

        serve_lsp(lambda: load_completer(args), request_from(args), leave)
        return 0
    return serve_lines(args)


def serve_lines(args: argparse.Namespace) -> int:
    """Answers JSON lines until stdin ends."""
    check_model(args)
    failed: list[str] = []

    from akunu_py.completion.jsonl import JsonLines
    from akunu_py.completion.thread import CompletionThread

    thread = CompletionThread(
        lambda: load_completer(args), on_failed=lambda failure: failed.append(failure.message)
    )
    thread.start()
    try:
        JsonLines(thread, _write, request_from(args)).serve(sys.stdin.buffer)
    except KeyboardInterrupt:
        leave(thread.close, INTERRUPTED)
        raise
    except BrokenPipeError:  # nobody reads any more
        leave(thread.close, 0)
        raise
    except BaseException:
        leave(thread.close, 1)
        raise
    if failed:
        raise ModelError(failed[0])
    return 0


def check_model(args: argparse.Namespace) -> None:
    """Raises what can be known to be wrong with the model before it is loaded."""
    store.check(store.resolve(args.model or load_settings().model))


def load_completer(args: argparse.Namespace) -> Completer:
    """Loads the model that `args` ask for; to be called in the thread that will use it."""
    from akunu_py.completion.completer import CompleteOptions, Completer
    from akunu_py.decoding.load import engine_from, load_learned

    engine = engine_from(args)
    options = CompleteOptions(
        fim=args.fim,
        prefix_tokens=args.prefix_tokens,
        suffix_tokens=args.suffix_tokens,
        file_tokens=args.file_tokens,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
    )
    return Completer(engine, options, load_learned(engine, no_memory=args.no_memory))


def request_from(args: argparse.Namespace) -> CompletionRequest:
    """A request with the limits that `args` set, and nothing else."""
    seconds = args.time_ms / 1000 if args.time_ms else None
    wanted = CompletionRequest(
        "", max_lines=args.max_lines, seconds=seconds, temperature=args.temperature
    )
    return replace(wanted, max_tokens=args.max_tokens or wanted.max_tokens)


def leave(close: Callable[[float], bool], code: int) -> None:
    """Ends a thread that completes, and the program with exit code `code` where a load keeps the
    thread busy: Python would tear itself down under it, which may crash."""
    if not close(_PATIENCE_S):
        sys.stderr.flush()
        os._exit(code)


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
