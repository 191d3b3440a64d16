"""`akunu chat`: opens the chat on a model that is known to be here and whole."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from akunu_py.commands.generation import options_from
from akunu_py.commands.warn import tell_warnings
from akunu_py.errors import UsageError
from akunu_py.models import store
from akunu_py.settings import load_settings
from akunu_py.types import DEFAULT_MODEL

if TYPE_CHECKING:
    from akunu_py.engine import Engine
    from akunu_py.experience import Experience

_PATIENCE_S = 2.0  # for a pass that is running; a model that is being loaded takes longer


def run(args: argparse.Namespace) -> int:
    require_terminal()
    model = find_model(args.model)
    options = options_from(args)

    from akunu_py.tui.app import ChatApp
    from akunu_py.tui.worker import SessionThread

    kept: list[Experience] = []

    def load() -> Engine:
        # Here, in the session's thread, because the import alone takes seconds.
        from akunu_py.engine import Engine

        store.check(model)
        return Engine.load(model.path, name=model.name, weights=args.weights, kv_bits=args.kv_bits)

    def learned(engine: Engine) -> Experience:
        from akunu_py.commands.load import load_experience

        kept.append(load_experience(engine, no_memory=args.no_memory))
        return kept[-1]

    session = SessionThread(load, learned)
    app = ChatApp(model.name, options, session)
    app.run()
    code = app.return_code or 0
    if not session.close(_PATIENCE_S):
        # Python would tear itself down under a thread that is deep in MLX, which may crash. The
        # screen is restored and nothing is left to be written.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    tell_warnings(warning for experience in kept for warning in experience.warnings)
    return code


def require_terminal() -> None:
    """Raises UsageError unless a person can see the screen and type; it is drawn on stderr."""
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError("chat needs a terminal; for scripts use: akunu run")


def find_model(name: str | None) -> store.StoredModel:
    """The model to chat with. The default one is fetched first where it is missing."""
    wanted = name or load_settings().model
    if wanted == DEFAULT_MODEL:
        from akunu_py.commands.models import fetch

        fetch(DEFAULT_MODEL, quiet_if_here=True)
    model = store.resolve(wanted)
    store.check(model)
    return model
