"""Rules for arrays and objects, one for each formula that a value must fit."""

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
from akunu_py.json_schema.patterns import content_matching
from akunu_py.json_schema.regex import CONTENT, Expr
from akunu_py.json_schema.rules import Repetition, Rule, Rules, Shuffle, Symbol
from akunu_py.json_schema.simplify import (
    Conjunction,
    Simplifier,
    count_limits,
    item_value,
    of_kind,
    property_value,
)

_MAX_GOALS = 6  # required properties that only a pattern describes
_MAX_IN_ANY_ORDER = 60  # properties, or distinct items: a rule's parameter has 64 bits


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
        if self.layout.outermost is None:
            return self.rule(formula)
        self._outermost = self._new_rule(formula)
        return self._outermost

    def layout_of(self, rule: Rule) -> Layout:
        return (rule == self._outermost and self.layout.outermost) or self.layout

    def rule(self, formula: Formula) -> Rule:
        """Return the rule for the values that fit `formula`, pending if it is new."""
        key = frozenset(formula[1:] if formula[0] == "and" else (formula,))
        if key not in self._known:
            self._known[key] = self._new_rule(formula)
        return self._known[key]

    def _new_rule(self, formula: Formula) -> Rule:
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
    value: Formula, met: int, goals: Sequence[tuple[int, Formula]], *, exclusive: bool = False
) -> list[tuple[Formula, int]]:
    """Return the possible formulas of a value, each with the goals met after the value.

    met: a bit for each goal met before the value. goals: goals that the value may meet.
    exclusive: no value fits two of the formulas.
    """
    found = [([value], met)]
    for index, goal in goals:
        if not met >> index & 1:
            unmet = [negation(goal)] if exclusive else []
            others = [([*parts, *unmet], now) for parts, now in found]
            found = others + [([*parts, goal], now | 1 << index) for parts, now in found]
    return [(each, now) for parts, now in found if (each := conjunction(parts)) != FALSE]


def add_array(builder: Builder, rule: Rule, literals: Conjunction) -> None:
    least, most = count_limits(literals, "Items")
    contained = of_kind(literals, "contains")
    start = max((each[1] for each in contained), default=0)
    prefix = max([start, *(len(each[1]) for each in of_kind(literals, "items"))])
    while prefix > start and item_value(literals, prefix - 1) == item_value(literals, prefix):
        prefix -= 1
    if most is None or most > prefix:  # The array ends before an item that cannot exist.
        impossible = (at for at in range(prefix + 1) if item_value(literals, at) == FALSE)
        most = next(impossible, most)
    if most is not None and most < least:
        return
    if ("unique",) in literals and (most is None or most > 1):
        if contained or prefix:
            why = "contains" if contained else "items by position"
            raise SchemaError(f"uniqueItems with {why} is not supported")
        _add_unique(builder, rule, item_value(literals, 0), least, most)
    elif contained:
        _add_containing(builder, rule, literals, least, most, prefix)
    else:
        _add_items(builder, rule, literals, least, most, prefix)


def _add_unique(builder: Builder, rule: Rule, item: Formula, least: int, most: int | None) -> None:
    """Add arrays of distinct values, which an enum lists."""
    layout = builder.layout
    texts: list[tuple[Symbol, ...]] = []
    for kind in TYPES:
        if (left := builder.simplifier.restrict(item, kind)) != FALSE:
            if (found := scalars.listed(kind, left, layout.notation)) is None:
                raise SchemaError("uniqueItems is supported for items of an enum only")
            texts += found
    if len(texts) > _MAX_IN_ANY_ORDER:
        raise SchemaError(f"uniqueItems is supported for {_MAX_IN_ANY_ORDER} values at most")
    values = tuple(builder.rules.new() for _ in texts)
    for value, text in zip(values, texts, strict=True):
        builder.rules.add(value, text)
    items = Shuffle((), values, (), layout.comma, layout.close_array, least, most)
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
        rules.add(follow, (*comma, builder.rule(item_value(literals, at)), following))
        follow, comma = following, (layout.comma,)
    if least <= prefix:
        rules.add(follow, (layout.close_array,))
    if most is not None and most <= prefix:
        return
    value = builder.rule(item_value(literals, prefix))
    first, done = (() if prefix else (value,)), max(prefix, 1)
    low, high = max(least - done, min(prefix, 1)), None if most is None else most - done
    rules.add(follow, (*first, Repetition((layout.comma, value), low, high), layout.close_array))


