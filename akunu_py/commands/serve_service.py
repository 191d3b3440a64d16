"""`akunu serve --install`, `--uninstall` and `--status`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from akunu_py.arguments import as_arguments, loading_from
from akunu_py.errors import UsageError
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from akunu_py.serve.own.client import ServerClient
from akunu_py.serve.own.discovery import running_servers
from akunu_py.serve.own.system_service import (
    ServiceCommand,
    ServiceManager,
    own_environment,
    service_manager,
)
from akunu_py.settings import serve_settings
from akunu_py.text import say

_OTHER_MODELS = ("embedding_model", "draft_model")


def manage_service(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    served_models: Callable[[], Sequence[StoredModel]],
) -> int:
    """Install or remove the service, or show what runs.

    parser: of `akunu serve`. served_models: returns the models that it would serve now.
    """
    manager = service_manager()
    if args.install:
        _install(manager, parser, args, served_models)
    elif args.uninstall:
        removed = manager.uninstall()
        say(f"removed {manager.file}" if removed else "the service is not installed")
    else:
        _show_status(manager)
    return 0


def _install(
    manager: ServiceManager,
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    served_models: Callable[[], Sequence[StoredModel]],
) -> None:
    """Check the options that a service would fail with, then install it."""
    if "/Cellar/" in sys.prefix:
        raise UsageError("Homebrew manages this installation; run: brew services start akunu")
    if args.api_key is not None:
        raise UsageError(
            "--api-key would be readable in the service's file; set api_key under [serve] in "
            "settings.toml, which is private"
        )
    if args.until_eof:
        raise UsageError("--until-eof cannot be combined with --install: a service has no stdin")
    settings = serve_settings()
    loading_from(args)
    models = served_models()
    # A service has another working directory.
    args.model = [_absolute(name) for name in args.model or ()] or None
    for name in _OTHER_MODELS:
        if value := getattr(args, name):
            setattr(args, name, _absolute(value))
    if args.hosts and Path(args.hosts).exists():
        args.hosts = str(Path(args.hosts).resolve())
    args.install = False
    manager.install(ServiceCommand(tuple(as_arguments(parser, args)), own_environment()))
    host = args.host or settings.host
    port = settings.port if args.port is None else args.port
    say(f"installed {manager.file}")
    names = ", ".join(model.name for model in models)
    say(f"{names} served at http://{host}:{port}/v1, now and after each login")
    say(f"logs: {manager.logs}")
    if manager.note:
        say(manager.note)


def _absolute(name: str) -> str:
    """Return the absolute path of a model outside the store, any other name as it is."""
    model = model_store.resolve(name)
    return str(model.path.resolve()) if model.outside else name


def _show_status(manager: ServiceManager) -> None:
    if manager.is_installed:
        say(f"service: {manager.state()} ({manager.file})")
        say(f"logs: {manager.logs}")
    else:
        say("service: not installed; to install it, run: akunu serve --install")
    servers = running_servers()
    for server in servers:
        answers = ServerClient(server.url).has_token(server.token)
        state, names = "" if answers else ", does not answer", ", ".join(server.models)
        say(f"server: {server.url}/v1 serves {names} (process {server.process}{state})")
    if not servers:
        say("server: none is running")
