"""Reference for grammars: whether a value fits a JSON schema, by jsonschema with exact numbers.

Patterns are those that mean the same in Python and ECMAScript.
"""

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

NAMES = ["a", "b", "ab", "c1"]
TEXTS = ["", "a", "ab", "b1", 'a"', "é\n"]
PATTERNS = ["^a", "b", "[0-9]$", "^[^a]*$", "^(?:a|b$)", "^$|1"]
NUMBERS = [0, 1, 2, 3, 6, 7, -1, 10, 0.5, -2.5, 14]


def is_valid(schema: Any, value: Any) -> bool:
    return bool(_Validator(schema).is_valid(value))


def exactly(text: str) -> Any:
    """Return the value of a JSON text, without rounding of its numbers."""

    def number(written: str) -> float | Fraction:
        value = Decimal(written)
        return Fraction(value) if abs(value.adjusted()) < 500 else float(value)

    return json.loads(text, parse_float=number)


def _is_number(checker: Any, value: Any) -> bool:
    return isinstance(value, int | float | Fraction) and not isinstance(value, bool)


def _keyword(name: str, kind: str, holds: Callable[[Any, Any], Any]) -> Any:
    """Return the check of a keyword, for values of one type."""

    def check(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(value, kind) and not holds(wanted, value):
            yield ValidationError(name)

    return check


def _number(value: Any) -> Fraction:
    return Fraction(str(value))  # as written, not as rounded


_Validator = extend(
    Draft202012Validator,
    {
        name: _keyword(name, kind, holds)
        for name, kind, holds in (
            ("minimum", "number", lambda w, v: _number(v) >= _number(w)),
            ("maximum", "number", lambda w, v: _number(v) <= _number(w)),
            ("exclusiveMinimum", "number", lambda w, v: _number(v) > _number(w)),
            ("exclusiveMaximum", "number", lambda w, v: _number(v) < _number(w)),
            ("multipleOf", "number", lambda w, v: (_number(v) / _number(w)).denominator == 1),
            ("pattern", "string", lambda w, v: re.search(w.replace("$", r"\Z"), v)),
        )
    },
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("number", _is_number).redefine(
        "integer", lambda checker, value: _is_number(checker, value) and value == int(value)
    ),
)


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
