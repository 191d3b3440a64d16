"""Reference for grammars: whether a value fits a JSON schema, by the standard (2020-12).

Patterns are those that mean the same in Python and ECMAScript.
"""

from __future__ import annotations

import itertools
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

    for key, wanted in schema.items():
        if key in _ANY:
            valid = _ANY[key](wanted, value, schema, fits, root)
        else:
            kind = next((kind for kind in _BY_TYPE if _is(kind, value)), "")
            applies = _BY_TYPE[kind].get(key) if kind else None
            valid = applies is None or applies(wanted, value, schema, fits)
        if not valid:
            return False
    return True


def same(one: Any, other: Any) -> bool:
    return bool(one == other) and _plain(one) == _plain(other)


def _plain(value: Any) -> str:
    """1 is 1.0, but true is not 1."""
    return json.dumps(value, sort_keys=True, default=float).replace(".0", "")


def exactly(text: str) -> Any:
    """Return the value of a JSON text, without rounding of its numbers."""

    def number(written: str) -> float | Fraction:
        value = Decimal(written)
        return Fraction(value) if abs(value.adjusted()) < 500 else float(value)

    return json.loads(text, parse_float=number)


def _is(name: str, value: Any) -> bool:
    if name in ("number", "integer"):
        number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
        return number and (name == "number" or value == int(value))
    return isinstance(value, _TYPES[name])


def _target(reference: str, root: Any) -> Any:
    for name in reference.split("/")[1:]:
        root = root[name]
    return root


def _number(text: Any) -> Fraction:
    return Fraction(str(text))


def _contains(wanted: Any, value: list[Any], schema: Any, fits: Fits) -> bool:
    count = sum(fits(wanted, each) for each in value)
    return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", count))


def _additional(schema: Any, name: str) -> bool:
    patterns = schema.get("patternProperties", {})
    return name not in schema.get("properties", {}) and not any(
        re.search(each, name) for each in patterns
    )


# By keyword: whether a value fits, of (wanted, value, schema, fits, root).
_ANY: dict[str, Callable[..., Any]] = {
    "$ref": lambda w, v, s, fits, root: fits(_target(w, root)),
    "type": lambda w, v, *_: any(_is(each, v) for each in ([w] if isinstance(w, str) else w)),
    "const": lambda w, v, *_: same(w, v),
    "enum": lambda w, v, *_: any(same(each, v) for each in w),
    "allOf": lambda w, v, s, fits, root: all(map(fits, w)),
    "anyOf": lambda w, v, s, fits, root: any(map(fits, w)),
    "oneOf": lambda w, v, s, fits, root: sum(map(fits, w)) == 1,
    "not": lambda w, v, s, fits, root: not fits(w),
    "if": lambda w, v, s, fits, root: fits(s.get("then" if fits(w) else "else", True)),
}
# By type and keyword, of (wanted, value, schema, fits).
_BY_TYPE: dict[str, dict[str, Callable[..., Any]]] = {
    "number": {
        "minimum": lambda w, v, *_: _number(v) >= _number(w),
        "maximum": lambda w, v, *_: _number(v) <= _number(w),
        "exclusiveMinimum": lambda w, v, *_: _number(v) > _number(w),
        "exclusiveMaximum": lambda w, v, *_: _number(v) < _number(w),
        "multipleOf": lambda w, v, *_: (_number(v) / _number(w)).denominator == 1,
    },
    "string": {
        "minLength": lambda w, v, *_: len(v) >= w,
        "maxLength": lambda w, v, *_: len(v) <= w,
        "pattern": lambda w, v, *_: re.search(w.replace("$", r"\Z"), v),
    },
    "array": {
        "prefixItems": lambda w, v, s, fits: all(map(fits, w, v)),
        "items": lambda w, v, s, fits: all(fits(w, x) for x in v[len(s.get("prefixItems", [])) :]),
        "minItems": lambda w, v, *_: len(v) >= w,
        "maxItems": lambda w, v, *_: len(v) <= w,
        "uniqueItems": lambda w, v, *_: (
            not w or not any(itertools.starmap(same, itertools.combinations(v, 2)))
        ),
        "contains": _contains,
    },
    "object": {
        "required": lambda w, v, *_: all(name in v for name in w),
        "properties": lambda w, v, s, fits: all(fits(w[n], v[n]) for n in w if n in v),
        "patternProperties": lambda w, v, s, fits: all(
            fits(w[each], v[name]) for each in w for name in v if re.search(each, name)
        ),
        "additionalProperties": lambda w, v, s, fits: all(
            fits(w, each) for name, each in v.items() if _additional(s, name)
        ),
        "propertyNames": lambda w, v, s, fits: all(fits(w, name) for name in v),
        "minProperties": lambda w, v, *_: len(v) >= w,
        "maxProperties": lambda w, v, *_: len(v) <= w,
        "dependentRequired": lambda w, v, *_: all(set(w[n]) <= v.keys() for n in w if n in v),
        "dependentSchemas": lambda w, v, s, fits: all(fits(w[n]) for n in w if n in v),
    },
}


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
