"""Record requests of real clients for the tests: `python -m tests.serve.record CLIENT ...`.

The clients must be installed: PYTHON_CLIENTS names a Python with openai, anthropic, ollama,
litellm and llm; aider, claude, codex, opencode and pi are found on PATH. Each client talks to the
real server on loopback; the recording fails if the client does. The packages force the starter to
call a tool. The prompts of agents are too long for the starter, so agents use a tiny model of
random weights with the starter's tokenizer. The recorder answers its first requests with calls of
harmless tools, because random weights generate none. An agent's session has two prompts: the
second one continues the conversation in a new process.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
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
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.generate.job import Job
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine
from akunu_py.models.store import model_store
from akunu_py.serve.http.asgi import create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.record import RequestRecords
from akunu_py.serve.http.request_handler import run_job
from akunu_py.serve.http.server import ServeOptions, listen
from akunu_py.types import GenerateOptions, Stats
from tests.support.serving import LONG_CONTEXT, write_long_model

MODEL = "tiny"
REQUESTS = Path(__file__).with_name("requests")
_AGENTS = ("claude", "codex", "codex_by_hand", "opencode", "opencode_messages", "pi")
_WORDS = 9  # pieces of an answer
_CALLS = 2  # tool calls of a session
_KEPT_HEADERS = ("content-type", "accept", "user-agent", "anthropic-version", "anthropic-beta")
_LONGEST = 200  # characters of a text; longer ones are cut
_KEPT = 60  # characters of a text that is cut
_IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32,}")
# Harmless tools and their arguments, by name.
_HARMLESS: dict[str, dict[str, Any]] = {
    "weather": {"city": "Paris"},  # of llm
    "get_goal": {},
    "glob": {"pattern": "*.py"},
    "read": {"path": "notes.txt", "filePath": "/project/notes.txt"},
    "Glob": {"pattern": "*.py"},
    "Read": {"file_path": "/project/notes.txt"},
    "exec_command": {"cmd": "cat notes.txt"},
}
_QUESTIONS = ("Which files are here?", "What do the notes say?")
_call: ContextVar[tuple[str, str, str] | None] = ContextVar("call", default=None)


def _tools(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of the tools in a body, by name."""
    found = {}
    for tool in body.get("tools") or []:
        tool |= tool.get("function", {})
        schema = tool.get("input_schema") or tool.get("parameters") or {}
        found[tool.get("name", "")] = schema.get("properties", {})
    return found


def _wanted_call(body: dict[str, Any], directory: Path) -> tuple[str, str, str] | None:
    """Return the id, the name and the arguments of the call that is the answer."""
    text = json.dumps(body)
    results = sum(text.count(each) for each in ('"tool_result"', '_call_output"', '"role": "tool"'))
    tools = _tools(json.loads(text))
    offered = [name for name in _HARMLESS if name in tools]
    choice = body.get("tool_choice")
    chosen = isinstance(choice, dict) and choice["type"] != "auto"
    if not offered or chosen or results >= (_CALLS if len(tools) > 2 else 1):
        return None
    name = offered[results % len(offered)]
    arguments = {key: value for key, value in _HARMLESS[name].items() if key in tools[name]}
    call_id = f"call_{results + 1:024}"
    return call_id, name, json.dumps(arguments).replace("/project", str(directory))


