"""Whether a value fits a JSON schema, word for word as the standard (2020-12) has it: the reference
that grammars are held against. Patterns are those that Python and ECMAScript read alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

NAMES = ["a", "b", "ab", "c1"]
TEXTS = ["", "a", "ab", "b1", 'a"', "é\n"]
PATTERNS = ["^a", "b", "[0-9]$", "^[^a]*$", "^(?:a|b$)", "^$|1"]
NUMBERS = [0, 1, 2, 3, 6, 7, -1, 10, 0.5, -2.5, 14]
Fits = Callable[..., bool]
_TYPES: dict[str, Any] = {
    "null": type(None), "boolean": bool, "string": str, "array": list, "object": dict,
}  # fmt: skip


def is_valid(schema: Any, value: Any, root: Any = None) -> bool:
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema

    def fits(inner: Any, other: Any = value) -> bool:
        return is_valid(inner, other, root)

    return all(_applies(key, wanted, value, schema, fits, root) for key, wanted in schema.items())


def _applies(key: str, wanted: Any, value: Any, schema: Any, fits: Fits, root: Any) -> bool:
    match key:
        case "$ref":
            part = root
            for name in wanted.split("/")[1:]:
                part = part[name]
            return bool(fits(part))
        case "type":
            return any(
                _is(name, value) for name in ([wanted] if isinstance(wanted, str) else wanted)
            )
        case "const":
            return same(wanted, value)
        case "enum":
            return any(same(each, value) for each in wanted)
        case "allOf":
            return all(map(fits, wanted))
        case "anyOf":
            return any(map(fits, wanted))
        case "oneOf":
            return sum(map(fits, wanted)) == 1
        case "not":
            return not fits(wanted)
        case "if":
            return bool(fits(schema.get("then" if fits(wanted) else "else", True)))
    if _is("number", value):
        return _number(key, wanted, Fraction(str(value)))
    if isinstance(value, str):
        return _string(key, wanted, value)
    if isinstance(value, list):
        return _array(key, wanted, value, schema, fits)
    return not isinstance(value, dict) or _object(key, wanted, value, schema, fits)


def same(one: Any, other: Any) -> bool:
    return bool(one == other) and _plain(one) == _plain(other)


def _plain(value: Any) -> str:
    """1 is 1.0, but true is not 1."""
    return json.dumps(value, sort_keys=True, default=float).replace(".0", "")


def exactly(text: str) -> Any:
    """The value of a text of JSON, with numbers as they are written, not as a float rounds them."""

    def number(written: str) -> float | Fraction:
        value = Decimal(written)
        return Fraction(value) if abs(value.adjusted()) < 500 else float(value)

    return json.loads(text, parse_float=number)


def _is(name: str, value: Any) -> bool:
    if name in ("number", "integer"):
        number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
        return number and (name == "number" or value == int(value))
    return isinstance(value, _TYPES[name])


def _number(key: str, wanted: Any, value: Fraction) -> bool:
    if not key.endswith(("imum", "multipleOf")):
        return True
    bound = Fraction(str(wanted))
    match key:
        case "minimum":
            return value >= bound
        case "maximum":
            return value <= bound
        case "exclusiveMinimum":
            return value > bound
        case "exclusiveMaximum":
            return value < bound
    return (value / bound).denominator == 1


def _string(key: str, wanted: Any, value: str) -> bool:
    match key:
        case "minLength":
            return len(value) >= int(wanted)
        case "maxLength":
            return len(value) <= int(wanted)
        case "pattern":
            return re.search(wanted.replace("$", r"\Z"), value) is not None
    return True


def _array(key: str, wanted: Any, value: list[Any], schema: Any, fits: Fits) -> bool:
    match key:
        case "prefixItems":
            return all(fits(*each) for each in zip(wanted, value, strict=False))
        case "items":
            return all(fits(wanted, each) for each in value[len(schema.get("prefixItems", [])) :])
        case "minItems":
            return len(value) >= int(wanted)
        case "maxItems":
            return len(value) <= int(wanted)
        case "uniqueItems":
            pairs = ((one, other) for at, one in enumerate(value) for other in value[:at])
            return not wanted or not any(same(*pair) for pair in pairs)
        case "contains":
            count = sum(fits(wanted, each) for each in value)
            return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", count))
    return True


def _object(key: str, wanted: Any, value: dict[str, Any], schema: Any, fits: Fits) -> bool:
    match key:
        case "required":
            return all(name in value for name in wanted)
        case "properties":
            return all(fits(wanted[name], value[name]) for name in wanted if name in value)
        case "patternProperties":
            return all(
                fits(inner, each)
                for pattern, inner in wanted.items()
                for name, each in value.items()
                if re.search(pattern, name)
            )
        case "additionalProperties":
            return all(
                fits(wanted, each)
                for name, each in value.items()
                if name not in schema.get("properties", {})
                and not any(re.search(each, name) for each in schema.get("patternProperties", {}))
            )
        case "propertyNames":
            return all(fits(wanted, name) for name in value)
        case "minProperties":
            return len(value) >= int(wanted)
        case "maxProperties":
            return len(value) <= int(wanted)
        case "dependentRequired":
            return all(
                set(names) <= value.keys() for name, names in wanted.items() if name in value
            )
        case "dependentSchemas":
            return all(fits(inner) for name, inner in wanted.items() if name in value)
    return True


numbers = st.sampled_from(NUMBERS)
scalars = st.sampled_from([None, True, False, *TEXTS, *NUMBERS])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=5,
)
counts = st.integers(0, 3)


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    listed = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    kinds = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
    branches = st.lists(inner, min_size=1, max_size=3)
    each: dict[str, st.SearchStrategy[Any]] = {
        "type": kinds | st.lists(kinds, min_size=1, max_size=3, unique=True),
        "enum": st.lists(values, min_size=1, max_size=3),
        "const": values,
        "minimum": numbers, "exclusiveMaximum": numbers, "maximum": numbers,
        "multipleOf": st.sampled_from([2, 3, 0.5, 7, 2.5]),
        "minLength": counts, "maxLength": counts, "pattern": st.sampled_from(PATTERNS),
        "prefixItems": st.lists(inner, min_size=1, max_size=2), "items": inner,
        "minItems": counts, "maxItems": counts, "contains": inner,
        "uniqueItems": st.just(True),
        "properties": named, "required": listed, "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        "propertyNames": inner, "minProperties": counts, "maxProperties": counts,
        "dependentRequired": st.dictionaries(st.sampled_from(NAMES), listed, max_size=2),
        "dependentSchemas": named,
        "allOf": branches, "anyOf": branches, "oneOf": branches, "not": inner,
        "if": inner, "then": inner, "else": inner,
        "title": st.just("a note"), "x-own": st.just(1), "format": st.just("of our own"),
    }  # fmt: skip
    keys = st.lists(st.sampled_from(sorted(each)), max_size=3, unique=True)
    return keys.flatmap(lambda found: st.fixed_dictionaries({key: each[key] for key in found}))


schemas: st.SearchStrategy[Any] = st.recursive(st.booleans() | st.just({}), keywords, max_leaves=6)
