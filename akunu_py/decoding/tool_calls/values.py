"""Arguments that are written without JSON's quotes, as JSON of the type that the schema wants."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_STRING = frozenset({"string"})


def is_string(schema: Mapping[str, Any], name: str) -> bool:
    """Whether nothing but a string fits the parameter."""
    return types_of(schema, name) == _STRING


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types of the values that a parameter may have, none where the schema does not say."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(found, schema, 8))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not depth:
        return
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else _strings(declared)
    if not declared:
        values = schema.get("enum") if "enum" in schema else [schema.get("const", ...)]
        yield from (_type(value) for value in values or () if value is not ...)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            yield from _types(_at(root, reference[2:].split("/")), root, depth - 1)
        for word in ("anyOf", "oneOf", "allOf"):
            listed = schema.get(word)
            for each in listed if isinstance(listed, list) else ():
                yield from _types(each, root, depth - 1)


def _strings(value: Any) -> Iterator[str]:
    yield from (each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def _at(value: Any, path: list[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _type(value: Any) -> str:
    known = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else known.get(type(value), "object")


def from_text(text: str, types: frozenset[str]) -> str:
    """A value as JSON; a string where it is nothing else that may stand there."""
    if types == _STRING:
        return as_json(text)
    value = _read(text.strip())
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        value = int(value)
    kind = "string" if value is ... else _type(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    # What fits nothing is still told apart from a string, unless that would fit.
    return as_json(text if value is ... or (not fits and "string" in types) else value)


def _read(text: str) -> Any:
    """JSON, or the literals of Python; ... for neither."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return ...
    if isinstance(value, float) and not math.isfinite(value):
        return ...
    return value


def as_json(value: Any) -> str:
    """`value` as JSON; a string of what JSON does not know."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(str(value), ensure_ascii=False)


def escaped(text: str) -> str:
    """A part of a string, as it stands in JSON between the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
