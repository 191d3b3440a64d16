"""Rules for numbers that no terminal can describe: multiples of 7, or none of 13.

A number is read digit by digit. Of each assertion a state keeps what decides it in the end (a
remainder, how the digits so far compare with a bound), and at the end the formula is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from math import lcm
from typing import Any

from akunu_py.decoding.schema.builder import Builder
from akunu_py.decoding.schema.formula import Formula
from akunu_py.decoding.schema.patterns import Unsupported
from akunu_py.decoding.schema.rules import Rule
from akunu_py.decoding.schema.terminals import Expr

_MOST_STATES = 5000
_State = tuple[Any, ...]


def add(builder: Builder, rule: Rule, formula: Formula) -> None:
    """Adds the numbers that fit `formula`, written without an exponent. Raises Unsupported."""
    assertions = list(dict.fromkeys(_assertions(formula)))
    steps = [each[1] for each in assertions if each[0] == "multiple"]
    readers = [_Remainders(steps), *(_reader(each) for each in assertions if each[0] != "multiple")]
    known: dict[_State, Rule] = {}
    pending: list[_State] = []

    def state(phase: str, negative: bool, parts: tuple[Any, ...]) -> Rule:
        key = phase, negative, parts
        if key not in known:
            if len(known) >= _MOST_STATES:
                raise Unsupported("the multiples that are combined need too many states")
            builder.simplifier.spend(3)
            known[key] = builder.rules.new()
            pending.append(key)
        return known[key]

    start = tuple(reader.start for reader in readers)
    builder.rules.add(rule, (Expr("-"), state("sign", True, start)))
    builder.rules.add(rule, (state("sign", False, start),))
    while pending:
        phase, negative, parts = key = pending.pop()
        moves: dict[Rule, str] = {}
        fraction = phase in ("point", "fraction")
        for digit in "0123456789" if phase != "zero" else "":  # a 0 is alone before the point
            after = tuple(
                reader.read(part, int(digit), fraction)
                for reader, part in zip(readers, parts, strict=True)
            )
            following = "zero" if phase == "sign" and digit == "0" else "whole"
            target = state("fraction" if fraction else following, negative, after)
            moves[target] = moves.get(target, "") + digit
        for target, found in moves.items():
            builder.rules.add(known[key], (Expr(f"[{found}]"), target))
        if phase in ("zero", "whole"):
            builder.rules.add(known[key], (Expr(r"\."), state("point", negative, parts)))
        if phase in ("zero", "whole", "fraction"):
            verdicts: dict[Formula, bool] = {}
            for reader, part in zip(readers, parts, strict=True):
                verdicts |= reader.verdicts(part, negative)
            if _evaluated(formula, verdicts):
                builder.rules.add(known[key], ())


def _assertions(formula: Formula) -> list[Formula]:
    if formula[0] in ("and", "or", "not"):
        return [found for part in formula[1:] for found in _assertions(part)]
    return [formula]


def _evaluated(formula: Formula, verdicts: dict[Formula, bool]) -> bool:
    match formula[0]:
        case "and":
            return all(_evaluated(part, verdicts) for part in formula[1:])
        case "or":
            return any(_evaluated(part, verdicts) for part in formula[1:])
        case "not":
            return not _evaluated(formula[1], verdicts)
    return verdicts[formula]


class _Remainders:
    """For multiples: the remainder by the least common one, how many decimals were read, and
    whether there is one behind those that matter."""

    def __init__(self, steps: Sequence[Decimal]) -> None:
        self._decimals = max(0, *(-int(step.normalize().as_tuple().exponent) for step in steps))
        self._wholes = {step: int(step.scaleb(self._decimals)) for step in steps}
        self._common = lcm(*self._wholes.values())
        if self._common > _MOST_STATES:
            raise Unsupported(f"multiples of {self._common} in all need too many states")
        self.start = (0, 0, False)

    def read(self, state: tuple[int, int, bool], digit: int, decimal: bool) -> _State:
        rest, count, late = state
        if decimal and count == self._decimals:
            return (rest, count, late or digit > 0)
        return ((10 * rest + digit) % self._common, count + decimal, late)

    def verdicts(self, state: tuple[int, int, bool], _: bool) -> dict[Formula, bool]:
        rest, count, late = state
        rest *= 10 ** (self._decimals - count)
        return {
            ("multiple", step): not late and rest % whole == 0
            for step, whole in self._wholes.items()
        }


class _Whole:
    """For integers, which are written without a decimal point."""

    start = True

    def read(self, state: bool, digit: int, decimal: bool) -> bool:
        return state and not decimal

    def verdicts(self, state: bool, _: bool) -> dict[Formula, bool]:
        return {("integer",): state}


class _Comparison:
    """With a bound: how many digits of each part were read, and how they compare with those of the
    bound: -1, 0 or 1."""

    start = (0, 0, 0)

    def __init__(self, assertion: Formula) -> None:
        self._assertion = assertion
        kind, self._bound = assertion[:2]
        wanted = {"least": (0, 1), "most": (-1, 0), "number": (0,)}[kind]
        strictly = kind != "number" and assertion[2]
        self._wanted = tuple(each for each in wanted if each or not strictly)
        whole, _, fraction = f"{abs(self._bound):f}".partition(".")
        self._whole, self._fraction = whole.lstrip("0") or "0", fraction.rstrip("0")

    def read(self, state: tuple[int, int, int], digit: int, decimal: bool) -> _State:
        wholes, fractions, sign = state
        digits, at = (self._fraction, fractions) if decimal else (self._whole, wholes)
        if decimal and not fractions:
            sign = self._by_length(wholes, sign)
        other = int(digits[at]) if at < len(digits) else 0
        sign = sign or (digit > other) - (digit < other)
        if decimal:
            return (len(self._whole), min(fractions + 1, max(len(digits), 1)), sign)
        return (min(wholes + 1, len(digits) + 1), 0, sign)

    def _by_length(self, wholes: int, sign: int) -> int:
        """The number with more digits before the point is the greater one."""
        return sign if wholes == len(self._whole) else 1 if wholes > len(self._whole) else -1

    def verdicts(self, state: tuple[int, int, int], negative: bool) -> dict[Formula, bool]:
        wholes, fractions, sign = state
        sign = self._by_length(wholes, sign)
        if not sign and fractions < len(self._fraction):
            sign = -1  # the missing decimals are zeros
        if negative != (self._bound < 0):
            sign = -1 if negative else 1
        elif negative:
            sign = -sign
        return {self._assertion: sign in self._wanted}


def _reader(assertion: Formula) -> _Whole | _Comparison:
    return _Whole() if assertion == ("integer",) else _Comparison(assertion)
