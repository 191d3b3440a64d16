"""Rules for objects."""

from __future__ import annotations

from dataclasses import dataclass, field

from akunu_py.json_schema import regex, scalars, simplify
from akunu_py.json_schema.builder import Builder, Layout
from akunu_py.json_schema.formula import FALSE, TRUE, Formula, Refused, conjunction
from akunu_py.json_schema.patterns import content_matching, is_found
from akunu_py.json_schema.regex import CONTENT, Expr
from akunu_py.json_schema.rules import Many, Rule, Shuffle, Symbol
from akunu_py.json_schema.simplify import Conjunction

_MOST_WANTED = 6  # properties that must be there, and are known by a pattern only
_MOST_SHUFFLED = 60  # known properties: a rule's parameter has 64 bits


def add(builder: Builder, rule: Rule, literals: Conjunction) -> None:
    """Adds objects that fit all of `literals`."""
    found = _Object(builder, builder.layout_of(rule), literals)
    if found.possible:
        found.add(rule)


@dataclass(slots=True)
class _Class:
    """Names that the schema does not name. content: None for all of them. found: for each pattern
    (or other test) whether it is found in them."""

    content: Expr | None
    found: dict[Formula, bool] = field(default_factory=dict)


class _Object:
    """An automaton: its states are how many of the known properties were dealt with, how many there
    are in all, and which of those wanted by a pattern there were."""

    def __init__(self, builder: Builder, layout: Layout, literals: Conjunction) -> None:
        self._builder, self._layout, self._literals = builder, layout, literals
        self._wanted = [each for each in literals if each[0] == "some"]
        if len(self._wanted) > _MOST_WANTED:
            raise Refused("#", "too many properties are wanted by a pattern; make it simpler")
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
        """All that the schema names, in its order."""
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
        return simplify.property_value(self._literals, name)

    def _may_be(self, name: str) -> bool:
        if not self._layout.notation.has_key(name):
            return False
        return self._value(name) != FALSE and scalars.fits(self._allowed_names, name)

    def _other_names(self, names: list[str]) -> list[tuple[_Class, Formula]]:
        """The other names, in classes of those whose values must fit the same."""
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
            if content is None:
                return []
        if names:
            taken = regex.either(map(regex.string_content, names))
            assert taken is not None
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
        if expr is None:
            return [_Class(part.content, part.found | {test: False})]
        content = part.content or CONTENT
        whole = expr if part.content is None else regex.both(content, expr)
        parts = [
            _Class(whole, part.found | {test: True}),
            _Class(regex.without(content, expr), part.found | {test: False}),
        ]
        return [each for each in parts if each.content and not regex.is_empty(each.content)]

    @staticmethod
    def _class_value(rules: list[Formula], part: _Class) -> Formula:
        values = []
        for _, _, patterns, others in rules:
            found = [value for pattern, value in patterns if part.found["pattern", pattern]]
            values += found or [others]
        return conjunction(values)

    def _meets(self, test: Formula, name: str | None, part: _Class | None) -> bool:
        """Whether a wanted property may be called `name`, or as those in the class `part`."""
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
        """Whether properties may come in any order, and that can be said."""
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
        elif again:  # more of the same, and then one that leads on
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
        """The property with such a name, and what was met behind it."""
        choices: list[tuple[list[Formula], int]] = [([value], met)]
        for index, (_, test, wanted) in enumerate(self._wanted):
            if not met >> index & 1 and self._meets(test, name, part):
                choices += [([*parts, wanted], now | 1 << index) for parts, now in choices]
        key = (*self._layout.notation.key(name, content), self._layout.colon)
        return [
            (self._builder.pair(key, self._builder.rule(conjunction(parts))), now)
            for parts, now in choices
            if conjunction(parts) != FALSE
        ]
