"""`akunu launch`: start a coding agent with a local model, leaving its files alone.

Some agents accept a model only in a file. Such files are private, in our own cache directory.
"""

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
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.arguments import add_model
from akunu_py.commands.serve import KEY_VARIABLE, default_models
from akunu_py.commands.servers import ServeProcess
from akunu_py.errors import AkunuError, NotAkunu, ServerGone, UsageError
from akunu_py.files import write_atomically
from akunu_py.models.store import model_store
from akunu_py.models.store.directories import store_errors
from akunu_py.parser import add_flags, add_values, positive
from akunu_py.serve.own.client import ServerClient
from akunu_py.settings import DEFAULT_PORT, serve_settings
from akunu_py.text import for_output, print_warnings, say

_NO_KEY = "none"  # clients require a key
_ANSWER, _CONTEXT = 8192, 32_768  # tokens; the context if it is unknown
_CLAUDE_ANSWER = 32_000  # tokens; the default of Claude Code
_CLAUDE_LEAST_WINDOW = 100_000  # tokens; Claude Code warns about a smaller auto-compact window
_CLAUDE_MODES = ("--permission-mode", "--dangerously-skip-permissions")
# Tokens of the first prompt without arguments, as measured for docs/serve.md.
FIRST_PROMPTS = {
    "claude": 12_500, "codex": 4_900, "opencode": 7_600, "pi": 1_500,
    "qwen": 14_000, "gptme": 9_600, "continue": 1_900,
}  # fmt: skip
_INSTALL = {
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "aider": "uv tool install --python 3.12 aider-chat",
    "claude": "npm install -g @anthropic-ai/claude-code",
    "pi": "npm install -g @earendil-works/pi-coding-agent",
    "qwen": "npm install -g @qwen-code/qwen-code",
    "gptme": "pipx install gptme",
    "continue": "npm install -g @continuedev/cli",
}
# Codex requires instructions with the metadata of a model.
_CODEX_INSTRUCTIONS = """\
You are a coding agent in the user's terminal. Work on the user's task until it is done.
Inspect files with shell commands before you change them. Prefer rg for searches. Make the smallest
change that solves the task, in the style of the code around it, and run the tests that cover it.
Never revert changes that are not yours. Do not commit unless the user requests it.
At the end, say in a few sentences what you changed, and what you could not check.
"""


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
    files: dict[Path, str] = field(default_factory=dict)  # to write before the start


def _file(name: str) -> Path:
    return paths.cache_dir() / "launch" / name


def _codex(served: ModelEndpoint) -> Launch:
    """Configure Codex. Source: its docs/config.md, codex-rs/protocol/src/openai_models.rs."""
    launch, provider = Launch(["codex"]), "model_providers.akunu"
    values: dict[str, Any] = {
        "model": served.model,
        "model_provider": "akunu",
        f"{provider}.name": "akunu",
        f"{provider}.base_url": f"{served.url}/v1",
        f"{provider}.wire_api": "responses",
        "web_search": "disabled",  # only OpenAI's servers run it
        "analytics.enabled": False,
    }
    if served.context:
        values["model_context_window"] = served.context
        # Without metadata, Codex warns at each start.
        catalog = _file("codex.json")
        values["model_catalog_json"] = str(catalog)
        launch.files[catalog] = json.dumps({"models": [_codex_model(served)]})
    if served.key:
        values[f"{provider}.env_key"] = KEY_VARIABLE
        launch.environment[KEY_VARIABLE] = served.key
    for name, value in values.items():
        launch.command.extend(["-c", f"{name}={json.dumps(value)}"])
    return launch


def _codex_model(served: ModelEndpoint) -> dict[str, Any]:
    return {
        "slug": served.model,
        "display_name": served.model,
        "description": "Served by akunu",
        "base_instructions": _CODEX_INSTRUCTIONS,
        "context_window": served.context,
        "max_context_window": served.context,
        "input_modalities": ["text"],
        "supported_reasoning_levels": [],
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "supports_parallel_tool_calls": True,
        "experimental_supported_tools": [],
        "shell_type": "default",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
    }


def _opencode(served: ModelEndpoint) -> Launch:
    """Configure OpenCode. Source: opencode.ai/docs/config and /docs/providers."""
    model: dict[str, Any] = {"name": served.model, "tool_call": True}
    if served.context:
        model["limit"] = {"context": served.context, "output": _answer_limit(served)}
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
        {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.key or _NO_KEY},
        {"AIDER_ANALYTICS": "false", "AIDER_CHECK_UPDATE": "false"},
    )


def _claude(served: ModelEndpoint) -> Launch:
    """Configure Claude Code. Source: docs.claude.com, "Model configuration", "LLM gateways"."""
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or _NO_KEY,
        "ANTHROPIC_API_KEY": "",  # Claude Code would send it, too
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


