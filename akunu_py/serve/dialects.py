"""The dialects that are spoken, and which one a path belongs to."""

from __future__ import annotations

from akunu_py.serve.dialect import Dialect
from akunu_py.serve.llamacpp.dialect import LLAMACPP
from akunu_py.serve.messages.dialect import MESSAGES
from akunu_py.serve.openai.dialect import OPENAI
from akunu_py.serve.own.dialect import OWN
from akunu_py.serve.responses.dialect import RESPONSES

DIALECTS: tuple[Dialect, ...] = (OPENAI, RESPONSES, MESSAGES, LLAMACPP, OWN)

_BY_PATH = {endpoint.path: each for each in DIALECTS for endpoint in each.endpoints}


def dialect_of(path: str) -> Dialect:
    """The one in whose shape errors on `path` are; the first for paths of none."""
    return _BY_PATH.get(path, DIALECTS[0])
