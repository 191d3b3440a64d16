"""Engines that differ in a few fields."""

from dataclasses import fields, replace
from typing import Any

from akunu_py.engine.engine import Engine


def altered(engine: Engine, **changes: Any) -> Engine:
    """Return `engine` with other fields: its own, its plan's or its tokenizer side's."""
    parts: dict[str, Any] = {}
    for part in ("plan", "tokens"):
        names = {field.name for field in fields(getattr(engine, part))} & changes.keys()
        if names:
            other = {name: changes.pop(name) for name in names}
            parts[part] = replace(getattr(engine, part), **other)
    return replace(engine, **parts, **changes)