def _pi(served: ModelEndpoint) -> Launch:
    """Configure pi by an extension. Source: its docs/custom-provider.md."""
    model = {
        "id": served.model,
        "name": served.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": served.context or _CONTEXT,
        "maxTokens": _answer_limit(served),
        "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
    }
    provider = {
        "name": "akunu",
        "baseUrl": f"{served.url}/v1",
        "apiKey": f"${KEY_VARIABLE}",
        "api": "openai-completions",
        "models": [model],
    }
    extension = _file("pi.js")
    code = f'export default (pi) => pi.registerProvider("akunu", {json.dumps(provider)});\n'
    return Launch(
        ["pi", "-e", str(extension), "--provider", "akunu", "--model", served.model],
        {KEY_VARIABLE: served.key or _NO_KEY},
        {"PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
        files={extension: code},
    )


def _qwen(served: ModelEndpoint) -> Launch:
    """Configure Qwen Code. Source: its docs, "Settings" and "Model providers"."""
    environment = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": served.key or _NO_KEY}
    launch = Launch(["qwen", "--auth-type", "openai", "--model", served.model], environment)
    if served.context:
        settings = _file("qwen.json")
        window = {"contextWindowSize": served.context}
        launch.files[settings] = json.dumps({"model": {"generationConfig": window}})
        launch.defaults["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] = str(settings)
        launch.defaults["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(_answer_limit(served))
    return launch


def _gptme(served: ModelEndpoint) -> Launch:
    """Configure gptme. Source: gptme.org/docs/providers.html."""
    environment = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": served.key or _NO_KEY}
    defaults = {"GPTME_CONTEXT_LENGTH": str(served.context)} if served.context else {}
    return Launch(["gptme", "--model", f"local/{served.model}"], environment, defaults)


def _continue(served: ModelEndpoint) -> Launch:
    """Configure Continue's command line. Source: docs.continue.dev/reference."""
    model: dict[str, Any] = {
        "name": served.model,
        "provider": "openai",
        "model": served.model,
        "apiBase": f"{served.url}/v1",
        "apiKey": served.key or _NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    if served.context:
        options = {"contextLength": served.context, "maxTokens": _answer_limit(served)}
        model["defaultCompletionOptions"] = options
    config = {"name": "akunu", "version": "1.0.0", "schema": "v1", "models": [model]}
    file = _file("continue.yaml")  # JSON is YAML
    command, defaults = ["cn", "--config", str(file)], {"CONTINUE_METRICS_ENABLED": "0"}
    return Launch(command, defaults=defaults, files={file: json.dumps(config)})


def _answer_limit(served: ModelEndpoint) -> int:
    """Return the maximum tokens of an answer, for clients that reserve them."""
    return min(_ANSWER, (served.context or _CONTEXT) // 4)


CLIENTS: dict[str, Callable[[ModelEndpoint], Launch]] = {
    "codex": _codex,
    "opencode": _opencode,
    "aider": _aider,
    "claude": _claude,
    "pi": _pi,
    "qwen": _qwen,
    "gptme": _gptme,
    "continue": _continue,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    about = f"Agent to start: {', '.join(CLIENTS)}"
    parser.add_argument("client", metavar="AGENT", choices=[*CLIENTS], help=about)
    add_model(parser, "that of the running server, or as in the settings")
    port = f"Port of the server (default: as for akunu serve, or {DEFAULT_PORT})"
    add_values(parser, ("--port", "N", positive, None, port))
    add_flags(parser, ("--print", "Print the command without running it"))
    parser.epilog = "Arguments after -- go to the agent."


def run(args: argparse.Namespace) -> int:
    settings = serve_settings()
    args.port = args.port or settings.port or DEFAULT_PORT
    url, key = f"http://127.0.0.1:{args.port}", settings.api_key
    wanted = model_store.resolve(args.model).name if args.model else ""
    found = find_server(url, key, wanted)
    if not wanted:
        wanted = found.model if found else default_models(settings)[0].name
    launch = _prepare(args, found or ModelEndpoint(url, wanted, key=key))
    if args.print:
        values = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
        print(for_output(" ".join([*values, shlex.join(launch.command)])))
        return 0
    if found is not None and found.model != wanted:
        raise UsageError(
            f"{url} serves {found.model}, not {wanted}; leave out --model, or use another --port"
        )
    name = launch.command[0]
    if shutil.which(name) is None:
        raise UsageError(f"{name} is not installed; to install it, run: {_INSTALL[args.client]}")
    with contextlib.nullcontext(found) if found else temporary_server(args, url, key) as served:
        warnings = []
        if 0 < served.context < (prompt := FIRST_PROMPTS.get(args.client, 0)):
            warnings = [
                f"{name} begins with about {prompt:,} tokens, but {served.model} has a context of "
                f"{served.context:,}: its first prompt will not fit; use another model"
            ]
        print_warnings(warnings)
        code = _wait(_prepare(args, served))
        print_warnings(warnings)  # The client may have covered the first one, and shown nothing.
        return code


def _prepare(args: argparse.Namespace, served: ModelEndpoint) -> Launch:
    launch = CLIENTS[args.client](served)
    for path, text in launch.files.items():
        with store_errors("cannot write the client's configuration", "XDG_CACHE_HOME"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
    names = {argument.partition("=")[0] for argument in args.rest}
    mode = () if names.intersection(_CLAUDE_MODES) else launch.mode
    defaults = {name: value for name, value in launch.defaults.items() if name not in os.environ}
    return Launch([*launch.command, *mode, *args.rest], launch.environment | defaults)


def _wait(launch: Launch) -> int:
    process = subprocess.Popen(launch.command, env={**os.environ, **launch.environment})
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the terminal sends it to the client, too
            return process.wait()


def find_server(url: str, key: str, name: str = "") -> ModelEndpoint | None:
    """Return the server at `url`, with model `name` or its first, or None. Raises UsageError."""
    try:
        models = ServerClient(url, key).models()
        model = next((each for each in models if each["id"] == name), models[0])
        return ModelEndpoint(url, str(model["id"]), int(model["context_length"]), key)
    except ServerGone:
        return None
    except (NotAkunu, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"the program at {url} is not an akunu server; use another port: --port N"
        ) from error
    except AkunuError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def temporary_server(args: argparse.Namespace, url: str, key: str) -> Iterator[ModelEndpoint]:
    say(f"starting a server at {url}", error=True)
    options = ["--model", args.model] if args.model else []
    process = ServeProcess(["--port", str(args.port), *options])
    try:
        yield process.wait_for(lambda: find_server(url, key), threading.Event())
    finally:
        process.stop()
