"""`akunu serve`: the model for other programs, over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from akunu_py.arguments import add_drafting, add_hosts, add_loading, loading_from, positive
from akunu_py.errors import HostLost, UsageError
from akunu_py.interrupts import exit_without_teardown
from akunu_py.models.store import store
from akunu_py.settings import load_settings
from akunu_py.text import print_warnings
from akunu_py.types import GenerateOptions

if TYPE_CHECKING:
    from akunu_py.decoding.generate.session import Session
    from akunu_py.decoding.learned import LearnedState


DEFAULT_PORT = 8012  # where llama.vim and llama.vscode look
KEY_VARIABLE = "AKUNU_API_KEY"
_END_S = 9.0  # beyond --grace, that ending may take once stdin has ended


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=None, metavar="NAME_OR_PATH")
    parser.add_argument(
        "--alias", action="append", metavar="NAME", help="what requests may call it, too"
    )
    _add_access(parser.add_argument_group("who may ask"))
    answers = parser.add_argument_group("answers, for requests that say nothing of it")
    answers.add_argument(
        "--temperature",
        type=float,
        default=None,
        metavar="T",
        help="default: what the model's makers say, or 1",
    )
    answers.add_argument(
        "--max-tokens", type=positive, default=None, metavar="N", help="default: the context's end"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds that running answers have when the server is to end (default: %(default)g)",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=30.0,
        metavar="MIN",
        help="minutes without a request after which the model is unloaded, until the next one "
        "comes; 0 for never (default: %(default)g)",
    )
    parser.add_argument("--quiet", action="store_true", help="no line for each request")
    parser.add_argument(
        "--log-content", action="store_true", help="print what is asked and answered, too"
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="end when stdin does, with who started it"
    )
    add_drafting(parser.add_argument_group("drafting"))
    add_loading(parser)
    add_hosts(parser)


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s")
    group.add_argument(
        "--api-key",
        default=None,
        metavar="KEY",
        help=f"that requests must have; better in the environment: {KEY_VARIABLE}",
    )
    group.add_argument(
        "--cors", action="append", metavar="ORIGIN", help="a website that may ask; * for all"
    )


def run(args: argparse.Namespace) -> int:
    found = store.resolve(args.model or load_settings().model)
    store.check(found)
    loading_from(args)  # raises before a port is taken
    if args.until_eof:
        threading.Thread(
            target=_end_with_input, args=(args.grace,), name="stdin", daemon=True
        ).start()
    if not 0 <= args.port < 65536:
        raise UsageError(f"expected a port from 0 to 65535, got {args.port}")
    key = os.environ.get(KEY_VARIABLE, "") if args.api_key is None else args.api_key
    from akunu_py.decoding.scheduling.scheduler import Scheduler
    from akunu_py.serve.http.guard import Access, is_loopback
    from akunu_py.serve.http.server import ServeOptions, listen, serve
    from akunu_py.serve.own.running import RunningServer, own_url

    if not key and not is_loopback(args.host):
        raise UsageError(
            f"others could ask at {args.host}: set a key for them in {KEY_VARIABLE} "
            "(or --api-key KEY), or leave out --host"
        )
    options = ServeOptions(
        names=tuple(dict.fromkeys((found.name, *(args.alias or ())))),
        access=Access(args.host, key, tuple(args.cors or ()), secrets.token_hex(16)),
        defaults=GenerateOptions(draft=args.draft, draft_tokens=args.draft_tokens),
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        grace_s=args.grace,
        quiet=args.quiet,
        log_content=args.log_content,
    )
    learned: list[LearnedState] = []
    lost = threading.Event()

    def end(why: HostLost, told: bool) -> None:
        """Those who wait for answers are told, as where a user ends it."""
        lost.set()
        if not told:
            scheduler.abandon(why)
        os.kill(os.getpid(), signal.SIGTERM)

    with listen(args.host, args.port) as listening:
        port = listening.getsockname()[1]
        url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{port}"
        running = RunningServer(
            own_url(url),
            options.access.token,
            found.name,
            str(found.path.resolve()),
            args.weights,
            args.kv_bits,
        )
        options = replace(options, running=running)
        # Hosts cannot be connected a second time by one process.
        idle_s = args.idle * 60.0 if args.idle > 0 and not args.hosts else None
        scheduler = Scheduler(lambda: _load(args, learned, end), idle_s=idle_s)
        serve(scheduler, listening, options, f"{url}/v1")
    print_warnings(warning for state in learned for warning in state.warnings)
    if lost.is_set():
        _start_again()
    return 0


def _load(
    args: argparse.Namespace,
    learned: list[LearnedState],
    on_lost: Callable[[HostLost, bool], None],
) -> Session:
    """Loads the model, in the thread that will run it. on_lost: see `Ring`."""
    from akunu_py.decoding.load import engine_from, load_learned

    engine = engine_from(args)
    from akunu_py.decoding.generate.session import Session

    if engine.ring is not None:
        engine.ring.on_lost = on_lost
    learned.append(load_learned(engine, no_memory=args.no_memory))
    return Session(engine, learned[-1])


def _end_with_input(grace: float) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace + _END_S)
    exit_without_teardown(1)


def _start_again() -> None:
    """In the place of this process, which cannot connect hosts a second time."""
    from akunu_py.workarounds.ring_output import restore_stderr

    print_warnings(["another host was lost; starting again"])
    restore_stderr()
    os.execv(sys.executable, sys.orig_argv)
