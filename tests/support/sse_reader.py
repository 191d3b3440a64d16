"""Reads a stream of server-sent events as clients do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def named_events(frames: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the data of named events; checks that `type` in the data equals the name."""
    text = b"".join(frames).decode()
    assert not text or text.endswith("\n\n")
    found = []
    for each in text.split("\n\n")[:-1]:
        name, _, data = each.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found
