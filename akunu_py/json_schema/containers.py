"""Rules for arrays and objects, one for each formula that a value must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from akunu_py.errors import SchemaError
from akunu_py.json_schema import regex, scalars
from akunu_py.json_schema.formula import (
    FALSE,
    TRUE,
    TYPES,
    Document,
    Formula,
    conjunction,
    negation,
)
from akunu_py.json_schema.layouts import Layout
from akunu_py.json_schema.patterns import content_matching, is_found
from akunu_py.json_schema.regex import CONTENT, Expr
from akunu_py.json_schema.rules import Many, Rule, Rules, Shuffle, Symbol
from akunu_py.json_schema.simplify import Conjunction, Simplifier, item, property_value

_MOST_WANTED = 6  # required properties that only a pattern describes
_MOST_SHUFFLED = 60  # properties in any order: a rule's parameter has 64 bits
_MOST_UNIQUE = 60  # distinct values of an array: a rule's parameter has 64 bits


class Builder:
    """The rules of a grammar under construction."""

    def __init__(self, document: Document, layout: Layout, prefix: str = "") -> None:
        self.document, self.layout = document, layout
        self.simplifier = Simplifier(document)
        self.rules = Rules(prefix)
        self._known: dict[frozenset[Formula], Rule] = {}
        self._formulas: dict[Rule, Formula] = {}
        self.pending: list[tuple[Rule, Formula]] = []  # rules that have no alternatives yet
        self._pairs: dict[tuple[tuple[Symbol, ...], Rule], Rule] = {}
        self._outermost: Rule | None = None

    def start(self, formula: Formula) -> Rule:
        """Return the rule for the whole value."""
        if self.layout.outermost is None:
            return self.rule(formula)
        self._outermost = self._new(formula)
        return self._outermost

    def layout_of(self, rule: Rule) -> Layout:
        """Return the layout of the objects of a rule."""
        return (rule == self._outermost and self.layout.outermost) or self.layout

    def rule(self, formula: Formula) -> Rule:
        """Return the rule for the values that fit `formula`, pending if it is new."""
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
        """Return the rule for a property: its key with the colon, and its value."""
        if (key, value) not in self._pairs:
            rule = self._pairs[key, value] = self.rules.new()
            self.rules.add(rule, (*key, value))
        return self._pairs[key, value]

    def dead_end(self, start: Rule) -> str:
        """Return the place of the subschema that no value can fit."""
        rules = [rule for rule in self.rules.dead_end(start) if rule in self._formulas]
        return self.place(self._formulas[rules[-1]]) if rules else "#"

    def place(self, formula: Formula) -> str:
        """Return the place of the first subschema in a formula, or of the target of its $ref."""
        seen = set()
        while formula[0] == "schema" and formula not in seen:
            seen.add(formula)
            place = self.document.place(formula[1])
            formula = self.document.formula(formula[1])
        if seen:
            return place
        places = [self.place(part) for part in formula[1:] if formula[0] in ("and", "or", "not")]
        return next((place for place in places if place != "#"), "#")


def choices(
    value: Formula, met: int, wanted: Sequence[tuple[int, Formula]], *, exclusive: bool = False
) -> list[tuple[Formula, int]]:
    """Return the formulas of an item or a property, each with the wishes that are met behind it.

    met: a bit for each wish that is met already. wanted: wishes that this value may meet.
    exclusive: no value fits two of the formulas.
    """
    found = [([value], met)]
    for index, wish in wanted:
        if not met >> index & 1:
            others = [
                ([*parts, negation(wish)] if exclusive else parts, now) for parts, now in found
            ]
            found = others + [([*parts, wish], now | 1 << index) for parts, now in found]
    return [(each, now) for parts, now in found if (each := conjunction(parts)) != FALSE]


def add_array(builder: Builder, rule: Rule, literals: Conjunction) -> None:
    """Add the arrays that fit all of `literals`."""
    least = max((each[1] for each in literals if each[0] == "minItems"), default=0)
    most = min((each[1] for each in literals if each[0] == "maxItems"), default=None)
    contained = [each for each in literals if each[0] == "contains"]
    starts = [each[1] for each in contained]
    prefix = max((len(each[1]) for each in literals if each[0] == "items"), default=0)
    prefix = max([prefix, *starts])
    while prefix > max(starts, default=0) and item(literals, prefix - 1) == item(literals, prefix):
        prefix -= 1
    if most is None or most > prefix:
        for at in range(prefix + 1):  # The array ends before an item that cannot exist.
            if item(literals, at) == FALSE:
                most = at
                break
    if most is not None and most < least:
        return
    if ("unique",) in literals and (most is None or most > 1):
        if contained or prefix:
            why = "contains" if contained else "items by position"
            raise SchemaError(f"uniqueItems with {why} is not supported")
        _add_unique(builder, rule, item(literals, 0), least, most)
    elif contained:
        _add_containing(builder, rule, literals, least, most, prefix)
    else:
        _add_items(builder, rule, literals, least, most, prefix)


def _add_unique(
    builder: Builder, rule: Rule, wanted: Formula, least: int, most: int | None
) -> None:
    """Add arrays of distinct values, which an enum lists."""
    texts: list[tuple[Symbol, ...]] = []
    for kind in TYPES:
        left = builder.simplifier.seen(wanted, kind)
        if left == FALSE:
            continue
        found = scalars.listed(kind, left, builder.layout.notation)
        if found is None:
            raise SchemaError("uniqueItems is supported for items of an enum only")
        texts += found
    if len(texts) > _MOST_UNIQUE:
        raise SchemaError(f"uniqueItems is supported for {_MOST_UNIQUE} values at most")
    values = []
    for text in texts:
        values.append(builder.rules.new())
        builder.rules.add(values[-1], text)
    layout = builder.layout
    items = Shuffle((), tuple(values), (), layout.comma, layout.close_array, least, most)
    builder.rules.add(rule, (layout.open_array, items))


def _add_items(
    builder: Builder, rule: Rule, literals: Conjunction, least: int, most: int | None, prefix: int
) -> None:
    """Add arrays of items by position, the last of which repeats."""
    layout, rules = builder.layout, builder.rules
    follow = rules.new()
    rules.add(rule, (layout.open_array, follow))
    comma: tuple[Symbol, ...] = ()
    for at in range(prefix):
        if at >= least:
            rules.add(follow, (layout.close_array,))
        if most is not None and at >= most:
            return
        following = rules.new()
        rules.add(follow, (*comma, builder.rule(item(literals, at)), following))
        follow, comma = following, (layout.comma,)
    if least <= prefix:
        rules.add(follow, (layout.close_array,))
    if most is not None and most <= prefix:
        return
    value = builder.rule(item(literals, prefix))
    first, done = (() if prefix else (value,)), max(prefix, 1)
    low, high = max(least - done, min(prefix, 1)), None if most is None else most - done
    rules.add(follow, (*first, Many((layout.comma, value), low, high), layout.close_array))


def _add_containing(
    builder: Builder, rule: Rule, literals: Conjunction, least: int, most: int | None, prefix: int
) -> None:
    """Add arrays with wanted items. A state is the number of items and the wishes that are met."""
    layout, rules = builder.layout, builder.rules
    contained = [each[1:] for each in literals if each[0] == "contains"]
    last = max(prefix, least, 1) if most is None else most  # Further items change nothing.
    known: dict[tuple[int, int], Rule] = {}
    pending: list[tuple[int, int]] = []

    def state(at: int, met: int) -> Rule:
        key = min(at, last), met
        if key not in known:
            builder.simplifier.spend(20)
            known[key] = rules.new()
            pending.append(key)
        return known[key]

    rules.add(rule, (layout.open_array, state(0, 0)))
    while pending:
        at, met = key = pending.pop()
        if at >= least and met == (1 << len(contained)) - 1:
            rules.add(known[key], (layout.close_array,))
        if most is not None and at >= most:
            continue
        comma = (layout.comma,) if at else ()
        wanted = [(index, wish) for index, (start, wish) in enumerate(contained) if at >= start]
        for value, now in choices(item(literals, at), met, wanted, exclusive=True):
            rules.add(known[key], (*comma, builder.rule(value), state(at + 1, now)))


def add_object(builder: Builder, rule: Rule, literals: Conjunction) -> None:
    """Add the objects that fit all of `literals`."""
    found = _Object(builder, builder.layout_of(rule), literals)
    if found.possible:
        found.add(rule)


@dataclass(slots=True)
class _Class:
    """Names that the schema does not list, all of which pass the same tests."""

    content: Expr | None  # None for all names
    found: dict[Formula, bool] = field(default_factory=dict)  # the result of each test


class _Object:
    """The rules of one object.

    In an ordered object a state is the number of known properties that are done, the number of
    properties so far, and the wishes that are met.
    """

    def __init__(self, builder: Builder, layout: Layout, literals: Conjunction) -> None:
        self._builder, self._layout, self._literals = builder, layout, literals
        self._wanted = [each for each in literals if each[0] == "some"]
        if len(self._wanted) > _MOST_WANTED:
            raise SchemaError("too many properties are wanted by a pattern; make it simpler")
        self._required = dict.fromkeys(each[1] for each in literals if each[0] == "required")
        self._least = max((each[1] for each in literals if each[0] == "minProperties"), default=0)
        self._most = min((each[1] for each in literals if each[0] == "maxProperties"), default=None)
        self._allowed_names = builder.simplifier.seen(
            conjunction(each[1] for each in literals if each[0] == "names"), "string"
        )
        names = self._names()
        self._known = [(name, self._value(name)) for name in names if self._may_be(name)]
        missing = self._required.keys() - dict(self._known).keys()
        self.possible = not missing and (self._most is None or len(self._required) <= self._most)
        self._classes = self._other_names(names) if self.possible else []
        if self._most is None and self._least <= len(self._required):
            self._least = 0
        self._full = max(1, self._least, -1 if self._most is None else self._most)
        self._states: dict[tuple[int, int, int], Rule] = {}
        self._pending: list[tuple[int, int, int]] = []

    def _names(self) -> list[str]:
        """Return all names in the schema, in its order."""
        names: list[str] = []
        for each in self._literals:
            if each[0] == "properties":
                names += [name for name, _ in each[1]]
        names += self._required
        for each in self._wanted:
            if each[1][0] == "other":
                names += each[1][1]
        names += scalars.values(self._allowed_names) or []
        return list(dict.fromkeys(names))

    def _value(self, name: str) -> Formula:
        return property_value(self._literals, name)

    def _may_be(self, name: str) -> bool:
        if not self._layout.notation.has_key(name):
            return False
        return self._value(name) != FALSE and scalars.fits(self._allowed_names, name)

    def _other_names(self, names: list[str]) -> list[tuple[_Class, Formula]]:
        """Return the classes of other names, each with the formula of the values."""
        rules = [each for each in self._literals if each[0] == "properties"]
        if scalars.values(self._allowed_names) is not None:
            return []
        if any(not rule[2] and rule[3] == FALSE for rule in rules):
            return []
        if names and self._layout.closed and not self._least and not self._wanted:
            return []
        content: Expr | None = None
        if self._allowed_names != TRUE:
            content = scalars.string_content(self._allowed_names)
        if names:
            taken = regex.either(map(regex.string_content, names))
            all_names = content is None
            content = regex.without(content or CONTENT, taken, inhabited=all_names)
        classes = [_Class(content)]
        for test in self._tests(rules):
            classes = [part for each in classes for part in self._split(each, test)]
        found = [(each, self._class_value(rules, each)) for each in classes]
        return [(each, value) for each, value in found if value != FALSE]

    def _tests(self, rules: list[Formula]) -> list[Formula]:
        tests: list[Formula] = [("pattern", pattern) for rule in rules for pattern, _ in rule[2]]
        for _, test, _ in self._wanted:
            if test[0] == "other":
                tests += [("pattern", pattern) for pattern in test[2]]
            else:
                tests.append(test)
        return list(dict.fromkeys(tests))

    def _split(self, part: _Class, test: Formula) -> list[_Class]:
        self._builder.simplifier.spend(50)
        if test[0] == "pattern":
            expr = content_matching(test[1])
        else:
            expr = scalars.string_content(self._builder.simplifier.seen(test[1], "string"))
        content = part.content or CONTENT
        whole = expr if part.content is None else regex.both(content, expr)
        parts = [
            _Class(whole, part.found | {test: True}),
            _Class(regex.without(content, expr), part.found | {test: False}),
        ]
        return [each for each in parts if not regex.is_empty(each.content or CONTENT)]

    @staticmethod
    def _class_value(rules: list[Formula], part: _Class) -> Formula:
        values = []
        for _, _, patterns, others in rules:
            found = [value for pattern, value in patterns if part.found["pattern", pattern]]
            values += found or [others]
        return conjunction(values)

    def _meets(self, test: Formula, name: str | None, part: _Class | None) -> bool:
        """Return whether `name`, or each name in the class `part`, passes a test."""
        if name is not None:
            if test[0] == "other":
                return name not in test[1] and not any(is_found(each, name) for each in test[2])
            if test[0] == "pattern":
                return is_found(test[1], name)
            return scalars.fits(self._builder.simplifier.seen(test[1], "string"), name)
        assert part is not None
        if test[0] == "other":
            return not any(part.found["pattern", pattern] for pattern in test[2])
        return part.found[test]

    def add(self, rule: Rule) -> None:
        builder = self._builder
        if not self._layout.ordered and self._may_shuffle():
            builder.rules.add(rule, (self._layout.open_object, self._shuffle()))
            return
        start = self._state(0, 0, 0)
        builder.rules.add(rule, (self._layout.open_object, start))
        while self._pending:
            key = self._pending.pop()
            if key[0] < len(self._known):
                self._add_known(key)
            else:
                self._add_others(key)

    def _may_shuffle(self) -> bool:
        """Return whether properties come in any order, which needs that none is counted."""
        counted = self._most is not None or self._least > 1 or self._wanted
        some = len(self._known) + bool(self._classes) > 1
        return some and not counted and len(self._known) <= _MOST_SHUFFLED

    def _shuffle(self) -> Shuffle:
        required: list[Rule] = []
        optional: list[Rule] = []
        for name, value in self._known:
            ((pair, _),) = self._pairs(regex.string_content(name), value, 0, name, None)
            (required if name in self._required else optional).append(pair)
        others = [
            pair
            for part, value in self._classes
            for pair, _ in self._pairs(part.content, value, 0, None, part)
        ]
        layout = self._layout
        return Shuffle(
            tuple(required),
            tuple(optional),
            tuple(others),
            layout.comma,
            layout.close_object,
            self._least,
        )

    def _state(self, at: int, count: int, met: int) -> Rule:
        key = at, min(count, self._full), met
        if key not in self._states:
            self._builder.simplifier.spend(5)
            self._states[key] = self._builder.rules.new()
            self._pending.append(key)
        return self._states[key]

    def _add_known(self, key: tuple[int, int, int]) -> None:
        at, count, met = key
        rules, rule = self._builder.rules, self._states[key]
        name, value = self._known[at]
        if name not in self._required:
            rules.add(rule, (self._state(at + 1, count, met),))
        if self._most is not None and count >= self._most:
            return
        content = regex.string_content(name)
        for pair, now in self._pairs(content, value, met, name, None):
            comma = (self._layout.comma,) if count else ()
            rules.add(rule, (*comma, pair, self._state(at + 1, count + 1, now)))

    def _add_others(self, key: tuple[int, int, int]) -> None:
        at, count, met = key
        layout, rules, rule = self._layout, self._builder.rules, self._states[key]
        again: list[Symbol] = []
        if self._most is None or count < self._most:
            comma = (layout.comma,) if count else ()
            after = min(count + 1, self._full)
            for part, value in self._classes:
                for pair, now in self._pairs(part.content, value, met, None, part):
                    if (at, after, now) == key and self._most is None:
                        again.append(pair)
                    else:
                        rules.add(rule, (*comma, pair, self._state(at, after, now)))
        if count >= self._least and met == (1 << len(self._wanted)) - 1:
            end: tuple[Symbol, ...] = (layout.close_object,)
            if again:
                end = (Many((layout.comma, self._any(again)), 0, None), *end)
            rules.add(rule, end)
        elif again:  # More of the same, and then one that leads to another state.
            onward = rules.new()
            for alternative in rules.alternatives(rule):
                rules.add(onward, alternative)
            rules.clear(rule)
            rules.add(rule, (Many((layout.comma, self._any(again)), 0, None), onward))

    def _any(self, pairs: list[Symbol]) -> Rule:
        rule = self._builder.rules.new()
        for pair in pairs:
            self._builder.rules.add(rule, (pair,))
        return rule

    def _pairs(
        self, content: Expr | None, value: Formula, met: int, name: str | None, part: _Class | None
    ) -> list[tuple[Rule, int]]:
        """Return the rules for a property with such a name, each with the wishes met behind it."""
        wanted = [
            (index, wish)
            for index, (_, test, wish) in enumerate(self._wanted)
            if self._meets(test, name, part)
        ]
        key = (*self._layout.notation.key(name, content), self._layout.colon)
        return [
            (self._builder.pair(key, self._builder.rule(formula)), now)
            for formula, now in choices(value, met, wanted)
        ]
