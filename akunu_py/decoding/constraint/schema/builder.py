"""How JSON is written, and rules under construction: one for each formula that a value must fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from akunu_py.decoding.constraint.schema.formula import Document, Formula
from akunu_py.decoding.constraint.schema.rules import Rule, Rules
from akunu_py.decoding.constraint.schema.simplify import Simplifier
from akunu_py.decoding.constraint.schema.terminals import Expr

_SPACE = r"[\x{20}\x{a}\x{d}\x{9}]*"


@dataclass(frozen=True, slots=True)
class Layout:
    """How JSON is written: what opens and closes arrays and objects, what separates, whether
    properties come in the order of the schema, and whether those it names are all."""

    open_array: Expr
    close_array: Expr
    open_object: Expr
    close_object: Expr
    comma: Expr
    colon: Expr
    ordered: bool
    closed: bool = False


def _layout(space: str, *, ordered: bool) -> Layout:
    return Layout(
        open_array=Expr(rf"\[{space}"),
        close_array=Expr(rf"{space}\]"),
        open_object=Expr(rf"\{{{space}"),
        close_object=Expr(rf"{space}\}}"),
        comma=Expr(f"{space},{space}"),
        colon=Expr(f"{space}:{space}"),
        ordered=ordered,
    )


FREE = _layout(_SPACE, ordered=False)
COMPACT = _layout("", ordered=True)
# To draft by: an object that names properties has no others.
SKETCHED = replace(COMPACT, closed=True)
UNORDERED = replace(COMPACT, ordered=False)


class Builder:
    """pending: rules that have no alternatives yet, with what their values must fit."""

    def __init__(self, document: Document, layout: Layout, prefix: str = "") -> None:
        self.document, self.layout = document, layout
        self.simplifier = Simplifier(document)
        self.rules = Rules(prefix)
        self._known: dict[frozenset[Formula], Rule] = {}
        self.pending: list[tuple[Rule, Formula]] = []
        self._pairs: dict[tuple[Expr, Rule], Rule] = {}

    def rule(self, formula: Formula) -> Rule:
        """The rule for the values that fit `formula`, which `run` makes."""
        key = frozenset(formula[1:] if formula[0] == "and" else (formula,))
        if key not in self._known:
            self._known[key] = self.rules.new()
            self.pending.append((self._known[key], formula))
        return self._known[key]

    def pair(self, key: Expr, value: Rule) -> Rule:
        """The rule for a property."""
        if (key, value) not in self._pairs:
            rule = self._pairs[key, value] = self.rules.new()
            self.rules.add(rule, (key, self.layout.colon, value))
        return self._pairs[key, value]

    def place(self, formula: Formula) -> str:
        """Of the first subschema in it, or what that refers to."""
        seen = set()
        while formula[0] == "schema" and formula not in seen:
            seen.add(formula)
            place = self.document.place(formula[1])
            formula = self.document.formula(formula[1])
        if seen:
            return place
        places = [self.place(part) for part in formula[1:] if formula[0] in ("and", "or", "not")]
        return next((place for place in places if place != "#"), "#")
