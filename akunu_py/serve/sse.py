"""Frames of server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
COMMENT = b": still at it\n\n"  # which clients skip


def frame(value: Any, event: str = "") -> bytes:
    """A JSON value as the data of an event, which has a name in some dialects."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data}\n\n".encode()
