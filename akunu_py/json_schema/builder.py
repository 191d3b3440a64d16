"""How values are laid out, and rules under construction: one for each formula that a value must
fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from akunu_py.json_schema.formula import Document, Formula
from akunu_py.json_schema.layouts import JSON, Marked, Notation, Python
from akunu_py.json_schema.regex import Expr
from akunu_py.json_schema.rules import Rule, Rules, Symbol, Verbatim
from akunu_py.json_schema.simplify import Simplifier

_SPACE = r"[\x{20}\x{a}\x{d}\x{9}]*"


@dataclass(frozen=True, slots=True)
class Layout:
    """How values are written: what opens and closes arrays and objects, what separates, whether
    properties come in the order of the schema, and whether those it names are all. outermost: how
    the object is that holds all others, where that is another way."""

    open_array: Expr
    close_array: Expr
    open_object: Expr
    close_object: Expr
    comma: Expr
    colon: Expr
    ordered: bool
    closed: bool = False
    notation: Notation = JSON
    outermost: Layout | None = None


def _layout(space: str, *, ordered: bool, notation: Notation = JSON) -> Layout:
    return Layout(
        open_array=Expr(rf"\[{space}"),
        close_array=Expr(rf"{space}\]"),
        open_object=Expr(rf"\{{{space}"),
        close_object=Expr(rf"{space}\}}"),
        comma=Expr(f"{space},{space}"),
        colon=Expr(f"{space}:{space}"),
        ordered=ordered,
        notation=notation,
    )


FREE = _layout(_SPACE, ordered=False)
COMPACT = _layout("", ordered=True)
# To draft by: an object that names properties has no others.
SKETCHED = replace(COMPACT, closed=True)
UNORDERED = replace(COMPACT, ordered=False)
# As Python writes it on one line.
ONE_LINE = replace(UNORDERED, comma=Expr(r",\x{20}"), colon=Expr(r":\x{20}"))


def marked(begin: str | Verbatim, end: str | Verbatim, line: str = "") -> Layout:
    """Strings between markers, and no whitespace."""
    return _layout("", ordered=False, notation=Marked(begin, end, line))


def keywords(*, spaced: bool = False) -> Layout:
    """The arguments of a call in Python, in brackets. spaced: there is a space behind all commas
    and colons, where otherwise there may be."""
    space = r"\x{20}" if spaced else r"\x{20}?"
    inside = replace(_layout("", ordered=False, notation=Python()), comma=Expr(f",{space}"))
    inside = replace(inside, colon=Expr(f":{space}"))
    outside = replace(
        inside,
        open_object=Expr(r"\("),
        close_object=Expr(r"\)"),
        colon=Expr("="),
        notation=Python(keywords=True),
    )
    return replace(inside, outermost=outside)


class Builder:
    """pending: rules that have no alternatives yet, with what their values must fit."""

    def __init__(self, document: Document, layout: Layout, prefix: str = "") -> None:
        self.document, self.layout = document, layout
        self.simplifier = Simplifier(document)
        self.rules = Rules(prefix)
        self._known: dict[frozenset[Formula], Rule] = {}
        self._formulas: dict[Rule, Formula] = {}
        self.pending: list[tuple[Rule, Formula]] = []
        self._pairs: dict[tuple[tuple[Symbol, ...], Rule], Rule] = {}
        self._outermost: Rule | None = None

    def start(self, formula: Formula) -> Rule:
        """The rule for the whole."""
        if self.layout.outermost is None:
            return self.rule(formula)
        self._outermost = self._new(formula)
        return self._outermost

    def layout_of(self, rule: Rule) -> Layout:
        """How the objects of a rule are written."""
        return (rule == self._outermost and self.layout.outermost) or self.layout

    def rule(self, formula: Formula) -> Rule:
        """The rule for the values that fit `formula`, which `run` makes."""
        key = frozenset(formula[1:] if formula[0] == "and" else (formula,))
        if key not in self._known:
            self._known[key] = self._new(formula)
        return self._known[key]

    def _new(self, formula: Formula) -> Rule:
        rule = self.rules.new()
        self._formulas[rule] = formula
        self.pending.append((rule, formula))
        return rule

    def pair(self, key: tuple[Symbol, ...], value: Rule) -> Rule:
        """The rule for a property, of a key and what is behind it."""
        if (key, value) not in self._pairs:
            rule = self._pairs[key, value] = self.rules.new()
            self.rules.add(rule, (*key, value))
        return self._pairs[key, value]

    def dead_end(self, start: Rule) -> str:
        """The place of what no value can fit, where none can fit the whole."""
        rules = [rule for rule in self.rules.dead_end(start) if rule in self._formulas]
        return self.place(self._formulas[rules[-1]]) if rules else "#"

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
