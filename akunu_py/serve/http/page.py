"""The page at `/`: the server's state, and a chat with its models."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

import mlx.core as mx
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from akunu_py.serve.http.model_pool import ModelPool
from akunu_py.serve.http.record import RequestRecords
from akunu_py.version import __version__

_PAGE = files(__package__).joinpath("page.html").read_text("utf-8")


def _source(tag: str) -> str:
    """Return the source expression of the page's one element of inline code."""
    [code] = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; script-src {_source('script')}; style-src {_source('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "accept",
}


async def page(request: Request) -> Response:
    """Return the page to browsers, and a line to Ollama's clients."""
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(_PAGE, headers=_HEADERS)
    return PlainTextResponse("akunu is running\n", headers={"vary": "accept"})


def status(pool: ModelPool, records: RequestRecords) -> dict[str, Any]:
    """Return what the page shows."""
    models = [
        {
            "name": model.name,
            "state": model.host.state,
            "answers": model is not pool.embedding,
            "context_length": model.context_length,
            "memory": model.memory,
            "requests": model.requests,
        }
        for model in pool.all_models
    ]
    memory = int(mx.get_active_memory())
    return {"version": __version__, "memory": memory, "models": models, **records.status()}
