"""`akunu launch`: start a coding agent with a local model, without changing its files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from akunu_py.arguments import add_model
from akunu_py.commands.serve import KEY_VARIABLE
from akunu_py.commands.servers import ServeProcess
from akunu_py.errors import AkunuError, ServerGone, UsageError
from akunu_py.models.store import model_store
from akunu_py.parser import add_values, positive
from akunu_py.serve.own.client import ServerClient
from akunu_py.settings import DEFAULT_PORT, load_settings, serve_settings
from akunu_py.text import for_output, print_warnings, say

_NO_KEY = "none"  # clients require a key
_CLAUDE_ANSWER = 32_000  # tokens; the default of Claude Code
_CLAUDE_LEAST_WINDOW = 100_000  # tokens; Claude Code warns about a smaller auto-compact window
_CLAUDE_MODES = ("--permission-mode", "--dangerously-skip-permissions")


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """A server and its model."""

    url: str
    model: str
    context: int = 0  # tokens; 0: unknown
    key: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """The command of a client, and its additional environment variables."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)  # variables that the user may set
    mode: tuple[str, ...] = ()  # arguments, unless the user passes one of `_CLAUDE_MODES`


def _codex(served: ModelEndpoint) -> Launch:
    """Configure Codex. Only OpenAI's servers run its web search. Source: docs/config.md."""
    provider = "model_providers.akunu"
    values: dict[str, Any] = {
        "model": served.model,
        "model_provider": "akunu",
        f"{provider}.name": "akunu",
        f"{provider}.base_url": f"{served.url}/v1",
        f"{provider}.wire_api": "responses",
        "web_search": "disabled",
        "analytics.enabled": False,
    }
    if served.context:
        values["model_context_window"] = served.context
    if served.key:
        values[f"{provider}.env_key"] = KEY_VARIABLE
    options = [
        part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")
    ]
    return Launch(["codex", *options], {KEY_VARIABLE: served.key} if served.key else {})


def _opencode(served: ModelEndpoint) -> Launch:
    """Configure OpenCode. Source: opencode.ai/docs/config and /docs/providers."""
    model: dict[str, Any] = {"name": served.model, "tool_call": True}
    if served.context:
        answer = min(8192, served.context // 4)
        model["limit"] = {"context": served.context, "output": answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "akunu",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key or _NO_KEY},
        "models": {served.model: model},
    }
    name = f"akunu/{served.model}"
    config = {
        "model": name,
        "small_model": name,
        "share": "disabled",
        "autoupdate": False,
        "provider": {"akunu": provider},
    }
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(served: ModelEndpoint) -> Launch:
    """Configure Aider. Source: aider.chat/docs/llms/openai-compat.html."""
    return Launch(
        ["aider", "--model", f"openai/{served.model}", "--no-show-model-warnings"],
        {
            "OPENAI_API_BASE": f"{served.url}/v1",
            "OPENAI_API_KEY": served.key or _NO_KEY,
        },
        {"AIDER_ANALYTICS": "false", "AIDER_CHECK_UPDATE": "false"},
    )


