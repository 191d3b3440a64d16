"""Keeps what real clients ask, for CI to ask it again: `python -m tests.serve.record CLIENT ...`.

The clients must be installed: PYTHON_CLIENTS names a Python with openai, anthropic, litellm and
llm; aider, codex and opencode are found on PATH. Each talks to the real server on loopback, and
exits well or the recording fails. The packages have the starter call a tool (`tool_choice`). What
agents say first is too long for it: they get a tiny model of random weights that reads its tokens.
Where a tool that does no harm is offered and has no result yet, that one's answer is a call of it,
which no such model would make by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from akunu_py.commands.launch import CLIENTS, Launch, ModelEndpoint
from akunu_py.decoding.events import (
    Event,
    Finished,
    PromptProcessed,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.generate.job import Job
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.models.store import model_store
from akunu_py.serve.http.asgi import create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.record import RequestRecords
from akunu_py.serve.http.request_handler import run_job
from akunu_py.serve.http.server import ServedModel, ServeOptions, listen
from akunu_py.types import GenerateOptions, Stats
from tests.support.serving import LONG_CONTEXT, write_long_model

REQUESTS = Path(__file__).with_name("requests")
MODEL = "tiny"
_AGENTS = ("codex", "codex_by_hand", "opencode", "opencode_messages")
_KEPT_HEADERS = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta")
_LONGEST = 240  # characters of a text that are kept
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Tools that do no harm, and what they are called with.
_HARMLESS: dict[str, dict[str, Any]] = {
    "weather": {"city": "Paris"},  # of llm
    "get_goal": {},
    "glob": {"pattern": "*.py"},
}
_call: ContextVar[tuple[str, str] | None] = ContextVar("call", default=None)


def _offered(body: dict[str, Any]) -> Iterator[str]:
    for tool in body.get("tools") or []:
        name = tool.get("name") or tool.get("function", {}).get("name")
        if name in _HARMLESS:
            yield name


def _wanted_call(body: dict[str, Any]) -> tuple[str, str] | None:
    """The call that is the answer, by its name and its arguments."""
    text = json.dumps(body)
    results = ('"tool_result"', '_call_output"', '"role": "tool"')
    name = next(_offered(body), None)
    choice = body.get("tool_choice")
    chosen = isinstance(choice, dict) and choice["type"] != "auto"
    if name is None or chosen or any(each in text for each in results):
        return None
    return name, json.dumps(_HARMLESS[name])


class Recorder:
    """ASGI middleware: keeps what is posted, and says which of it is answered with a call."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        data, more = b"", True
        while more:
            message = await receive()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(data)
        _call.set(_wanted_call(body))
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept: dict[str, Any] = {
            "path": scope["path"],
            "headers": {name: headers[name] for name in _KEPT_HEADERS if name in headers},
            "body": _plain(body),
        }
        self.requests.append(kept)
        given = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept["status"] = message["status"]
            elif kept["status"] != 200:
                print(scope["path"], kept["status"], message.get("body", b"")[:500].decode())
            await send(message)

        await self._app(scope, again, watched)


def _plain(value: Any) -> Any:
    """Without what tells one run from another, and without long texts."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, str):
        return value
    value = _UUID.sub("00000000-0000-0000-0000-000000000000", value)
    value = value.replace(str(Path.cwd()), "/project").replace(tempfile.gettempdir(), "/tmp")
    return value if len(value) <= _LONGEST else value[:_LONGEST] + " [...]"


async def _answer(
    scheduler: ModelHost, job: Job, client: str, short: bool
) -> AsyncGenerator[Event]:
    """The model's own answer, or a call behind the prompt that it really read."""
    call = _call.get()
    stats = Stats()
    async with contextlib.aclosing(run_job(scheduler, job, client=client, short=short)) as events:
        async for event in events:
            if isinstance(event, Finished):  # random weights find no end
                event = replace(event, reason="stop")
            yield event
            if call is not None and isinstance(event, PromptProcessed):
                stats.prompt_tokens, stats.cached_tokens = event.prompt_tokens, event.cached_tokens
                break
    if call is not None and stats.prompt_tokens:
        name, arguments = call
        stats.generated_tokens = 9
        yield ToolCallStarted("call_000000000000000000000001", name)
        for part in (arguments[:5], arguments[5:]):
            yield ToolCallArguments(part)
        yield ToolCallFinished()
        yield Finished("stop", stats)


