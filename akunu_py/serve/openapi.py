"""The OpenAPI 3.1 description of what is served, written from the endpoints and their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from akunu_py.serve.dialect import Dialect
from akunu_py.serve.errors import STATUS
from akunu_py.version import __version__

_REF = "#/components/schemas/{model}"
_GET = {
    "/v1/models": "The model that is served.",
    "/health": "Whether the server is up.",
    "/openapi.json": "This description.",
}


def describe(dialects: Sequence[Dialect]) -> dict[str, Any]:
    """The description, ready for JSON."""
    endpoints = [endpoint for dialect in dialects for endpoint in dialect.endpoints]
    models = {endpoint.body for endpoint in endpoints}
    references, schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template=_REF,
    )
    refused: dict[str, Any] = {
        str(status): {"description": kind, "content": {"application/json": {"schema": {}}}}
        for kind, status in STATUS.items()
    }
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": {"200": _answer(), **refused}}}
        for path, summary in _GET.items()
    }
    for endpoint in endpoints:
        schema = references[endpoint.body, "validation"]
        paths[endpoint.path] = {
            "post": {
                "summary": endpoint.summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": {"200": _answer("text/event-stream"), **refused},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "akunu serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _answer(*more: str) -> dict[str, Any]:
    return {
        "description": "The answer.",
        "content": {kind: {"schema": {}} for kind in ("application/json", *more)},
    }