def _claude(served: ModelEndpoint) -> Launch:
    """Configure Claude Code. Source: docs.claude.com, "Model configuration", "LLM gateways"."""
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or _NO_KEY,
    }
    defaults = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Both change the prompt with every request.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
    }
    sizes = ("FABLE", "OPUS", "SONNET", "HAIKU")
    models = [*(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in sizes), "CLAUDE_CODE_SUBAGENT_MODEL"]
    defaults |= dict.fromkeys(models, served.model)
    if served.context:
        # The client compacts 13,000 tokens and an answer before the end of the context.
        tokens = {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": served.context,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": min(_CLAUDE_ANSWER, served.context // 8),
        }
        if served.context >= _CLAUDE_LEAST_WINDOW:
            tokens["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = served.context
        defaults |= {name: str(value) for name, value in tokens.items()}
    # Its auto mode lets servers of its maker check each action; the first one would fail.
    mode = ("--permission-mode", "default")
    return Launch(["claude", "--model", served.model], environment, defaults, mode)


CLIENTS: dict[str, Callable[[ModelEndpoint], Launch]] = {
    "codex": _codex,
    "opencode": _opencode,
    "aider": _aider,
    "claude": _claude,
}


# Tokens of the first prompt without arguments, as measured for docs/serve.md.
FIRST_PROMPTS = {"codex": 9_100, "opencode": 7_600, "claude": 12_400}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", choices=[*CLIENTS], help="Agent to start")
    add_model(parser, "that of the running server, or as in the settings")
    port = f"Port of the server (default: as for akunu serve, or {DEFAULT_PORT})"
    add_values(parser, ("--port", "N", positive, None, port))
    parser.add_argument(
        "--print", action="store_true", dest="show", help="Print the command without running it"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="ARGUMENT", help="Arguments of the agent, after --"
    )


def run(args: argparse.Namespace) -> int:
    settings = serve_settings()
    args.port = args.port or settings.port
    url, key = f"http://127.0.0.1:{args.port}", settings.api_key
    wanted = model_store.resolve(args.model).name if args.model else ""
    found = find_server(url, key, wanted)
    if not wanted:
        first = (settings.models or [load_settings().model])[0]
        wanted = found.model if found else model_store.resolve(first).name
    launch = _launch(args, found or ModelEndpoint(url, wanted, key=key))
    if args.show:
        print(for_output(shell_command(launch)))
        return 0
    if found is not None and found.model != wanted:
        raise UsageError(
            f"{url} serves {found.model}, not {wanted}; leave out --model, or use another --port"
        )
    name = launch.command[0]
    if shutil.which(name) is None:
        raise UsageError(f"{name} is not installed; install it and try again")
    with contextlib.nullcontext(found) if found else temporary_server(args, url, key) as served:
        if 0 < served.context < (prompt := FIRST_PROMPTS.get(name, 0)):
            warning = (
                f"{name} begins with about {prompt:,} tokens, but {served.model} has a context of "
                f"{served.context:,}: its first prompt will not fit; use another model"
            )
            print_warnings([warning])
        return _wait(_launch(args, served))


def _launch(args: argparse.Namespace, served: ModelEndpoint) -> Launch:
    launch = CLIENTS[args.client](served)
    names = {argument.partition("=")[0] for argument in args.rest}
    mode = () if names.intersection(_CLAUDE_MODES) else launch.mode
    defaults = {name: value for name, value in launch.defaults.items() if name not in os.environ}
    return Launch([*launch.command, *mode, *args.rest], launch.environment | defaults)


def shell_command(launch: Launch) -> str:
    """Return the shell command of a launch."""
    values = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return " ".join([*values, shlex.join(launch.command)])


def _wait(launch: Launch) -> int:
    """Run the client and return its exit code."""
    process = subprocess.Popen(launch.command, env={**os.environ, **launch.environment})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal sends it to the client, too
            continue


def find_server(url: str, key: str, name: str = "") -> ModelEndpoint | None:
    """Return the server at `url`, or None. Raises UsageError for a wrong key or another program.

    name: the model to use, if the server has it (default: its first).
    """
    try:
        models = ServerClient(url, key).models()
        model = next((each for each in models if each["id"] == name), models[0])
        return ModelEndpoint(url, str(model["id"]), int(model["context_length"]), key)
    except ServerGone:
        return None
    except AkunuError as error:
        raise UsageError(str(error)) from error
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(f"the server at {url} is not akunu; use another --port") from error


@contextlib.contextmanager
def temporary_server(args: argparse.Namespace, url: str, key: str) -> Iterator[ModelEndpoint]:
    """Start a server for the duration of the block."""
    say(f"starting a server at {url}", error=True)
    options = ["--model", args.model] if args.model else []
    process = ServeProcess(["--port", str(args.port), *options])
    try:
        yield process.wait_for(lambda: find_server(url, key), threading.Event())
    finally:
        process.stop()
