"""The ASGI application: routes and errors of all dialects, and the page at `/`."""

import asyncio
import base64
import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import mlx.core as mx
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from akunu_py.errors import AkunuError
from akunu_py.serve.dialect.bodies import parse
from akunu_py.serve.dialect.interface import Dialect, Endpoint, PreparedRequest
from akunu_py.serve.dialect.request_errors import STATUSES, RequestError, gpu_is_lost, request_error
from akunu_py.serve.http.guard import IGNORED_HEADER, AccessRules, Guard
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.http.request_handler import (
    HEARTBEAT_S,
    RequestHandler,
    RunJob,
    read_body,
    run_job,
)
from akunu_py.serve.llamacpp import LLAMACPP
from akunu_py.serve.messages import MESSAGES
from akunu_py.serve.ollama import API_VERSION, OLLAMA, tags
from akunu_py.serve.openai import OPENAI
from akunu_py.serve.own.client import proof
from akunu_py.serve.own.dialect import AKUNU
from akunu_py.serve.responses import RESPONSES
from akunu_py.text import did_you_mean
from akunu_py.version import __version__

_MAX_CHALLENGE = 100  # characters
_PLAIN_TEXT = "text/plain; version=0.0.4"  # of Prometheus
_MAX_WAITING = 256  # requests

DIALECTS: tuple[Dialect, ...] = (OPENAI, RESPONSES, MESSAGES, LLAMACPP, OLLAMA, AKUNU)
_DIALECT_BY_PATH = {endpoint.path: each for each in DIALECTS for endpoint in each.endpoints}
# By the start of a path that this server does not have.
_STARTS = {"/api/": OLLAMA, "/v1/messages/": MESSAGES, "/akunu/": AKUNU}
_VERSION = "/v1"


def dialect_for_path(path: str) -> Dialect:
    """Return the dialect that encodes errors on `path`; OpenAI's for other unknown paths."""
    known = _DIALECT_BY_PATH.get(_similar_path(path) or path)
    return known or next(
        (each for start, each in _STARTS.items() if path.startswith(start)), OPENAI
    )


def _similar_path(path: str) -> str:
    """Return the path that a client with a wrong base URL requests; "" if there is none."""
    names = [*_DIALECT_BY_PATH, f"{_VERSION}/models"]
    endings = [name for name in names if path.endswith(name.removeprefix(_VERSION))]
    return max(endings, key=len, default="")


def _unknown_path(path: str, root: str) -> str:
    """Return the error of an unknown path, with the right base URL if one can be inferred."""
    known = _similar_path(path)
    if not known or known == path:
        path = path[:200]
        return f"unknown path {path}{did_you_mean(path, [*_DIALECT_BY_PATH, *_GET], cutoff=0.8)}"
    url = f"{root}{_VERSION}"
    if path.endswith(known):  # with a prefix that clients add themselves
        url = f"{root}, or to {url} if the client requests no {_VERSION}"
    return f"unknown path {path[:200]}; for {known}, set the client's base URL to {url}"


@dataclass(frozen=True, slots=True)
class Backend:
    """The models behind the application."""

    pool: ModelPool
    records: RequestRecords
    strict: bool = False  # refuse unknown fields and names of models
    run: RunJob = run_job  # tests replace it
    on_lost_gpu: Callable[[], None] = lambda: None


def create_app(
    backend: Backend, access: AccessRules, *, heartbeat_s: float = HEARTBEAT_S
) -> Starlette:
    """Return the ASGI application."""
    routes: list[BaseRoute] = [
        Route(endpoint.path, _Post(endpoint, dialect, backend, heartbeat_s), methods=["POST"])
        for dialect in DIALECTS
        for endpoint in dialect.endpoints
    ]
    middleware = [Middleware(Guard, access, dialect_for_path, backend.records.refuse)]
    if access.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # a public page may call this machine
            expose_headers=["x-request-id", "request-id", IGNORED_HEADER],
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[*routes, *_get_routes(backend, access)],
        middleware=middleware,
        exception_handlers=dict.fromkeys(
            (HTTPException, RequestError, AkunuError, Exception),
            partial(_http_error, backend.records.refuse),
        ),
    )


