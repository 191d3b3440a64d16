"""Formulas about null, booleans, numbers and strings: terminals, and whether a value fits."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from akunu_py.json_schema import numbers, regex
from akunu_py.json_schema.formula import FALSE, TRUE, Formula, conjunction
from akunu_py.json_schema.layouts import JSON, Notation
from akunu_py.json_schema.patterns import Unsupported, content_matching, is_found
from akunu_py.json_schema.regex import (
    CHARACTER,
    CONTENT,
    Expr,
    both,
    either,
    without,
)
from akunu_py.json_schema.rules import Symbol

SCALARS = ("null", "boolean", "number", "string")
_MOST_COUNTED = 200  # multiples that are listed one by one


def property_rule(rule: Formula, name: str) -> Formula:
    """What a `properties` assertion asks of the value of the property `name`."""
    _, names, patterns, others = rule
    found = [value for known, value in names if known == name]
    found += [value for pattern, value in patterns if is_found(pattern, name)]
    return conjunction(found) if found else others


def values(formula: Formula) -> list[Any] | None:
    """All numbers or strings that fit, where those are listed; None where they are not."""
    match formula[0]:
        case "number" | "string":
            return [formula[1]]
        case "or":
            listed = [values(part) for part in formula[1:]]
            known = [each for each in listed if each is not None]
            if len(known) < len(listed):
                return None
            return list(dict.fromkeys(value for each in known for value in each))
        case "and":
            for part in formula[1:]:
                if (found := values(part)) is not None:
                    return [value for value in found if fits(formula, value)]
    return None


def fits(formula: Formula, value: Any) -> bool:
    """Whether a number (Decimal), a string or a boolean fits."""
    match formula:
        case ("and", *parts):
            return all(fits(part, value) for part in parts)
        case ("or", *parts):
            return any(fits(part, value) for part in parts)
        case ("not", part):
            return not fits(part, value)
        case ("number" | "string" | "boolean", other):
            return bool(other == value)
        case ("integer",):
            return bool(value == value.to_integral_value())
        case ("least", bound, strictly):
            return bool(value > bound or (value == bound and not strictly))
        case ("most", bound, strictly):
            return bool(value < bound or (value == bound and not strictly))
        case ("multiple", step):
            return bool(value % step == 0)
        case ("length", low, high):
            return low <= len(value) and (high is None or len(value) <= high)
        case ("pattern", pattern):
            return is_found(pattern, value)
    raise AssertionError(formula)


def written(kind: str, formula: Formula, notation: Notation) -> tuple[Symbol, ...] | None:
    """How the values of the type `kind` that fit are written; None where there are none.

    Raises Unsupported.
    """
    if kind == "null":
        return (notation.word(None),)
    if kind == "boolean":
        word = either(notation.word(each) for each in (True, False) if fits(formula, each))
        return None if word is None else (word,)
    if kind == "number":
        expr = number(formula)
        return None if expr is None else (expr,)
    content = None if formula == TRUE else string_content(formula)
    return None if content is None and formula != TRUE else notation.string(content)


def number(formula: Formula) -> Expr | None:
    """How the numbers that fit are written; None where there are none. Raises Unsupported."""
    found = values(formula)
    if found is not None:
        return either(regex.raw_text(each) for value in found for each in _written(value))
    if formula == TRUE:
        return numbers.NUMBER
    return _number(formula)


def string_content(formula: Formula) -> Expr | None:
    """What strings that fit hold, as JSON writes it."""
    if (found := values(formula)) is not None:
        return either(map(regex.string_content, found))
    match formula:
        case ("and", *parts):
            inner = [string_content(part) for part in parts]
            known = [each for each in inner if each is not None]
            return (
                both(*known) if known and len(known) == len(inner) else None if parts else CONTENT
            )
        case ("or", *parts):
            return either(each for part in parts if (each := string_content(part)) is not None)
        case ("not", part):
            other = string_content(part)
            if other is None:
                return CONTENT
            return without(CONTENT, other, inhabited=values(part) is not None)
        case ("length", low, high):
            return regex.repeat(CHARACTER, low, high) if high is None or high >= low else None
        case ("pattern", pattern):
            return content_matching(pattern)
    raise AssertionError(formula)


def _number(formula: Formula) -> Expr | None:
    match formula:
        case ("and", *parts):
            if (counted := _counted(formula)) is not None:
                return either(map(regex.raw_text, counted))
            inner = [_number(part) for part in parts]
            known = [each for each in inner if each is not None]
            return both(*known) if len(known) == len(inner) else None
        case ("or", *parts):
            return either(each for part in parts if (each := _number(part)) is not None)
        case ("not", ("integer",)):
            return numbers.FRACTION
        case ("not", part):
            other = _number(part)
            return numbers.PLAIN if other is None else without(numbers.PLAIN, other)
        case ("number", value):
            return numbers.exactly(value)
        case ("integer",):
            return numbers.INTEGER
        case ("least", bound, strictly):
            return numbers.at_least(bound, strictly=strictly)
        case ("most", bound, strictly):
            return numbers.at_most(bound, strictly=strictly)
        case ("multiple", step):
            expr = numbers.multiples(step)
            if expr is None:
                raise Unsupported(f"multipleOf {step} cannot be told by the last digits")
            return expr
    raise AssertionError(formula)


def _counted(formula: Formula) -> list[str] | None:
    """The multiples in an interval, where they are few."""
    steps = [part[1] for part in formula[1:] if part[0] == "multiple"]
    lows = [part[1] for part in formula[1:] if part[0] == "least"]
    highs = [part[1] for part in formula[1:] if part[0] == "most"]
    if not steps or not lows or not highs:
        return None
    step, low, high = max(steps), max(lows), min(highs)
    if (high - low) / step > _MOST_COUNTED:
        return None
    first, last = int(low // step) - 1, int(high // step) + 1
    found = [step * each for each in range(first, last + 1)]
    return [text for value in found if fits(formula, value) for text in _written(value)]


def _written(value: Decimal) -> list[str]:
    """As integers are written, and fractions both plainly and as Python writes them."""
    texts = [f"{value.normalize():f}" if value else "0"]
    if value != value.to_integral_value() or value.as_tuple().exponent:
        texts.append(json.dumps(float(value)))
    return list(dict.fromkeys(texts))


def listed(kind: str, formula: Formula, notation: Notation) -> list[tuple[Symbol, ...]] | None:
    """How the values of the type `kind` that fit are written, where those are listed."""
    if kind == "null":
        return [(notation.word(None),)]
    if kind == "boolean":
        return [(notation.word(each),) for each in (True, False) if fits(formula, each)]
    if kind not in SCALARS or (found := values(formula)) is None:
        return None
    if kind == "string":
        return [notation.string(regex.string_content(each)) for each in found]
    texts = [either(map(regex.raw_text, _written(each))) for each in found]
    return [(text,) for text in texts if text is not None]


def is_empty(kind: str, formula: Formula) -> bool:
    """Whether no value of the type `kind` fits. Raises Unsupported."""
    if formula == FALSE:
        return True
    parts = written(kind, formula, JSON)
    return parts is None or any(isinstance(each, Expr) and regex.is_empty(each) for each in parts)
