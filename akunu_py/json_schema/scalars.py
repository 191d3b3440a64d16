"""Grammars of null, booleans, numbers and strings, and whether one of them fits a formula.

A number with a condition on its value is written without an exponent.
"""

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from akunu_py.errors import SchemaError
from akunu_py.json_schema import regex
from akunu_py.json_schema.formula import FALSE, TRUE, Formula, conjunction, disjunction, negation
from akunu_py.json_schema.layouts import JSON, Notation
from akunu_py.json_schema.patterns import content_matching, is_found
from akunu_py.json_schema.regex import CHARACTER, CONTENT, NOTHING, Expr, both, either, without
from akunu_py.json_schema.rules import Rule, Rules, Symbol

SCALARS = ("null", "boolean", "number", "string")
# Any number or integer; longer ones are digits that a small model repeats without end.
_NUMBER = Expr(r"-?(?:0|[1-9][0-9]{0,39})(?:\.[0-9]{1,40})?(?:[eE][+\-]?[0-9]{1,4})?")
_ANY_INTEGER = Expr(r"-?(?:0|[1-9][0-9]{0,39})")
_PLAIN = Expr(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
_INTEGER = Expr(r"-?(?:0|[1-9][0-9]*)")
_FRACTION = Expr(r"-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*")  # not an integer
_ZEROS = r"(?:\.0+)?"
_MAX_LISTED = 200  # multiples listed one by one
_MAX_ENDINGS = 1000  # last digits listed one by one
_MAX_STATES = 2500  # of an automaton of integers


def values(formula: Formula) -> list[Any] | None:
    """Return all numbers or strings that fit, None if the formula does not list them."""
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
    """Return whether a number (Decimal), a string or a boolean fits."""
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
            return (Fraction(value) / Fraction(step)).denominator == 1
        case ("length", low, high):
            return low <= len(value) and (high is None or len(value) <= high)
        case ("pattern", pattern):
            return is_found(pattern, value)
    raise AssertionError(formula)


def grammar_of(kind: str, formula: Formula, notation: Notation) -> tuple[Symbol, ...]:
    """Return the grammar of the values of the type `kind` that fit. Raises SchemaError."""
    if kind == "null":
        return (notation.word(None),)
    if kind == "boolean":
        return (either(notation.word(each) for each in (True, False) if fits(formula, each)),)
    if kind == "number":
        return (_number(formula),)
    return notation.string(None if formula == TRUE else string_content(formula))


def listed(kind: str, formula: Formula, notation: Notation) -> list[tuple[Symbol, ...]] | None:
    """Return the grammar of each value that fits, None if the formula does not list them."""
    if kind == "null":
        return [(notation.word(None),)]
    if kind == "boolean":
        return [(notation.word(each),) for each in (True, False) if fits(formula, each)]
    if kind not in SCALARS or (found := values(formula)) is None:
        return None
    if kind == "string":
        return [notation.string(regex.string_content(each)) for each in found]
    return [(either(map(regex.raw_text, _spellings(each))),) for each in found]


def is_empty(kind: str, formula: Formula) -> bool:
    """Return whether no value of the type `kind` fits. Raises SchemaError."""
    if formula == FALSE:
        return True
    parts = grammar_of(kind, formula, JSON)
    return any(isinstance(each, Expr) and regex.is_empty(each) for each in parts)


def string_content(formula: Formula) -> Expr:
    """Return the content of the strings that fit, as JSON writes it. Raises SchemaError."""
    if (found := values(formula)) is not None:
        return either(map(regex.string_content, found))
    match formula:
        case ("and", *parts):
            return both(*map(string_content, parts)) if parts else CONTENT
        case ("or", *parts):
            return either(map(string_content, parts))
        case ("not", part):
            return without(CONTENT, string_content(part), inhabited=values(part) is not None)
        case ("length", low, high):
            return regex.repeat(CHARACTER, low, high) if high is None or high >= low else NOTHING
        case ("pattern", pattern):
            return content_matching(pattern)
    raise AssertionError(formula)


def add_numbers(rules: Rules, rule: Rule, formula: Formula, spend: Callable[[int], None]) -> None:
    try:
        rules.add(rule, (_number(formula),))
    except SchemaError:
        _add_digits(rules, rule, formula, spend)


def _number(formula: Formula) -> Expr:
    """Return the numbers that fit as one terminal. Raises SchemaError."""
    if formula == TRUE:
        return _NUMBER
    if formula == ("integer",):
        return _ANY_INTEGER
    if (found := values(formula)) is not None:
        return either(regex.raw_text(each) for value in found for each in _spellings(value))
    return _fitting_numbers(formula)


def _fitting_numbers(formula: Formula) -> Expr:
    match formula:
        case ("and", *parts):
            if (found := _multiples_between(formula)) is not None:
                multiples = either(map(_exact_value, found))
                return both(multiples, _INTEGER) if ("integer",) in parts else multiples
            return both(*map(_fitting_numbers, parts))
        case ("or", *parts):
            return either(map(_fitting_numbers, parts))
        case ("not", ("integer",)):
            return _FRACTION
        case ("not", part):
            return without(_PLAIN, _fitting_numbers(part))
        case ("number", value):
            return _exact_value(value)
        case ("integer",):
            return _INTEGER
        case ("least", bound, strictly):
            return _at_least(bound, strictly, "", "-")
        case ("most", bound, strictly):
            return _at_least(-bound, strictly, "-", "")
        case ("multiple", step):
            return _multiples(step)
    raise AssertionError(formula)


def _multiples_between(formula: Formula) -> list[Decimal] | None:
    """Return the multiples in an interval, None if there is no interval or there are too many."""
    steps = [Fraction(part[1]) for part in formula[1:] if part[0] == "multiple"]
    lows = [part[1] for part in formula[1:] if part[0] == "least"]
    highs = [part[1] for part in formula[1:] if part[0] == "most"]
    if not steps or not lows or not highs:
        return None
    common = Fraction(lcm(*(s.numerator for s in steps)), gcd(*(s.denominator for s in steps)))
    step, low, high = Decimal(common.numerator) / common.denominator, max(lows), min(highs)
    if (high - low) / step > _MAX_LISTED:
        return None
    first, last = int(low // step) - 1, int(high // step) + 1
    return [step * each for each in range(first, last + 1) if fits(formula, step * each)]


def _spellings(value: Decimal) -> list[str]:
    """Return how an integer is written, or a fraction both plainly and as Python writes it."""
    texts = [f"{value.normalize():f}" if value else "0"]
    if value != value.to_integral_value() or value.as_tuple().exponent:
        texts.append(json.dumps(float(value)))
    return list(dict.fromkeys(texts))


def _split_digits(value: Decimal) -> tuple[str, str]:
    """Return the integer part and the decimals without trailing zeros, both without a sign."""
    whole, _, fraction = f"{abs(value):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _exact_value(value: Decimal) -> Expr:
    """Return all ways to write `value`."""
    whole, fraction = _split_digits(value)
    sign = "-?" if value == 0 else "-" if value < 0 else ""
    return Expr(f"{sign}{whole}" + (rf"\.{fraction}0*" if fraction else _ZEROS))


def _at_least(value: Decimal, strictly: bool, sign: str, minus: str) -> Expr:
    """Return the numbers from `value` on; for "-" and "", the negatives of those numbers."""
    if value > 0 or (value == 0 and strictly):
        return Expr(sign + _unsigned_from(value, strictly))
    return without(_PLAIN, Expr(minus + _unsigned_from(-value, not strictly)), inhabited=True)


def _unsigned_from(value: Decimal, strictly: bool) -> str:
    """Return the numbers without a sign from `value` on, a non-negative number."""
    whole, fraction = _split_digits(value)
    greater = [f"[1-9][0-9]{{{len(whole)},}}"]
    greater += [
        f"{whole[:at]}[{int(digit) + 1}-9][0-9]{{{len(whole) - at - 1}}}"
        for at, digit in enumerate(whole)
        if digit < "9"
    ]
    options = [rf"(?:{'|'.join(greater)})(?:\.[0-9]+)?"]
    if not fraction:
        options.append(whole + (r"\.[0-9]*[1-9][0-9]*" if strictly else r"(?:\.[0-9]+)?"))
    else:
        more = [
            f"{fraction[:at]}[{int(digit) + 1}-9][0-9]*"
            for at, digit in enumerate(fraction)
            if digit < "9"
        ]
        more.append(f"{fraction}[0-9]*" + ("[1-9][0-9]*" if strictly else ""))
        options.append(rf"{whole}\.(?:{'|'.join(more)})")
    return f"(?:{'|'.join(options)})"


def _multiples(step: Decimal) -> Expr:
    """Return the multiples of a number that divides a power of ten, by their last digits."""
    decimals = max(0, -int(step.as_tuple().exponent))
    scaled = int(step.scaleb(decimals))
    width = next((k for k in range(decimals, 20) if 10**k % scaled == 0), None)
    if width is None or 10**width // scaled > _MAX_ENDINGS:
        raise SchemaError(f"multipleOf {step:f} is not supported, only integers, 0.1, 0.5 and such")
    endings = []
    for ending in range(0, 10**width, scaled):
        text = f"{ending:0{width}d}" if width else ""
        last, fraction = text[: width - decimals], text[width - decimals :].rstrip("0")
        short = last.lstrip("0") or "0"
        before = f"(?:[1-9][0-9]*{last}|{short})" if last else "(?:0|[1-9][0-9]*)"
        endings.append(before + (rf"\.{fraction}0*" if fraction else _ZEROS))
    return Expr(f"-?(?:{'|'.join(endings)})")


def _for_fractions(formula: Formula) -> Formula:
    """Simplify `formula` for numbers that are not integers. Raises SchemaError."""
    match formula:
        case ("and", *parts):
            return conjunction(map(_for_fractions, parts))
        case ("or", *parts):
            return disjunction(map(_for_fractions, parts))
        case ("not", part):
            return negation(_for_fractions(part))
        case ("integer",):
            return FALSE
        case ("number" | "multiple" as kind, value) if value == value.to_integral_value():
            return FALSE
        case (kind, value, *_):
            if kind == "multiple" or value != value.to_integral_value():
                raise SchemaError(f"multipleOf with {value:f} is not supported, only integers")
    return formula


def _add_digits(rules: Rules, rule: Rule, formula: Formula, spend: Callable[[int], None]) -> None:
    """Add the numbers that fit as rules for single digits. Raises SchemaError.

    A state stands for all integers that have the same remainder and compare alike with the first
    digits of each bound. One of them is tested for all.
    """
    assertions, fractions = _assertions(formula), _for_fractions(formula)
    period = lcm(*(Fraction(each[1]).numerator for each in assertions if each[0] == "multiple"))
    limits = [each[1] for each in assertions if each[0] in ("least", "most", "number")]
    bounds = [_split_digits(each)[0] for each in limits]
    known: dict[tuple[Any, ...], Rule] = {}
    pending: list[tuple[int, int, Rule]] = []

    def state(sign: int, value: int) -> Rule:
        compared = (_compare_digits(str(value), bound) for bound in bounds)
        key = sign, value == 0, value % period, *compared
        if key not in known:
            if len(known) >= _MAX_STATES:
                raise SchemaError("multipleOf needs too many states; make it simpler")
            spend(3)
            known[key] = rules.new()
            pending.append((sign, value, known[key]))
        return known[key]

    def add_transitions(target: Rule, sign: int, value: int, before: str) -> None:
        transitions: dict[Rule, str] = {}
        for digit in range(10):
            following = state(sign, 10 * value + digit)
            transitions[following] = transitions.get(following, "") + str(digit)
        for following, found in transitions.items():
            rules.add(target, (Expr(f"{before}[{found}]"), following))

    add_transitions(rule, 1, 0, "")
    add_transitions(rule, -1, 0, "-")
    for sign, value, target in pending:  # Grows, in the order of the number of digits.
        if value:
            add_transitions(target, sign, value, "")
        if (value or sign > 0) and fits(formula, Decimal(sign * value)):
            rules.add(target, ())
            if ("integer",) not in assertions:
                rules.add(target, (Expr(r"\.0+"),))
        if fits(fractions, sign * (value + Decimal("0.5"))):
            rules.add(target, (Expr(r"\.[0-9]*[1-9][0-9]*"),))


def _assertions(formula: Formula) -> list[Formula]:
    if formula[0] in ("and", "or", "not"):
        return [found for part in formula[1:] for found in _assertions(part)]
    return [formula]


def _compare_digits(text: str, bound: str) -> tuple[int, int]:
    """Compare the digits of an integer with as many digits of a bound."""
    if len(text) > len(bound):
        return len(bound) + 1, 1
    return len(text), (text > bound[: len(text)]) - (text < bound[: len(text)])