@contextlib.contextmanager
def recording(directory: Path) -> Iterator[tuple[str, Recorder]]:
    """A server of the tiny model; its address, and what keeps its requests."""
    scheduler = ModelHost(lambda: Session(Engine.load(directory, name=MODEL)))
    options = ServeOptions(
        (MODEL,), AccessRules(), GenerateOptions(), temperature=0.0, max_tokens=16
    )
    model = ServedModel(scheduler, options)

    def run(job: Job, client: str, short: bool) -> AsyncGenerator[Event]:
        return _answer(scheduler, job, client, short)

    recorder = Recorder(
        create_app(replace(model.backend(RequestRecords()), run=run), AccessRules())
    )
    scheduler.start()
    with listen("127.0.0.1", 0) as listening:
        server = uvicorn.Server(uvicorn.Config(recorder, log_level="warning", http="h11"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", recorder
        finally:
            server.should_exit = True
            thread.join()
            scheduler.close()


def launched(client: str, url: str) -> Launch:
    """How a client is run once, without a screen."""
    if client == "aider" or client in _AGENTS:
        launch = CLIENTS[client.partition("_")[0]](ModelEndpoint(url, MODEL, LONG_CONTEXT))
        if client == "codex_by_hand":  # of a user who leaves web search on, as it is by default
            at = launch.command.index('web_search="disabled"')
            del launch.command[at - 1 : at + 1]
        if client == "opencode_messages":
            for name, text in launch.environment.items():
                limited = text.replace('"output": 8192', '"output": 16')
                launch.environment[name] = limited.replace("openai-compatible", "anthropic")
        once = {
            "aider": ["--no-git", "--yes-always", "--message", "Say hi."],
            "codex": ["exec", "--skip-git-repo-check", "-s", "read-only", "What is the goal?"],
            "codex_by_hand": ["exec", "--skip-git-repo-check", "-s", "read-only", "Say hi."],
            "opencode_messages": ["run", "Which files are here?"],
            "opencode": ["run", "Which files are here?"],
        }
        return Launch([*launch.command, *once[client]], launch.environment)
    python = os.environ.get("PYTHON_CLIENTS", sys.executable)
    if client == "llm":
        Path("extra-openai-models.yaml").write_text(
            f"- model_id: akunu\n  model_name: {MODEL}\n  api_base: {url}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n"
        )
        tool = "def weather(city: str) -> str:\n    'The weather in a city.'\n    return 'rain'"
        command = [python, "-m", "llm", "-m", "akunu", "--key", "none", "--functions", tool]
        return Launch(
            [*command, "What is the weather in Paris?"], {"LLM_USER_PATH": str(Path.cwd())}
        )
    return Launch([python, str(REQUESTS.parent / "clients.py"), client, url, MODEL])


def main(clients: list[str]) -> int:
    home = Path(tempfile.mkdtemp(prefix="akunu-clients-"))
    starter = model_store.resolve("starter").path
    tiny = write_long_model(home / MODEL, starter)
    os.chdir(home)
    for client in clients:
        with recording(tiny if client in _AGENTS else starter) as (url, recorder):
            launch = launched(client, url)
            environment = os.environ | launch.environment | {"HOME": str(home)}
            done = subprocess.run(
                launch.command, env=environment, stdin=subprocess.DEVNULL, timeout=600
            )
        statuses = [request.pop("status") for request in recorder.requests]
        print(f"{client}: exit {done.returncode}, {len(statuses)} requests: {statuses}")
        if done.returncode or set(statuses) != {200}:
            return 1
        text = json.dumps(recorder.requests, indent=1, ensure_ascii=False)
        (REQUESTS / f"{client}.json").write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