# Summaries of the paths for GET, for the OpenAPI description.
_GET = {
    "/": "Return a page with the server's state and a chat; to Ollama's clients, a line.",
    "/akunu/status": "Return the state that the page shows.",
    "/v1/models": "List the served models.",
    "/api/tags": "List the served models, for Ollama.",
    "/api/ps": "List the loaded models, for Ollama.",
    "/api/version": "Return the version of Ollama's API.",
    "/health": "Check that the server runs.",
    "/openapi.json": "Return this description.",
}


def _get_routes(backend: Backend, access: AccessRules) -> list[BaseRoute]:
    pool = backend.pool

    def status(request: Request) -> dict[str, Any]:
        models = [
            {
                "name": model.name,
                "state": model.host.state,
                "answers": not model.embeds,
                "context_length": model.context_length,
                "memory": model.memory,
                "requests": model.requests,
            }
            for model in pool.all_models
        ]
        shown = {"version": __version__, "memory": int(mx.get_active_memory()), "models": models}
        return shown | backend.records.status()

    def models(request: Request) -> dict[str, Any]:
        data = [model.description() for model in pool.all_models]
        page = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
        return {"object": "list", "data": data} | page

    def health(request: Request) -> dict[str, Any]:
        challenge = request.query_params.get("challenge", "")[:_MAX_CHALLENGE]
        found: dict[str, Any] = {"status": "ok"}
        if challenge and access.token:
            found["proof"] = proof(access.token, challenge)
        if len(pool.all_models) > 1 and not access.key:  # the path needs no key
            found["models"] = {model.name: model.host.state for model in pool.all_models}
        return found

    replies: dict[str, Callable[[Request], Any]] = {
        "/akunu/status": status,
        "/v1/models": models,
        "/v1/models/{name:path}": lambda request: pool.get(
            request.path_params["name"]
        ).description(),
        "/api/tags": lambda request: tags([model.description() for model in pool.all_models]),
        "/api/ps": lambda request: tags(
            [model.description() for model in pool.all_models if model.is_ready]
        ),
        "/api/version": lambda request: {"version": API_VERSION},
        "/health": health,
        "/metrics": lambda request: backend.records.metrics(pool.shared, pool.metrics()),
        "/openapi.json": lambda request: openapi_description(DIALECTS),
    }

    def route(path: str) -> Route:
        async def respond(request: Request) -> Response:
            value = replies[path](request)
            if isinstance(value, str):
                return PlainTextResponse(value, media_type=_PLAIN_TEXT)
            return JSONResponse(value)

        return Route(path, respond)

    return [Route("/", _page), *(route(path) for path in replies)]


_PAGE = files(__package__).joinpath("page.html").read_text("utf-8")


def _source(tag: str) -> str:
    """Return the source expression of the page's one element of inline code."""
    [code] = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; script-src {_source('script')}; style-src {_source('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "accept",
}


async def _page(request: Request) -> Response:
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)
    return PlainTextResponse("akunu is running\n", headers={"vary": "accept"})


