"""Rules for numbers that no terminal can describe: multiples of 7, or none of 13.

A number is read digit by digit. Of each assertion a state keeps what decides it in the end (a
remainder, how the digits so far compare with a bound), and at the end the formula is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from math import lcm
from typing import Any, Protocol

from akunu_py.json_schema.builder import Builder
from akunu_py.json_schema.formula import Formula
from akunu_py.json_schema.patterns import Unsupported
from akunu_py.json_schema.regex import Expr
from akunu_py.json_schema.rules import Rule

_MOST_STATES = 2500
_State = tuple[Any, ...]
_Verdicts = dict[Formula, bool] | None


def add(builder: Builder, rule: Rule, formula: Formula) -> None:
    """Adds the numbers that fit `formula`, written without an exponent. Raises Unsupported."""
    assertions = list(dict.fromkeys(_assertions(formula)))
    steps = [each[1] for each in assertions if each[0] == "multiple"]
    readers: list[_Reader] = [_Zero(), _Remainders(steps)]
    readers += [_reader(each) for each in assertions if each[0] != "multiple"]
    known: dict[_State, Rule] = {}
    pending: list[_State] = []

    def state(phase: str, parts: _State) -> Rule:
        key = phase, parts
        if key not in known:
            if len(known) >= _MOST_STATES:
                raise Unsupported("the multiples that are combined need too many states")
            builder.simplifier.spend(3)
            known[key] = builder.rules.new()
            pending.append(key)
        return known[key]

    def move(target: Rule, parts: _State, phase: str, dot: str) -> None:
        """Adds what the next digit leads to."""
        moves: dict[Rule, str] = {}
        for digit in range(10):
            after = tuple(
                reader.read(part, digit, phase == "fraction")
                for reader, part in zip(readers, parts, strict=True)
            )
            next_phase = "zero" if phase == "sign" and digit == 0 else phase
            following = state("whole" if next_phase == "sign" else next_phase, after)
            moves[following] = moves.get(following, "") + str(digit)
        for following, digits in moves.items():
            builder.rules.add(target, (Expr(f"{dot}[{digits}]"), following))

    for negative in (False, True):
        start = builder.rules.new()
        builder.rules.add(rule, (Expr("-"), start) if negative else (start,))
        move(start, tuple(reader.start(negative) for reader in readers), "sign", "")
    while pending:
        phase, parts = key = pending.pop()
        if phase != "zero":  # a 0 is alone before the point
            move(known[key], parts, phase, "")
        if phase != "fraction":
            move(known[key], parts, "fraction", r"\.")
        found = [reader.verdicts(part) for reader, part in zip(readers, parts, strict=True)]
        written = [each for each in found if each is not None]
        verdicts = {name: verdict for each in written for name, verdict in each.items()}
        if len(written) == len(found) and _evaluated(formula, verdicts):
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


class _Reader(Protocol):
    """Reads digits, and keeps what decides assertions about the number."""

    def start(self, negative: bool) -> Any:
        """Before the first digit."""

    def read(self, state: Any, digit: int, decimal: bool) -> Any:
        """Behind another digit, `decimal` where it is behind the point."""

    def verdicts(self, state: Any) -> _Verdicts:
        """By assertion, if the number ends here; None where it is not written so."""


class _Zero:
    """There is no -0. State: whether a sign may be there."""

    def start(self, negative: bool) -> bool:
        return not negative

    def read(self, state: bool, digit: int, decimal: bool) -> bool:
        return state or digit > 0

    def verdicts(self, state: bool) -> _Verdicts:
        return {} if state else None


class _Remainders:
    """For multiples: the remainder by the least common one, and how many decimals were read; None
    behind one that is not 0 and behind those that matter."""

    def __init__(self, steps: Sequence[Decimal]) -> None:
        self._decimals = max(0, *(-int(step.normalize().as_tuple().exponent) for step in steps))
        self._wholes = {step: int(step.scaleb(self._decimals)) for step in steps}
        self._common = lcm(*self._wholes.values())
        if self._common > _MOST_STATES:
            raise Unsupported(f"multiples of {self._common} in all need too many states")

    def start(self, negative: bool) -> tuple[int, int]:
        return (0, 0)

    def read(
        self, state: tuple[int, int] | None, digit: int, decimal: bool
    ) -> tuple[int, int] | None:
        if state is None:
            return None
        rest, count = state
        if decimal and count == self._decimals:
            return None if digit else state
        return ((10 * rest + digit) % self._common, count + decimal)

    def verdicts(self, state: tuple[int, int] | None) -> _Verdicts:
        if state is None:
            return {("multiple", step): False for step in self._wholes}
        rest = state[0] * 10 ** (self._decimals - state[1])
        return {("multiple", step): rest % whole == 0 for step, whole in self._wholes.items()}


class _Whole:
    """For integers, which are written without a decimal point. State: the decimals: none, zeros or
    others."""

    def start(self, negative: bool) -> str:
        return "none"

    def read(self, state: str, digit: int, decimal: bool) -> str:
        if not decimal or state == "others":
            return state
        return "others" if digit else "zeros"

    def verdicts(self, state: str) -> _Verdicts:
        return None if state == "zeros" else {("integer",): state == "none"}


class _Comparison:
    """With a bound: how many digits of each part were read, and how they compare with those of the
    bound: -1, 0 or 1. Only the comparison where that is all that matters."""

    def __init__(self, assertion: Formula) -> None:
        self._assertion = assertion
        kind, self._bound = assertion[:2]
        wanted = {"least": (0, 1), "most": (-1, 0), "number": (0,)}[kind]
        strictly = kind != "number" and assertion[2]
        self._wanted = tuple(each for each in wanted if each or not strictly)
        whole, _, fraction = f"{abs(self._bound):f}".partition(".")
        self._whole, self._fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
        self._flip = -1 if self._bound < 0 else 1  # the greater magnitude is the lesser number

    def start(self, negative: bool) -> tuple[int, int, int] | int:
        if negative != (self._bound < 0):
            return -1 if negative else 1
        return (0, 0, 0)

    def read(self, state: tuple[int, int, int] | int, digit: int, decimal: bool) -> Any:
        if isinstance(state, int):
            return state
        wholes, fractions, sign = state
        if decimal and not fractions:
            sign = self._by_length(wholes, sign)
        digits, at = (self._fraction, fractions) if decimal else (self._whole, wholes)
        other = int(digits[at]) if at < len(digits) else 0
        sign = sign or (digit > other) - (digit < other)
        if decimal:
            return self._flip * sign if sign else (wholes, min(at + 1, max(1, len(digits))), 0)
        if wholes + 1 > len(self._whole):
            return self._flip  # more digits: the greater magnitude
        return (wholes + 1, 0, sign)

    def _by_length(self, wholes: int, sign: int) -> int:
        """The number with more digits before the point is the greater one."""
        return sign if wholes == len(self._whole) else -1

    def verdicts(self, state: tuple[int, int, int] | int) -> _Verdicts:
        if isinstance(state, int):
            return {self._assertion: state in self._wanted}
        wholes, fractions, sign = state
        sign = self._by_length(wholes, sign)
        if not sign and fractions < len(self._fraction):
            sign = -1  # the missing decimals are zeros
        return {self._assertion: self._flip * sign in self._wanted}


def _reader(assertion: Formula) -> _Reader:
    return _Whole() if assertion == ("integer",) else _Comparison(assertion)
