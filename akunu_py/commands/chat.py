"""`akunu chat`: open the chat; a missing default model is downloaded while it is open."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from akunu_py import crashes, paths
from akunu_py.arguments import add_generation, add_hosts, check_hosts, loading_from, options_from
from akunu_py.commands.servers import HostsServer, add_server, is_address, model_name_at, server_for
from akunu_py.engine.load import with_settings
from akunu_py.errors import AkunuError, UnknownModel, UsageError
from akunu_py.interrupts import exit_without_teardown
from akunu_py.mcp.config import read_servers
from akunu_py.models.store import model_store
from akunu_py.paths import shell_command
from akunu_py.settings import Settings, read_settings, settings_file
from akunu_py.text import print_warnings, say
from akunu_py.types import DEFAULT_MODEL

if TYPE_CHECKING:
    from akunu_py.engine.job import ModelLoop
    from akunu_py.tui.app import ChatApp
    from akunu_py.tui.workers.chat_client import ChatClient
    from akunu_py.tui.workers.store_thread import StoreThread

_ID_DIGITS = 8  # shown of a conversation's id, as in `akunu chats list`
_TIMEOUT_S = 2.0  # for a running decode step; loading a model takes longer


def add_options(parser: argparse.ArgumentParser) -> None:
    model = "Model name or path (default: the model in the settings)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=model)
    parser.add_argument(
        "--continue", dest="latest", action="store_true", help="Continue the most recent chat"
    )
    words = "Resume the chat with this id or these words; without words, choose from a list"
    parser.add_argument("--resume", nargs="*", metavar="WORD", help=words)
    add_generation(parser, chat=True)
    add_server(parser)
    add_hosts(parser)


def run(args: argparse.Namespace) -> int:
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError("chat needs a terminal; for scripts use: akunu run")
    settings, problems = read_settings()
    hosts_server = start_hosts_server(args)
    server = "off" if hosts_server else args.server or settings.server
    model: model_store.StoredModel | None = None
    if is_address(server):
        name = model_name_at(server, args.model)
    else:
        name, model = usable_model(settings, problems, args.model)
    problems += check_draft_model(args)
    if args.temperature is None:
        args.temperature = settings.temperature
    args.max_tokens = args.max_tokens or settings.token_limit
    if args.thinking_budget is None:
        args.thinking_budget = settings.thinking_limit
    options = options_from(args)

    from akunu_py.tui.app import ChatApp, ChatConfig, load_state, save_state
    from akunu_py.tui.controllers.library import Resume
    from akunu_py.tui.terminal import background as ask_background
    from akunu_py.tui.workers.store_thread import StoreThread
    from akunu_py.tui.workers.tool_servers import ToolServers

    server_configs, wrong = read_servers()
    problems += wrong
    tools = ToolServers(server_configs)
    warnings: list[str] = []  # of all models loaded in this process
    session = chat_client(args, settings, name, model, server, warnings, hosts_server)
    store_thread = StoreThread(paths.conversations_file())
    state = load_state(paths.chat_file())
    app = ChatApp(
        ChatConfig(
            name,
            options,
            session,
            store_thread,
            replace(settings, temperature=args.temperature),
            background=ask_background(),
            missing=model is None and not is_address(server),
            memory_limit=with_settings(loading_from(args), settings).memory_limit,
            problems=problems,
            resume=Resume(" ".join(args.resume or ()), last=args.latest)
            if args.latest or args.resume is not None
            else None,
            state=state,
            server=server if is_address(server) else "",
            tools=tools,
        )
    )
    app.run()
    save_state(paths.chat_file(), app.state, state)
    if app.failure is not None:
        crashes.report(app.failure, debug="debug" in args)
    loading = session.is_loading
    all_saved = close_store(app, store_thread)
    if hosts_server is not None:
        hosts_server.close()
    closed = [close(_TIMEOUT_S) for close in (app.downloads.close, session.close, tools.close)]
    code = app.return_code or int(not all_saved)
    all_closed = all_saved and all(closed)
    if all_closed:
        print_warnings(warnings)
    if loading or not all_closed:  # MLX's threads may still run after a load
        exit_without_teardown(code)  # the screen is restored and everything is written
    return code


def close_store(app: ChatApp, store_thread: StoreThread) -> bool:
    """Save the chat and print how to resume it; return False if saving fails."""
    if not store_thread.close(_TIMEOUT_S):
        why = store_thread.error or "the disk does not respond"
        print_warnings([f"some messages could not be saved: {why}"])
        return False
    if app.conversation.turns and not app.conversation.is_private:
        name = app.conversation.tree.conversation[:_ID_DIGITS]
        say(f"to continue this chat: {shell_command()} --resume {name}", error=True)
    return True


def start_hosts_server(args: argparse.Namespace) -> HostsServer | None:
    """Return the server for --hosts, None without it. Raises UsageError for conflicting options."""
    if not args.hosts:
        return None
    check_hosts(args.hosts, server=args.server)
    loading_from(args)
    from akunu_py.engine.hosts.hostfile import read_hosts

    read_hosts(args.hosts)
    return HostsServer(args)


def usable_model(
    settings: Settings, problems: list[str], requested: str | None
) -> tuple[str, model_store.StoredModel | None]:
    """Return the model's name and files; the files are None if it must be downloaded first.

    An unusable model in the settings or on the command line (`requested`) is added to `problems`,
    and the default model replaces it.
    """
    name = requested or settings.model
    try:
        if name != DEFAULT_MODEL:
            model = model_store.check(model_store.resolve(name))
            return model.name, model
    except AkunuError as error:
        unknown = isinstance(error, UnknownModel)
        why = f"model {name!r} is not installed" if unknown else str(error)
        where = "" if requested else f"{settings_file()}: "
        problems.append(f"{where}{why}; using {DEFAULT_MODEL} instead; press F4 for other models")
    return DEFAULT_MODEL, model_store.find_intact(DEFAULT_MODEL)


def chat_client(
    args: argparse.Namespace,
    settings: Settings,
    name: str,
    model: model_store.StoredModel | None,
    server: str,
    warnings: list[str],
    hosts_server: HostsServer | None,
) -> ChatClient:
    """Return the client whose models are loaded here or run on a server.

    name, model: the first model, and its files if installed. server: the value of --server; an
    address serves the first model only, the others use "auto". hosts_server: serves all models.
    """
    from akunu_py.tui.workers.chat_client import ChatClient

    def load(model_name: str) -> ModelLoop:  # in the model's thread: MLX takes seconds to import
        loading, stored = loading_from(args), model
        if is_address(server) and model_name == name:  # it may not be installed here
            found = server_for(server, model_name, None, loading)
        else:
            if stored is None or model_name != stored.name:
                stored = model_store.resolve(model_name)
            choice = "auto" if is_address(server) else server
            found = (
                hosts_server.connect(stored)
                if hosts_server
                else server_for(choice, model_name, stored, loading)
            )
        if found is not None:
            from akunu_py.serve.own.remote_loop import RemoteLoop

            client, served = found
            may_store = settings.answer_cache and not args.no_answer_cache
            return RemoteLoop(client, served.model, may_store=may_store)
        from akunu_py.engine.load import open_model

        opened = open_model(
            stored or model_name,
            loading,
            answer_cache=not args.no_answer_cache,
            settings=settings,
            warnings=warnings,
            prints_note=False,
        )
        from akunu_py.engine.loop import StepLoop

        return StepLoop(*opened, 1)

    return ChatClient(name, load, settings.unload_s)


def check_draft_model(args: argparse.Namespace) -> list[str]:
    """Return why the model of --draft-model cannot be used, and drop it; [] if it can."""
    if args.draft_model:
        try:
            model_store.check(model_store.resolve(args.draft_model))
        except AkunuError as error:
            args.draft_model = ""
            return [f"--draft-model is not used: {error}"]
    return []