class _Post:
    def __init__(
        self, endpoint: Endpoint, dialect: Dialect, backend: Backend, heartbeat_s: float
    ) -> None:
        self._endpoint, self._dialect = endpoint, dialect
        self._backend, self._heartbeat_s = backend, heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        records = self._backend.records
        with (
            records.request(self._endpoint.path) as record,
            contextlib.suppress(ClientDisconnect),
            contextlib.closing(RequestHandler(receive, send, self._heartbeat_s)) as handler,
        ):
            scope["record"] = record
            # A connection is a client: programs with parallel requests open several.
            client = "{}:{}".format(*(scope.get("client") or ("", 0)))
            try:
                data = await read_body(Request(scope, receive))
                record.arrived = True
                if records.waiting > _MAX_WAITING:
                    raise RequestError("too many waiting requests; try again later", 503)
                async with contextlib.AsyncExitStack() as stack:
                    prepared, model = await self._prepare(data, handler, record, stack)
                    run = partial(
                        self._backend.run, model.host, client=client, on_submit=record.jobs.append
                    )
                    record.status = await handler.reply(prepared, run, record.add)
            except ClientDisconnect:
                raise
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - sent to the client
                failure = request_error(error)
                record.error = failure.message
                body = self._dialect.error(failure, scope["request_id"])
                try:
                    record.status = await handler.fail(failure, body)
                finally:
                    if gpu_is_lost(error):
                        self._backend.on_lost_gpu()

    async def _prepare(
        self,
        data: bytes,
        handler: RequestHandler,
        record: RequestRecord,
        stack: contextlib.AsyncExitStack,
    ) -> tuple[PreparedRequest | Mapping[str, Any], ServedModel]:
        """Prepare a request; keep its model loaded until `stack` closes. data: the body."""
        backend, endpoint = self._backend, self._endpoint
        pool = backend.pool
        if record.keeps_content:
            record.body = data.decode(errors="replace")
        body = await run_in_threadpool(parse, data, endpoint.body, strict=backend.strict)
        record.ignored = body.ignored
        name = getattr(body, "model", None)
        if endpoint.needs == "description" and name:
            model = pool.get(name)
        else:
            embeds = endpoint.needs == "embedder"
            model = pool.model_for(name, embeds=embeds, strict=backend.strict)
        if endpoint.needs == "description":
            return endpoint.prepare(body, model.description()), model
        if endpoint.needs == "ending":
            return endpoint.prepare(body, [each.ending for each in pool.models]), model
        record.model = model.name if len(pool.models) > 1 else ""
        if endpoint.encoder is not None:
            handler.begin(endpoint.encoder(body, model.name), streams=body.streams)
        if body.unloads:
            stack.callback(pool.release, model)
        if not body.needs_model:
            return endpoint.prepare(body, model), model  # needs only the name
        await handler.wait(stack.enter_async_context(pool.use(model)))
        get = model.embedder if endpoint.needs == "embedder" else model.service
        prepare = run_in_threadpool(lambda: endpoint.prepare(body, get()))
        prepared = await handler.wait(prepare)
        record.ignored = body.ignored
        return prepared, model


def _http_error(
    log: Callable[[str, RequestError], None], request: Request, error: Exception
) -> Response:
    headers = None
    if isinstance(error, HTTPException):
        headers, message = error.headers or {}, error.detail
        if error.status_code == 404:
            message = _unknown_path(request.url.path, str(request.base_url).rstrip("/"))
        elif error.status_code == 405:
            message = f"{request.url.path} expects {headers.get('Allow')}, not {request.method}"
        failure = RequestError(message, error.status_code)
    else:
        failure = request_error(error)
    log(request.url.path, failure)
    body = dialect_for_path(request.url.path).error(failure, request.scope.get("request_id", ""))
    return JSONResponse(dict(body), failure.status, headers=headers)


def openapi_description(dialects: Sequence[Dialect]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the endpoints and their bodies."""
    endpoints = [endpoint for dialect in dialects for endpoint in dialect.endpoints]
    models = {endpoint.body for endpoint in endpoints}
    references, schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {path: {"get": _operation(summary)} for path, summary in _GET.items()}
    for endpoint in endpoints:
        schema = references[endpoint.body, "validation"]
        summary = (endpoint.prepare.__doc__ or "").partition("\n")[0]
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[endpoint.path] = {
            "post": _operation(summary, "text/event-stream") | {"requestBody": body}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "akunu serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _operation(summary: str, *more: str) -> dict[str, Any]:
    """Return the description of a request. more: media types of the reply besides JSON."""
    json_content: dict[str, Any] = {"application/json": {"schema": {}}}
    content = json_content | {kind: {"schema": {}} for kind in more}
    responses = {"200": {"description": "The answer.", "content": content}}
    for status in STATUSES:
        phrase = HTTPStatus(status).phrase
        responses[str(status)] = {"description": phrase, "content": json_content}
    return {"summary": summary, "responses": responses}
