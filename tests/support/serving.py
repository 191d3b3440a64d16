"""A served tiny model, and clients that need no socket and can disconnect at any moment."""

import asyncio
import copy
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, MutableMapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event
from akunu_py.engine.host import ModelHost
from akunu_py.engine.job import Job
from akunu_py.engine.loop import StepLoop
from akunu_py.serve.http.asgi import Backend, create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.record import RequestRecords
from akunu_py.serve.http.server import ServeOptions
from akunu_py.types import DraftMode, GenerateOptions
from tests.support.command import until
from tests.support.jobs import open_jobs
from tests.support.tiny import write_like_starter
from tests.support.tiny_fim import byte_level, write_model

MARKERS = (
    "<|endoftext|>", "<|im_start|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
LONG_CONTEXT = 131_072
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\n"
    "{% endfor %}<|im_start|>assistant\n\n"  # of which Jinja leaves out the last
)
TURNS = [{"role": "user", "content": "hello"}]
# A valid body of each path with most of its fields; answers have few tokens.
BODIES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("bodies.json").read_text(encoding="utf-8")
)


def write_served_model(directory: Path, seed: int = 0, context: int = 4096) -> Path:
    """Write a model for chat and fill-in-the-middle, with bytes as tokens."""
    return write_model(
        directory, byte_level(MARKERS), end=MARKERS[0], seed=seed, template=TEMPLATE,
        context=context,
    )  # fmt: skip


def write_long_model(directory: Path, starter: Path) -> Path:
    """Write a model with a long context.

    One layer with one head: a CPU spends most of the time of a long prompt in attention.
    """
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    return write_like_starter(directory, starter, max_position_embeddings=LONG_CONTEXT, **sizes)


@dataclass
class Served:
    """A tiny model with its scheduler and application. Default: 16 greedy tokens."""

    model: ServedModel
    options: ServeOptions
    records: RequestRecords
    app: ASGIApp
    _apps: dict[DraftMode, ASGIApp] = field(default_factory=dict)  # by draft mode

    @property
    def scheduler(self) -> ModelHost:
        return self.model.host

    def application(
        self, access: AccessRules | None = None, heartbeat_s: float = 60, **more: Any
    ) -> ASGIApp:
        """Return another application on this model. more: fields of its backend."""
        backend = replace(Backend(ModelPool([self.model]), RequestRecords()), **more)
        return create_app(backend, access or AccessRules(), heartbeat_s=heartbeat_s)

    def app_with_draft(self, draft: DraftMode) -> ASGIApp:
        """Return the application on this model with a draft mode."""
        if draft not in self._apps:
            service = self.model.service()
            changed = replace(service, defaults=replace(service.defaults, draft=draft))
            model = copy.copy(self.model)
            model.service = lambda: changed  # type: ignore[method-assign]
            self._apps[draft] = self.application(pool=ModelPool([model]))
        return self._apps[draft]

    def in_thread(self, function: Callable[[Engine], Any]) -> Any:
        """Call a function in the model's thread and return its result."""
        return self.scheduler.call(function).result(60)

    def block_until_queued(self, jobs: int) -> None:
        """Block the model's thread until this number of jobs waits, or has just begun."""
        self.scheduler.call(lambda _: until(lambda: sum(open_jobs(self.scheduler)) >= jobs))


@contextmanager
def served(directory: Path, name: str = "tiny-qwen2.5-coder") -> Iterator[Served]:
    """Serve the model in a directory."""
    options = ServeOptions(AccessRules(), GenerateOptions(), temperature=0.0, max_tokens=16)
    model = ServedModel(
        (name, "alias"),
        lambda reserved: StepLoop(Engine.load(directory, name=name)),
        options.service,
    )
    model.host.start()
    pool, records = ModelPool([model]), RequestRecords()
    app = create_app(Backend(pool, records), AccessRules(), heartbeat_s=60)
    try:
        yield Served(model, options, records, app)
    finally:
        assert pool.close()


@contextmanager
def at_a_socket(app: ASGIApp) -> Iterator[str]:
    """Serve the application at a real socket; yield its address."""
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(60)


def scripted_app(
    run: Callable[[Job], AsyncGenerator[Event]],
    model: Served,
    heartbeat_s: float,
    records: RequestRecords | None = None,
) -> ASGIApp:
    """Return an application whose jobs yield the events of `run`."""
    more: dict[str, Any] = {"run": lambda host, job, **options: aclosing(run(job))}
    return model.application(None, heartbeat_s, records=records or RequestRecords(), **more)


def app_with_events(model: Served, *events: Event) -> ASGIApp:
    """Return an application whose jobs yield these events."""

    async def run(job: Job) -> AsyncGenerator[Event]:
        for event in events:
            yield event

    return scripted_app(run, model, 60)


@dataclass
class Reply:
    """A reply so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    frames: list[bytes] = field(default_factory=list)  # bodies of the ASGI messages
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.frames)

    def json(self) -> Any:
        return json.loads(self.body)

    def values(self) -> list[dict[str, Any]]:
        """Return the JSON values of a stream in any dialect, or the one value of another reply.

        Checks the ends of events, and that `type` in the data equals the name of its event.
        """
        if self.headers.get("content-type") == "application/json":
            return [self.json()]
        text, found = self.body.decode(), []
        separator = "\n" if "ndjson" in self.headers.get("content-type", "") else "\n\n"
        assert not text or text.endswith(separator)
        for event in text.split(separator)[:-1]:
            name, newline, data = event.rpartition("\n")
            if event.startswith(":") or data == "data: [DONE]":
                continue
            found.append(json.loads(data.removeprefix("data: ")))
            assert not newline or name == f"event: {found[-1]['type']}"
        return found

    def chunks(self) -> list[dict[str, Any]]:
        """Return the values of a stream of OpenAI's completions."""
        assert self.body.endswith(b"\n\ndata: [DONE]\n\n")
        return self.values()


async def fetch(
    app: ASGIApp, path: str, body: Any = None, *, method: str = "", headers: Mapping[str, str] = {},
    leave: Callable[[Reply], bool] = lambda reply: False, left: asyncio.Event | None = None,
) -> Reply:  # fmt: skip
    """Send a request and return its reply. body: JSON or bytes; None for a GET.

    leave: called after every message; True disconnects. left: set on a disconnect; a test may set
    it, too.
    """
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    reply, left, sent = Reply(), left or asyncio.Event(), False
    all_headers = {"host": "127.0.0.1:8012", "content-length": str(len(data))} | dict(headers)

    async def receive() -> MutableMapping[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if left.is_set():
            return  # as uvicorn does
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in message["headers"]
            }
        else:
            reply.frames.append(message.get("body", b""))
            reply.ended = not message.get("more_body", False)
        if leave(reply) or reply.ended:
            left.set()

    scope = {
        "type": "http",
        "method": method or ("GET" if body is None else "POST"),
        "path": path,
        "query_string": b"",
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()
        ],
    }
    await app(scope, receive, send)
    return reply