class Recorder:
    """ASGI middleware that keeps and serves POST requests without their long texts.

    It decides which requests are answered with a call.
    """

    def __init__(self, app: ASGIApp, directory: Path) -> None:
        self._app, self._directory = app, directory
        self._ids: dict[str, str] = {}
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
        _call.set(_wanted_call(body, self._directory))
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept: dict[str, Any] = {
            "path": scope["path"],
            "headers": {name: headers[name] for name in _KEPT_HEADERS if name in headers},
            "body": self._plain(body),
        }
        data = json.dumps(kept["body"]).encode()
        length = str(len(data)).encode()
        others = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope["headers"] = [*others, (b"content-length", length)]
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

    def _plain(self, value: Any) -> Any:
        """Return a body with numbered ids, without paths of this machine and long texts."""
        if isinstance(value, dict):
            return {name: self._plain(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._plain(each) for each in value]
        if not isinstance(value, str):
            return value
        value = _IDS.sub(self._numbered, value)
        value = value.replace(str(self._directory), "/project")
        value = value.replace(str(self._directory.parent), "/home")
        if len(value) <= _LONGEST:
            return value
        digest = hashlib.sha256(value.encode()).hexdigest()[:8]  # shows changes between requests
        return f"{value[:_KEPT]} [{len(value)} characters, {digest}]"

    def _numbered(self, match: re.Match[str]) -> str:
        """Return an id of the same form, with the number of its first appearance."""
        number = str(self._ids.setdefault(match[0], str(len(self._ids) + 1)))
        zeros = re.sub("[0-9a-f]", "0", match[0])
        return zeros[: -len(number)] + number


async def _answer(host: ModelHost, job: Job, **options: Any) -> AsyncGenerator[Event]:
    """Yield the first words of the model's own answer, or a call after the prefill."""
    call, words, stats = _call.get(), 0, Stats()
    async with contextlib.aclosing(run_job(host, job, **options)) as events:
        async for event in events:
            if isinstance(event, PromptProcessed):
                stats.prompt_tokens, stats.cached_tokens = event.prompt_tokens, event.cached_tokens
            words += isinstance(event, TextDelta)
            ends = (call is not None and isinstance(event, PromptProcessed)) or words == _WORDS
            if isinstance(event, Finished):  # random weights seldom generate an end of text
                yield replace(event, reason="stop")
                return
            yield event
            if ends:
                break
    stats.generated_tokens = _WORDS
    if call is not None:
        call_id, name, arguments = call
        yield ToolCallStarted(call_id, name)
        for part in (arguments[:5], arguments[5:]):
            yield ToolCallArguments(part)
        yield ToolCallFinished()
    yield Finished("stop", stats)


@contextlib.contextmanager
def recording(model_path: Path, directory: Path) -> Iterator[tuple[str, Recorder]]:
    """Serve a model to a client in `directory`; yield the server's address and the recorder."""
    options = ServeOptions(AccessRules(), GenerateOptions(), temperature=0.0, max_tokens=16)
    pool = ModelPool(
        [
            ServedModel(
                [MODEL],
                lambda reserved: StepLoop(Session(Engine.load(model_path, name=MODEL))),
                options.service,
            )
        ]
    )

    backend = replace(options.backend(pool, RequestRecords()), run=_answer)
    recorder = Recorder(create_app(backend, AccessRules()), directory)
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
            pool.close()


_ONCE: dict[str, list[list[str]]] = {  # arguments of the processes of a session
    "aider": [["--no-git", "--yes-always", "--message", "Say hi."]],
    "claude": [["-p", _QUESTIONS[0]], ["-c", "-p", _QUESTIONS[1]]],
    "codex": [
        ["exec", "--skip-git-repo-check", "-s", "read-only", _QUESTIONS[0]],
        ["exec", "resume", "--skip-git-repo-check", "--last", _QUESTIONS[1]],
    ],
    "opencode": [["run", _QUESTIONS[0]], ["run", "-c", _QUESTIONS[1]]],
    "pi": [["-p", _QUESTIONS[0]], ["-c", "-p", _QUESTIONS[1]]],
}


def _agent(client: str, url: str, home: Path) -> Launch:
    """Return how an agent is started, without arguments of one session."""
    if client == "pi":
        compat = {"supportsDeveloperRole": False, "supportsReasoningEffort": False}
        model = {"id": MODEL, "contextWindow": LONG_CONTEXT, "maxTokens": 16}
        address = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none"}
        provider = {**address, "compat": compat, "models": [model]}
        file = home / ".pi/agent/models.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"providers": {"akunu": provider}}))
        return Launch(["pi", "--provider", "akunu", "--model", MODEL], {"PI_OFFLINE": "1"})
    launch = CLIENTS[client.partition("_")[0]](ModelEndpoint(url, MODEL, LONG_CONTEXT))
    if client == "codex_by_hand":  # of a user who leaves web search on, the default
        at = launch.command.index('web_search="disabled"')
        del launch.command[at - 1 : at + 1]
    if client == "opencode_messages":
        for name, text in launch.environment.items():
            limited = text.replace('"output": 8192', '"output": 16')
            launch.environment[name] = limited.replace("openai-compatible", "anthropic")
    return launch


def launched(client: str, url: str, home: Path) -> list[Launch]:
    """Return the processes of a client's session, each of which ends by itself."""
    if client == "aider" or client in _AGENTS:
        launch = _agent(client, url, home)
        processes = _ONCE[client.partition("_")[0]]
        return [Launch([*launch.command, *more], launch.environment) for more in processes]
    python = os.environ.get("PYTHON_CLIENTS", sys.executable)
    if client == "llm":
        Path("extra-openai-models.yaml").write_text(
            f"- model_id: akunu\n  model_name: {MODEL}\n  api_base: {url}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n"
        )
        tool = "def weather(city: str) -> str:\n    'The weather in a city.'\n    return 'rain'"
        command = [python, "-m", "llm", "-m", "akunu", "--key", "none", "--functions", tool]
        environment = {"LLM_USER_PATH": str(Path.cwd())}
        return [Launch([*command, "What is the weather in Paris?"], environment)]
    return [Launch([python, str(REQUESTS.parent / "clients.py"), client, url, MODEL])]


def main(clients: list[str]) -> int:
    starter = model_store.resolve("starter").path
    with tempfile.TemporaryDirectory(prefix="akunu-clients-") as temporary:
        home = Path(temporary).resolve()
        tiny = write_long_model(home / MODEL, starter)
        project = home / "project"
        project.mkdir()
        (project / "notes.txt").write_text("Buy bread.\nWater the plants.\n")
        (project / "main.py").write_text('print("hi")\n')
        os.chdir(project)
        for client in clients:
            if not _record(client, tiny if client in _AGENTS else starter, home):
                return 1
    return 0


def _record(client: str, model: Path, home: Path) -> bool:
    """Record the session of one client; return False if it fails."""
    with recording(model, home / "project") as (url, recorder):
        exits = []
        for launch in launched(client, url, home):
            environment = os.environ | launch.environment | {"HOME": str(home), "PWD": os.getcwd()}
            exits.append(
                subprocess.run(
                    launch.command, env=environment, stdin=subprocess.DEVNULL, timeout=600
                ).returncode
            )
    statuses = [request.pop("status") for request in recorder.requests]
    print(f"{client}: exits {exits}, {len(statuses)} requests: {statuses}")
    if any(exits) or set(statuses) != {200}:
        return False
    if client in _AGENTS:
        data = json.dumps(recorder.requests, ensure_ascii=False).encode()
        (REQUESTS / f"{client}.json.gz").write_bytes(gzip.compress(data, mtime=0))
    else:
        text = json.dumps(recorder.requests, indent=1, ensure_ascii=False)
        (REQUESTS / f"{client}.json").write_text(text + "\n", encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
