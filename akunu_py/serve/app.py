"""The application: paths, bodies, errors. What is said on them is the dialects' business."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from akunu_py.decoding.generate.events import Event
from akunu_py.decoding.scheduling.job import Job
from akunu_py.errors import AkunuError
from akunu_py.serve import bodies
from akunu_py.serve.answering import HEARTBEAT_S, Answering, ClientGone, send_json
from akunu_py.serve.dialect import Dialect, Endpoint, Prepared
from akunu_py.serve.dialects import DIALECTS, dialect_of
from akunu_py.serve.errors import RequestError, request_error
from akunu_py.serve.guard import Access, Guard
from akunu_py.serve.openapi import describe
from akunu_py.serve.own.running import proof
from akunu_py.serve.record import Record, Records
from akunu_py.serve.service import Service, check_model

_CHALLENGE = 100  # characters
_MOST = 256  # requests that wait
_BODY_S = 60.0  # that a client may take to send a body
_KINDS = {404: "not_found", 405: "method"}


@dataclass(frozen=True, slots=True)
class Backend:
    """What the application runs on. names: of the model. description: of it, for which it need not
    be loaded a second time. service: waits for the model, where it is not loaded; raises
    AkunuError where it cannot be. run: the events of a job, of a client, and whether the job is
    short; closing it cancels the job. records: what becomes of requests."""

    names: Sequence[str]
    service: Callable[[], Service]
    description: Callable[[], Mapping[str, Any]]
    run: Callable[[Job, str, bool], AsyncGenerator[Event]]
    records: Records


def create_app(backend: Backend, access: Access, *, heartbeat_s: float = HEARTBEAT_S) -> Starlette:
    """The ASGI application."""
    routes: list[BaseRoute] = [
        Route(endpoint.path, _Post(endpoint, dialect, backend, heartbeat_s), methods=["POST"])
        for dialect in DIALECTS
        for endpoint in dialect.endpoints
    ]
    middleware = [Middleware(Guard, access, dialect_of)]
    if access.origins:
        middleware.insert(0, _cors(access.origins))
    return Starlette(
        routes=[*routes, *_reading(backend, access)],
        middleware=middleware,
        exception_handlers=dict.fromkeys(
            (HTTPException, RequestError, AkunuError, Exception), _http_error
        ),
    )


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id"],
    )


def _reading(backend: Backend, access: Access) -> list[BaseRoute]:
    """What is read and changes nothing."""

    async def models(request: Request) -> Response:
        found = await run_in_threadpool(backend.description)
        ends = {"first_id": found["id"], "last_id": found["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [found]} | ends)

    async def model(request: Request) -> Response:
        check_model(request.path_params["name"], backend.names)
        return JSONResponse(await run_in_threadpool(backend.description))

    async def health(request: Request) -> Response:
        challenge = request.query_params.get("challenge", "")[:_CHALLENGE]
        if not (challenge and access.token):
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "ok", "proof": proof(access.token, challenge)})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(backend.records.metrics(), media_type="text/plain; version=0.0.4")

    async def openapi(request: Request) -> Response:
        return JSONResponse(describe(DIALECTS))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]


class _Post:
    """What is done with a body that was posted: an ASGI application for one endpoint."""

    def __init__(
        self, endpoint: Endpoint, dialect: Dialect, backend: Backend, heartbeat_s: float
    ) -> None:
        self._endpoint, self._dialect = endpoint, dialect
        self._backend, self._heartbeat_s = backend, heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        records = self._backend.records
        with records.request(self._endpoint.path) as record, contextlib.suppress(ClientGone):
            try:
                prepared = await self._prepared(Headers(scope=scope), receive, record)
            except RequestError as error:
                body = self._dialect.error(error, scope["request_id"])
                record.status = await send_json(send, error.status, body)
                return
            if not isinstance(prepared, Prepared):
                record.status = await send_json(send, 200, prepared)
                return
            # A connection is a client: programs that ask for much at once open several.
            client = "{}:{}".format(*(scope.get("client") or ("", 0)))
            answering = Answering(
                prepared,
                lambda job: self._backend.run(job, client, prepared.short),
                self._dialect,
                scope["request_id"],
                record.add,
                self._heartbeat_s,
            )
            record.status = await answering.reply(receive, send)

    async def _prepared(self, headers: Headers, receive: Receive, record: Record) -> Any:
        if self._backend.records.waiting > _MOST:
            raise RequestError("too many requests wait; try again later", "unavailable")
        data = await _read(headers, receive)
        if record.keeps_content:
            record.asked = data.decode(errors="replace")

        def prepare() -> Any:
            try:
                body = bodies.parse(data, self._endpoint.body)
                return self._endpoint.prepare(body, self._backend.service())
            except Exception as error:
                raise request_error(error) from error

        return await run_in_threadpool(prepare)


async def _read(headers: Headers, receive: Receive) -> bytes:
    """The body of a request. Raises RequestError where it is too large or too slow, ClientGone."""
    too_large = RequestError(f"a body may have {bodies.MAX_BYTES:,} bytes", "too_large")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > bodies.MAX_BYTES:
        raise too_large
    data, more = bytearray(), True
    try:
        async with asyncio.timeout(_BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                data += message.get("body", b"")
                more = message.get("more_body", False)
                if len(data) > bodies.MAX_BYTES:
                    raise too_large
    except TimeoutError:
        raise RequestError(f"the body did not come within {_BODY_S:g} seconds") from None
    return bytes(data)


def _http_error(request: Request, error: Exception) -> Response:
    """For paths that do not exist, and what failed on those that do."""
    headers = None
    if isinstance(error, HTTPException):
        kind = _KINDS.get(error.status_code, "invalid")
        message = {"not_found": f"there is nothing at {request.url.path[:200]}"}.get(kind)
        failure = RequestError(message or error.detail, kind)  # type: ignore[arg-type]
        headers = error.headers
    else:
        failure = request_error(error)
    body = dialect_of(request.url.path).error(failure, request.scope.get("request_id", ""))
    return JSONResponse(dict(body), failure.status, headers=headers)
