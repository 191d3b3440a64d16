"""`akunu serve`: serve models over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.arguments import add_drafting, add_hosts, add_loading, as_arguments, loading_from
from akunu_py.engine.load import find_model
from akunu_py.errors import HostLost, UsageError
from akunu_py.interrupts import exit_without_teardown
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from akunu_py.parser import add_flags, add_values, amount, count, positive
from akunu_py.serve.own.client import RunningServer, ServerClient, loopback_url, running_servers
from akunu_py.serve.own.system_service import (
    ServiceCommand,
    ServiceManager,
    own_environment,
    service_manager,
)
from akunu_py.settings import DEFAULT_PORT, ServeSettings, load_settings, serve_settings
from akunu_py.text import print_warnings, say
from akunu_py.types import GenerateOptions, LoadOptions

if TYPE_CHECKING:
    from akunu_py.engine.loop import StepLoop
    from akunu_py.serve.http.model_pool import ModelPool
    from akunu_py.serve.http.server import ServeOptions

KEY_VARIABLE = "AKUNU_API_KEY"
_END_S = 9.0  # for shutdown after --grace, once stdin is closed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Without --model, --host, --port or --api-key, the values of AKUNU_MODEL, AKUNU_HOST, "
        "AKUNU_PORT and AKUNU_API_KEY apply, then those under [serve] in settings.toml."
    )
    model = "Model to serve; repeatable: requests name one, and unknown names mean the first "
    alias = "Additional name of a model (default: of the first) in requests; repeatable"
    add_values(
        parser,
        ("--model", "NAME_OR_PATH", str, None, f"{model}(default: as in the settings)"),
        ("--alias", "NAME[=MODEL]", str, None, alias),
        action="append",
    )
    embedding = "Model for embeddings, such as Qwen3-Embedding (default: none)"
    add_values(parser, ("--embedding-model", "NAME_OR_PATH", str, None, embedding))
    service = parser.add_argument_group(
        "service", "Run at each login, by launchd or systemd. See docs/install.md."
    ).add_mutually_exclusive_group()
    add_flags(
        service,
        ("--install", "Install and start the service, with the other options"),
        ("--uninstall", "Stop and remove the service"),
        ("--status", "Show the service and all running servers"),
    )
    access = parser.add_argument_group("network")
    add_values(
        access,
        ("--host", "ADDRESS", str, None, "Address to listen on (default: 127.0.0.1)"),
        ("--port", "N", int, None, f"Port; 0: any free port (default: {DEFAULT_PORT})"),
        ("--api-key", "KEY", str, None, f"Required API key (default: the value of {KEY_VARIABLE})"),
    )
    cors = "Website that may send requests; * for all; repeatable"
    add_values(access, ("--cors", "ORIGIN", str, None, cors), action="append")
    add_values(
        parser.add_argument_group("generation", "Defaults for requests that do not set them."),
        ("--temperature", "T", amount, None, "Sampling temperature (default: the model's, or 1)"),
        ("--max-tokens", "N", positive, None, "Maximum tokens (default: up to the context length)"),
        ("--thinking-budget", "N", count, None, "Maximum thinking tokens (default: no limit)"),
    )
    add_values(
        parser,
        ("--grace", "S", amount, 20.0, "Grace period for running requests on shutdown, in seconds"),
        ("--idle", "MIN", amount, 30.0, "Minutes without requests before unloading; 0: never"),
    )
    strict = "Refuse requests with fields that have no effect, or with unknown names of models"
    add_flags(
        parser,
        ("--strict", strict),
        ("--quiet", "Do not log requests"),
        ("--log-content", "Log the content of requests and answers"),
        ("--until-eof", "Shut down when stdin is closed"),
    )
    add_drafting(parser.add_argument_group("drafting"), tree=True)
    add_loading(parser)
    add_hosts(parser)


def run(args: argparse.Namespace) -> int:
    if args.install or args.uninstall or args.status:
        return manage_service(args)
    settings = serve_settings()
    args.host = settings.host if args.host is None else args.host
    args.port = settings.port if args.port is None else args.port
    models = served_models(args, settings)
    embedding = None
    if args.embedding_model:
        embedding = model_store.check(model_store.resolve(args.embedding_model))
    loading_from(args)  # fail before taking the port
    if args.until_eof:
        threading.Thread(target=_exit_on_eof, args=(args.grace,), name="stdin", daemon=True).start()
    if not 0 <= args.port < 65536:
        raise UsageError(f"expected a port from 0 to 65535, got {args.port}")
    key = settings.api_key if args.api_key is None else args.api_key
    _check_key(args.host, key, f"{KEY_VARIABLE} or --api-key")
    from akunu_py.serve.http.server import listen, serve

    # A process cannot connect to hosts twice.
    idle_s = args.idle * 60.0 if args.idle > 0 and not args.hosts else None
    warnings: list[str] = []  # of all loads
    lost = threading.Event()

    def shut_down(error: HostLost, reported: bool) -> None:
        """Fail the waiting requests, then shut down as on SIGTERM."""
        lost.set()
        if not reported:
            pool.abandon(error)
        os.kill(os.getpid(), signal.SIGTERM)

    with listen(args.host, args.port) as listening:
        port = listening.getsockname()[1]
        url = _url(args.host, port)
        options = _options(args, key, models, url)
        pool = _pool(args, models, options, idle_s, warnings, shut_down, embedding)
        serve(pool, listening, options, f"{url}/v1")
    print_warnings(warnings)
    if lost.is_set():
        _restart()
    return 0


def _check_key(host: str, key: str, place: str) -> None:
    """Raise UsageError for a server without a key if its host is unknown or not loopback.

    place: where to set the key.
    """
    from akunu_py.serve.http.guard import is_loopback

    if key or is_loopback(host):
        return
    try:
        socket.getaddrinfo(host or None, 0)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host}: {reason}") from error
    raise UsageError(
        f"other machines can reach host {host!r}: set an API key ({place}), or leave out --host"
    )


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def served_models(args: argparse.Namespace, settings: ServeSettings) -> list[StoredModel]:
    """Return the models to serve, without duplicates. Raises UsageError, UnknownModel."""
    found = [find_model(name, "") for name in args.model or ()] or default_models(settings)
    models = {model.name: model for model in found}
    if len({model.path.resolve() for model in found}) > len(models):
        raise UsageError(f"two of the models have the same name: {', '.join(models)}")
    if len(models) > 1 and args.hosts:
        raise UsageError("--hosts serves one model; leave out the other --model options")
    return list(models.values())


def default_models(settings: ServeSettings) -> list[StoredModel]:
    """Return the models of the environment or settings.toml. Raises UnknownModel, DamagedModel."""
    source = "AKUNU_MODEL" if os.environ.get("AKUNU_MODEL") else ""
    return [find_model(None, name, source) for name in settings.models or [load_settings().model]]


def _options(
    args: argparse.Namespace, key: str, models: Sequence[StoredModel], url: str
) -> ServeOptions:
    from akunu_py.serve.http.guard import AccessRules
    from akunu_py.serve.http.server import ServeOptions

    access = AccessRules(args.host, key, tuple(args.cors or ()), secrets.token_hex(16))
    paths = {model.name: str(model.path.resolve()) for model in models}
    running = RunningServer(loopback_url(url), access.token, paths, args.weights, args.kv_bits)
    return ServeOptions(
        access=access,
        defaults=GenerateOptions(
            draft=args.draft,
            draft_tokens=args.draft_tokens,
            draft_tree=args.draft_tree,
            thinking_budget=args.thinking_budget,
        ),
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        grace_s=args.grace,
        quiet=args.quiet,
        log_content=args.log_content,
        strict=args.strict,
        running=running,
    )


def _pool(
    args: argparse.Namespace,
    models: Sequence[StoredModel],
    options: ServeOptions,
    idle_s: float | None,
    warnings: list[str],
    on_lost: Callable[[HostLost, bool], None],
    embedding: StoredModel | None,
) -> ModelPool:
    """Return the models, not loaded, with their aliases. Raises UsageError."""
    from akunu_py.serve.http.model_pool import ModelPool, ServedModel

    names = {model.name: [model.name] for model in models}
    for alias in args.alias or ():
        name, owner = alias.rsplit("=", 1) if "=" in alias else (alias, models[0].name)
        if owner not in names:
            raise UsageError(
                f"--alias {alias}: unknown model {owner!r}; models: {', '.join(names)}"
            )
        names[owner].append(name)
    served = [
        ServedModel(
            tuple(dict.fromkeys(names[model.name])),
            partial(_load, args, model, warnings, on_lost, len(models) > 1),
            options.service,
            idle_s=idle_s,
            context_length=_context_length(args, model),
        )
        for model in models
    ]
    if embedding is None:
        return ModelPool(served)
    load, length = partial(_load_embedding, args, embedding), _context_length(args, embedding)
    embedder = ServedModel(
        [embedding.name], load, options.service, idle_s=idle_s, context_length=length
    )
    return ModelPool(served, embedder)


def _load(
    args: argparse.Namespace,
    model: StoredModel,
    warnings: list[str],
    on_lost: Callable[[HostLost, bool], None],
    has_others: bool,
    reserved: int,
) -> StepLoop:
    """Load a model; call in the thread of its host. reserved: see `LoadOptions`."""
    from akunu_py.engine.load import open_model

    options, settings = replace(loading_from(args), reserved=reserved), load_settings()
    if has_others and options.draft_model:  # for the models with the same tokenizer
        settings = replace(settings, draft_model=options.draft_model)
        options = replace(options, draft_model=None)
    # Again, because its files may have changed; other programs' models have no name in the path.
    found = replace(model_store.resolve(model.reference), name=model.name)
    keep = not args.no_answer_cache
    engine, learned = open_model(
        found, options, answer_cache=keep, settings=settings, warnings=warnings
    )
    from akunu_py.engine.loop import StepLoop

    if engine.host_group is not None:
        engine.host_group.on_lost = on_lost
    loop = StepLoop(engine, learned)
    if not loop.runner.try_batching():  # decided here, so that no request waits for the trial
        print_warnings([f"requests to {engine.name} take turns: {loop.runner.not_batched}"])
    return loop


def _context_length(args: argparse.Namespace, model: StoredModel) -> int:
    return min(args.context or model.context_length, model.context_length)


def _load_embedding(args: argparse.Namespace, model: StoredModel, reserved: int) -> StepLoop:
    """Load the embedding model; call in the thread of its host. reserved: see `LoadOptions`."""
    from akunu_py.engine.load import load_stored
    from akunu_py.engine.loop import StepLoop

    options = LoadOptions(
        args.weights,
        context=_context_length(args, model) or None,
        force=args.force,
        prompt_cache_memory=0,
        memory_limit=args.memory_limit,
        reserved=reserved,
        draft_model="",
        kernels=args.kernels,
    )
    return StepLoop(load_stored(model, options))


def _exit_on_eof(grace: float) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace + _END_S)
    exit_without_teardown(1)


def _restart() -> None:
    """Replace this process, which cannot connect to hosts twice."""
    from akunu_py.workarounds.ring_output import restore_stderr

    print_warnings(["another host was lost; restarting"])
    restore_stderr()
    os.execv(sys.executable, sys.orig_argv)


def manage_service(args: argparse.Namespace) -> int:
    manager = service_manager()
    if args.install:
        _install(manager, args)
    elif args.uninstall:
        removed = manager.uninstall()
        say(f"removed {manager.file}" if removed else "the service is not installed")
    else:
        _show_status(manager)
    return 0


def _install(manager: ServiceManager, args: argparse.Namespace) -> None:
    if "/Cellar/" in sys.prefix:
        raise UsageError("Homebrew manages this installation; run: brew services start akunu")
    settings, key = serve_settings(), load_settings().serve.api_key
    if args.api_key is not None or settings.api_key != key:
        raise UsageError(
            f"a service gets neither --api-key nor {KEY_VARIABLE}; set api_key under [serve] in "
            "settings.toml, which is private"
        )
    if args.until_eof:
        raise UsageError("--until-eof cannot be combined with --install: a service has no stdin")
    host = settings.host if args.host is None else args.host
    _check_key(host, key, "api_key under [serve] in settings.toml")
    loading_from(args)
    models = served_models(args, settings)
    # A service has another working directory.
    args.model = [_absolute(name) for name in args.model or ()] or None
    for name in ("embedding_model", "draft_model"):
        if value := getattr(args, name):
            setattr(args, name, _absolute(value))
    if args.hosts and Path(args.hosts).exists():
        args.hosts = str(Path(args.hosts).resolve())
    args.install = False
    manager.install(ServiceCommand(tuple(as_arguments(args, add_options)), own_environment()))
    port = settings.port if args.port is None else args.port
    url = _url(host, port)
    say(f"installed {manager.file}")
    names = ", ".join(model.name for model in models)
    say(f"{names} served at {url}/v1, now and after each login")
    say(f"logs: {manager.logs}")
    if manager.note:
        say(manager.note)


def _absolute(name: str) -> str:
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
