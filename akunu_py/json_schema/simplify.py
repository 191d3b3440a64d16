"""Formulas for the values of one type, without `not`, and their disjunctive normal form."""

from collections.abc import Iterable

from akunu_py.errors import SchemaError
from akunu_py.json_schema import scalars
from akunu_py.json_schema.formula import (
    FALSE,
    TRUE,
    TYPES,
    Document,
    Formula,
    conjunction,
    disjunction,
    negation,
)
from akunu_py.json_schema.patterns import is_found

_TYPE_OF = {
    **dict.fromkeys(("least", "most", "multiple", "integer"), "number"),
    **dict.fromkeys(("length", "pattern"), "string"),
    **dict.fromkeys(("items", "minItems", "maxItems", "unique", "contains"), "array"),
    **dict.fromkeys(("properties", "required", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("names", "some", "others"), "object"),
}
_MAX_CONJUNCTIONS = 3000
_PROOF_DEPTH = 3  # levels of a value that are compared between branches of a oneOf
_MAX_STEPS = 300_000

Conjunction = tuple[Formula, ...]


class Simplifier:
    """Simplifies the formulas of one document. Raises SchemaError."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._known: dict[tuple[Formula, str, bool, bool], Formula] = {}
        self._active: list[tuple[Formula, bool]] = []
        self._proving = False
        self._steps = 0

    def spend(self, steps: int = 1) -> None:
        """Raise SchemaError when the work takes too long."""
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise SchemaError("too many schemas are combined; make it simpler")

    def restrict(self, formula: Formula, kind: str, *, holds: bool = True) -> Formula:
        """Simplify `formula`, or its negation, for values of the type `kind`."""
        self.spend()
        key = formula, kind, holds, self._proving
        if key not in self._known:
            self._known[key] = self._restrict(formula, kind, holds)
        return self._known[key]

    def _restrict(self, formula: Formula, kind: str, holds: bool) -> Formula:
        match formula[0]:
            case "and" | "or":
                parts = (self.restrict(part, kind, holds=holds) for part in formula[1:])
                return conjunction(parts) if (formula[0] == "and") == holds else disjunction(parts)
            case "not":
                return self.restrict(formula[1], kind, holds=not holds)
            case "schema":
                return self._schema(formula, kind, holds)
            case "one":
                return self.restrict(self._exactly_one(formula[1:], holds), kind)
            case "type" | "null":
                wanted = formula[1] if formula[0] == "type" else "null"
                return TRUE if (wanted == kind) == holds else FALSE
            case "boolean" | "string" | "number" as wanted:
                if wanted != kind:
                    return FALSE if holds else TRUE
            case assertion:
                if _TYPE_OF[assertion] != kind:
                    return TRUE if holds else FALSE
        if holds or kind in scalars.SCALARS:
            return formula if holds else negation(formula)
        return _negated(formula)

    def _schema(self, formula: Formula, kind: str, holds: bool) -> Formula:
        if (formula, holds) in self._active:
            raise SchemaError("it refers to nothing but itself", self._document.place(formula[1]))
        self._active.append((formula, holds))
        try:
            return self.restrict(self._document.formula(formula[1]), kind, holds=holds)
        finally:
            self._active.pop()

    def _exactly_one(self, branches: tuple[Formula, ...], holds: bool) -> Formula:
        """Return a formula for "exactly one of `branches` is true", or for its negation."""
        if not holds:
            pairs = [(one, two) for at, one in enumerate(branches) for two in branches[:at]]
            return disjunction([conjunction(map(negation, branches)), *map(conjunction, pairs)])
        if self._proving:  # A proof of emptiness may start from a superset of the values.
            return disjunction(branches)
        alone: list[list[Formula]] = [[branch] for branch in branches]
        for at in range(len(branches)):
            for other in range(at):
                if not self._disjoint(branches[at], branches[other]):
                    alone[at].append(negation(branches[other]))
                    alone[other].append(negation(branches[at]))
        return disjunction(map(conjunction, alone))

    def _disjoint(self, one: Formula, other: Formula) -> bool:
        self._proving = True
        within, self._active = self._active, []
        try:
            return self._provably_empty(conjunction([one, other]), _PROOF_DEPTH)
        except (SchemaError, ValueError):
            return False
        finally:
            self._proving, self._active = False, within

    def _provably_empty(self, formula: Formula, depth: int) -> bool:
        """Return whether no value fits, False if that takes a long proof."""
        if formula in (TRUE, FALSE) or not depth:
            return formula == FALSE
        for kind in TYPES:
            left = self.restrict(formula, kind)
            if left == FALSE:
                continue
            if kind in scalars.SCALARS:
                if not scalars.is_empty(kind, left):
                    return False
            elif not all(self._contradicts(each, depth) for each in self.normal_form(left)):
                return False
        return True

    def _contradicts(self, literals: Conjunction, depth: int) -> bool:
        """Return whether item counts, a required property or an item make `literals` false."""
        least, most = count_limits(literals, "Items")
        if most is not None and least > most:
            return True
        values = [property_value(literals, each[1]) for each in of_kind(literals, "required")]
        values += [item_value(literals, at) for at in range(min(least, 8))]
        return any(self._provably_empty(value, depth - 1) for value in values)

    def normal_form(self, formula: Formula) -> list[Conjunction]:
        """Return the disjunctive normal form: conjunctions, one of which holds."""
        if formula[0] == "or":
            found = [each for part in formula[1:] for each in self.normal_form(part)]
        elif formula[0] == "and":
            found = [()]
            for part in formula[1:]:
                options = self.normal_form(part)
                self.spend(len(found) * len(options))
                found = self._pruned((*one, *other) for one in found for other in options)
        else:
            found = [(formula,)]
        return self._pruned(found)

    def _pruned(self, conjunctions: Iterable[Conjunction]) -> list[Conjunction]:
        """Drop conjunctions that cannot be true, or that a shorter conjunction covers."""
        found: dict[frozenset[Formula], Conjunction] = {}
        for each in conjunctions:
            unique = tuple(dict.fromkeys(each))
            literals = frozenset(unique)
            required = of_kind(unique, "required")
            possible = all(property_value(unique, name) != FALSE for _, name in required)
            if literals not in found and possible:
                found[literals] = unique
        if len(found) > _MAX_CONJUNCTIONS:
            raise SchemaError("too many combinations; make it simpler")
        if len(found) < 60:
            self.spend(len(found))
            found = {
                literals: each
                for literals, each in found.items()
                if not any(other < literals for other in found)
            }
        return list(found.values())


def property_value(literals: Conjunction, name: str) -> Formula:
    values = []
    for _, names, patterns, others in of_kind(literals, "properties"):
        found = [value for known, value in names if known == name]
        found += [value for pattern, value in patterns if is_found(pattern, name)]
        values += found or [others]
    return conjunction(values)


def item_value(literals: Conjunction, at: int) -> Formula:
    items = of_kind(literals, "items")
    return conjunction(each[1][at] if at < len(each[1]) else each[2] for each in items)


def of_kind(literals: Conjunction, kind: str) -> list[Formula]:
    return [each for each in literals if each[0] == kind]


def count_limits(literals: Conjunction, noun: str) -> tuple[int, int | None]:
    """Return the smallest and largest number of "Items" or "Properties"; None for no maximum."""
    least = max((each[1] for each in of_kind(literals, f"min{noun}")), default=0)
    return least, min((each[1] for each in of_kind(literals, f"max{noun}")), default=None)


def _negated(literal: Formula) -> Formula:
    """Return the negation of an assertion, for values of its own type: arrays or objects."""
    match literal:
        case ("others", _):
            return FALSE
        case ("required", name):
            return ("properties", ((name, FALSE),), (), TRUE)
        case ("minItems" | "minProperties" as kind, count):
            return (kind.replace("min", "max"), count - 1)
        case ("maxItems" | "maxProperties" as kind, count):
            return (kind.replace("max", "min"), count + 1)
        case ("names", wanted):
            return ("some", ("names", negation(wanted)), TRUE)
        case ("properties", names, patterns, others):
            parts = [
                conjunction(
                    [("required", name), ("properties", ((name, negation(value)),), (), TRUE)]
                )
                for name, value in names
                if value != TRUE
            ]
            parts += [
                ("some", ("pattern", pattern), negation(value))
                for pattern, value in patterns
                if value != TRUE
            ]
            if others != TRUE:
                known = tuple(name for name, _ in names), tuple(pattern for pattern, _ in patterns)
                parts.append(("some", ("other", *known), negation(others)))
            return disjunction(parts)
        case ("items", prefix, rest):
            parts = [
                conjunction(
                    [("minItems", at + 1), ("items", (*[TRUE] * at, negation(value)), TRUE)]
                )
                for at, value in enumerate(prefix)
                if value != TRUE
            ]
            if rest != TRUE:
                parts.append(("contains", len(prefix), negation(rest)))
            return disjunction(parts)
        case ("contains", start, wanted):
            return ("items", (TRUE,) * start, negation(wanted))
    raise SchemaError("uniqueItems within not, if or oneOf is not supported")