def _add_containing(
    builder: Builder, rule: Rule, literals: Conjunction, least: int, most: int | None, prefix: int
) -> None:
    """Add arrays with wanted items. A state is the number of items and the goals that are met."""
    layout, rules = builder.layout, builder.rules
    contained = of_kind(literals, "contains")
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
        goals = [(index, goal) for index, (_, start, goal) in enumerate(contained) if at >= start]
        for value, now in choices(item_value(literals, at), met, goals, exclusive=True):
            rules.add(known[key], (*comma, builder.rule(value), state(at + 1, now)))


def add_object(builder: Builder, rule: Rule, literals: Conjunction) -> None:
    found = _Object(builder, builder.layout_of(rule), literals)
    if found.possible:
        found.add(rule)


@dataclass(slots=True)
class _Names:
    """One name of the schema, or a class of other names with the same test results."""

    value: Formula  # what the values must fit
    content: Expr | None  # None for all names
    name: str | None = None
    test_results: dict[Formula, bool] = field(default_factory=dict)


class _Object:
    """The rules of one object.

    A state of an ordered object: finished known properties, properties so far, goals met.
    """

    def __init__(self, builder: Builder, layout: Layout, literals: Conjunction) -> None:
        self._builder, self._layout = builder, layout
        self._properties = of_kind(literals, "properties")
        self._goals = of_kind(literals, "some")
        if len(self._goals) > _MAX_GOALS:
            raise SchemaError("too many properties are required by a pattern; make it simpler")
        self._required = dict.fromkeys(each[1] for each in of_kind(literals, "required"))
        self._least, self._most = count_limits(literals, "Properties")
        allowed = conjunction(each[1] for each in of_kind(literals, "names"))
        self._allowed_names = builder.simplifier.restrict(allowed, "string")
        names = self._names()
        self._known = [
            _Names(value, regex.string_content(name), name)
            for name in names
            if layout.notation.has_key(name) and scalars.fits(self._allowed_names, name)
            if (value := property_value(literals, name)) != FALSE
        ]
        missing = self._required.keys() - {each.name for each in self._known}
        self.possible = not missing and (self._most is None or len(self._required) <= self._most)
        self._others = self._other_names(names, literals) if self.possible else []
        if self._most is None and self._least <= len(self._required):
            self._least = 0
        self._count_cap = max(1, self._least, -1 if self._most is None else self._most)
        self._states: dict[tuple[int, int, int], Rule] = {}
        self._pending: list[tuple[int, int, int]] = []

    def _names(self) -> list[str]:
        names = [name for each in self._properties for name, _ in each[1]]
        names += self._required
        for _, test, _ in self._goals:
            names += test[1] if test[0] == "other" else ()
        names += scalars.values(self._allowed_names) or []
        return list(dict.fromkeys(names))

    def _other_names(self, names: list[str], literals: Conjunction) -> list[_Names]:
        """Return the names that are not in the schema, grouped by the formula of their values."""
        listed = scalars.values(self._allowed_names) is not None
        if listed or any(not each[2] and each[3] == FALSE for each in self._properties):
            return []
        others = {each[1] for each in of_kind(literals, "others")}
        closed = names and self._layout.closed and not self._least
        if others == {"unmentioned"} and not self._layout.open_objects:
            closed = self._least <= len(self._known)
        if closed and not self._goals:
            return []
        every = self._allowed_names == TRUE
        content = None if every else scalars.string_content(self._allowed_names)
        if names:
            taken = regex.either(map(regex.string_content, names))
            content = regex.without(content or CONTENT, taken, inhabited=every)
        tests = [("pattern", pattern) for each in self._properties for pattern, _ in each[2]]
        for _, test, _ in self._goals:
            tests += [("pattern", each) for each in test[2]] if test[0] == "other" else [test]
        found = [_Names(TRUE, content)]
        for test in dict.fromkeys(tests):
            found = [part for each in found for part in self._split(each, test)]
        for each in found:
            values = []
            for _, _, patterns, rest in self._properties:
                held = [value for test, value in patterns if each.test_results["pattern", test]]
                values.append(conjunction(held) if held else rest)
            each.value = conjunction(values)
        return [each for each in found if each.value != FALSE]

    def _split(self, names: _Names, test: Formula) -> list[_Names]:
        """Split `names` into names that pass `test` and names that do not; omit empty parts."""
        self._builder.simplifier.spend(50)
        expr, content = self._matching_names(test), names.content or CONTENT
        whole = expr if names.content is None else regex.both(content, expr)
        parts = {True: whole, False: regex.without(content, expr)}
        return [
            _Names(TRUE, part, test_results=names.test_results | {test: passed})
            for passed, part in parts.items()
            if not regex.is_empty(part)
        ]

    def _matching_names(self, test: Formula) -> Expr:
        if test[0] == "pattern":
            return content_matching(test[1])
        return scalars.string_content(self._builder.simplifier.restrict(test[1], "string"))

    def _passes(self, names: _Names, test: Formula) -> bool:
        """Return whether all `names` pass a test, which `_split` made the same for all."""
        if test[0] == "other":
            matched = any(self._passes(names, ("pattern", pattern)) for pattern in test[2])
            return names.name not in test[1] and not matched
        if names.name is None:
            return names.test_results[test]
        return regex.matches(self._matching_names(test), regex.json_content(names.name).encode())

    def add(self, rule: Rule) -> None:
        rules, layout = self._builder.rules, self._layout
        if not layout.ordered and self._may_shuffle():
            rules.add(rule, (layout.open_object, self._shuffle()))
            return
        rules.add(rule, (layout.open_object, self._state(0, 0, 0)))
        while self._pending:
            self._add_state(self._pending.pop())

    def _may_shuffle(self) -> bool:
        """Return whether properties may come in any order, which excludes counting them."""
        counted = self._most is not None or self._least > 1 or self._goals
        some = len(self._known) + bool(self._others) > 1
        return some and not counted and len(self._known) <= _MAX_IN_ANY_ORDER

    def _shuffle(self) -> Shuffle:
        required, optional, others = [
            tuple(pair for names in listed for pair, _ in self._pairs(names, 0))
            for listed in (
                [each for each in self._known if each.name in self._required],
                [each for each in self._known if each.name not in self._required],
                self._others,
            )
        ]
        comma, close = self._layout.comma, self._layout.close_object
        return Shuffle(required, optional, others, comma, close, self._least)

    def _state(self, at: int, count: int, met: int) -> Rule:
        """Return the rule from known name number `at` on, after `count` properties."""
        key = at, min(count, self._count_cap), met
        if key not in self._states:
            self._builder.simplifier.spend(5)
            self._states[key] = self._builder.rules.new()
            self._pending.append(key)
        return self._states[key]

    def _add_state(self, key: tuple[int, int, int]) -> None:
        at, count, met = key
        rules, rule, comma = self._builder.rules, self._states[key], self._layout.comma
        known = self._known[at : at + 1]
        nexts: list[tuple[Symbol, ...]] = []
        again = rules.new()
        if known and known[0].name not in self._required:
            nexts.append((self._state(at + 1, count, met),))
        if self._most is None or count < self._most:
            for names in known or self._others:
                for pair, now in self._pairs(names, met):
                    following = self._state(at + len(known), count + 1, now)
                    if following == rule:
                        rules.add(again, (comma, pair))
                    else:
                        nexts.append((*([comma] if count else []), pair, following))
        if not known and count >= self._least and met == (1 << len(self._goals)) - 1:
            nexts.append((self._layout.close_object,))
        # A repetition, because llguidance limits the depth of right recursion.
        for symbols in nexts:
            rules.add(rule, (Repetition((again,), 0, None), *symbols))

    def _pairs(self, names: _Names, met: int) -> list[tuple[Rule, int]]:
        """Return the rules for a property called as in `names`, each with the goals then met."""
        goals = [
            (index, goal)
            for index, (_, test, goal) in enumerate(self._goals)
            if self._passes(names, test)
        ]
        key = (*self._layout.notation.key(names.name, names.content), self._layout.colon)
        return [
            (self._builder.pair(key, self._builder.rule(formula)), now)
            for formula, now in choices(names.value, met, goals)
        ]
