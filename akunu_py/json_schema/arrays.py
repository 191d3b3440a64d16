"""Rules for arrays."""

from __future__ import annotations

from akunu_py.json_schema import scalars, simplify
from akunu_py.json_schema.builder import Builder
from akunu_py.json_schema.formula import (
    FALSE,
    TYPES,
    Formula,
    Refused,
    conjunction,
    negation,
)
from akunu_py.json_schema.rules import Many, Rule, Shuffle, Symbol
from akunu_py.json_schema.simplify import Conjunction

_MOST_UNIQUE = 60  # values of which each may come once: a rule's parameter has 64 bits


def add(builder: Builder, rule: Rule, literals: Conjunction) -> None:
    """Adds arrays that fit all of `literals`."""
    least = max((each[1] for each in literals if each[0] == "minItems"), default=0)
    highs = [each[1] for each in literals if each[0] == "maxItems"]
    most = min(highs) if highs else None
    ends = [len(each[1]) for each in literals if each[0] == "items"]
    contained = [each for each in literals if each[0] == "contains"]
    ends += [each[1] for each in contained]
    prefix = max(ends, default=0)
    while prefix and simplify.item(literals, prefix - 1) == simplify.item(literals, prefix):
        if any(each[1] >= prefix for each in contained):
            break
        prefix -= 1
    if most is None or most > prefix:
        for at in range(prefix + 1):  # an item that cannot be is the end
            if simplify.item(literals, at) == FALSE:
                most = at
                break
    if most is not None and most < least:
        return
    if ("unique",) in literals and (most is None or most > 1):
        if contained or prefix:
            why = "contains" if contained else "items by position"
            raise Refused("#", f"uniqueItems with {why} is not supported")
        _add_unique(builder, rule, simplify.item(literals, 0), least, most)
    else:
        _Array(builder, rule, literals, contained, least, most, prefix).add()


def _add_unique(builder: Builder, rule: Rule, item: Formula, least: int, most: int | None) -> None:
    """Adds arrays of different values, which are listed."""
    values = []
    for text in _listed(builder, item):
        values.append(builder.rules.new())
        builder.rules.add(values[-1], text)
    layout = builder.layout
    items = Shuffle((), tuple(values), (), layout.comma, layout.close_array, least, most)
    builder.rules.add(rule, (layout.open_array, items))


def _listed(builder: Builder, formula: Formula) -> list[tuple[Symbol, ...]]:
    """The texts of all values that fit."""
    texts: list[tuple[Symbol, ...]] = []
    for kind in TYPES:
        left = builder.simplifier.seen(formula, kind)
        if left == FALSE:
            continue
        found = scalars.listed(kind, left, builder.layout.notation)
        if found is None:
            raise Refused("#", "uniqueItems is supported for items of an enum only")
        texts += found
    if len(texts) > _MOST_UNIQUE:
        raise Refused("#", f"uniqueItems is supported for {_MOST_UNIQUE} values at most")
    return texts


class _Array:
    """An automaton: its states are how many items there are, how many of them are contained in
    each of the wanted ways."""

    def __init__(
        self,
        builder: Builder,
        rule: Rule,
        literals: Conjunction,
        contained: list[Formula],
        least: int,
        most: int | None,
        prefix: int,
    ) -> None:
        self._builder, self._rule, self._literals = builder, rule, literals
        self._contained = contained
        self._least, self._most, self._prefix = least, most, prefix
        # From here on only what is counted matters.
        self._last = max(prefix, least, 1) if most is None else most + 1
        self._known: dict[tuple[int, tuple[int, ...]], Rule] = {}
        self._pending: list[tuple[int, tuple[int, ...]]] = []

    def add(self) -> None:
        builder, layout = self._builder, self._builder.layout
        if self._contained:
            start = self._state(0, (0,) * len(self._contained))
            builder.rules.add(self._rule, (layout.open_array, start))
            while self._pending:
                self._add_state(self._pending.pop())
            return
        # Items of one kind are repeated, instead of a rule for each.
        at, before = self._prefix, layout.open_array
        follow = builder.rules.new()
        current = self._rule
        builder.rules.add(current, (before, follow))
        for position in range(at):
            if position >= self._least:
                builder.rules.add(follow, (layout.close_array,))
            if self._most is not None and position >= self._most:
                return
            value = builder.rule(simplify.item(self._literals, position))
            comma: tuple[Symbol, ...] = (layout.comma,) if position else ()
            following = builder.rules.new()
            builder.rules.add(follow, (*comma, value, following))
            follow = following
        least = max(self._least - at, 0)
        most = None if self._most is None else self._most - at
        if least == 0:
            builder.rules.add(follow, (layout.close_array,))
        if most is not None and most <= 0:
            return
        value = builder.rule(simplify.item(self._literals, at))
        if at:
            again = Many((layout.comma, value), max(least, 1), most)
            builder.rules.add(follow, (again, layout.close_array))
        else:
            again = Many(
                (layout.comma, value), max(least - 1, 0), None if most is None else most - 1
            )
            builder.rules.add(follow, (value, again, layout.close_array))

    def _state(self, at: int, counts: tuple[int, ...]) -> Rule:
        key = min(at, self._last), counts
        if key not in self._known:
            self._builder.simplifier.spend(20)
            self._known[key] = self._builder.rules.new()
            self._pending.append(key)
        return self._known[key]

    def _add_state(self, key: tuple[int, tuple[int, ...]]) -> None:
        at, counts = key
        rules, layout = self._builder.rules, self._builder.layout
        rule = self._known[key]
        bounds = [(each[3], each[4]) for each in self._contained]
        enough = all(
            low <= count and (high is None or count <= high)
            for count, (low, high) in zip(counts, bounds, strict=True)
        )
        if at >= self._least and enough:
            rules.add(rule, (layout.close_array,))
        if self._most is not None and at >= self._most:
            return
        comma: tuple[Symbol, ...] = (layout.comma,) if at else ()
        for value, after in self._choices(at, counts):
            rules.add(rule, (*comma, self._builder.rule(value), self._state(at + 1, after)))

    def _choices(self, at: int, counts: tuple[int, ...]) -> list[tuple[Formula, tuple[int, ...]]]:
        """What the next item may be, with the counts behind it."""
        choices: list[tuple[list[Formula], tuple[int, ...]]] = [
            ([simplify.item(self._literals, min(at, self._prefix))], counts)
        ]
        for index, (_, start, wanted, low, high) in enumerate(self._contained):
            count = counts[index]
            if at < start or (high is None and count >= low):
                continue
            more = count + 1
            split = []
            for parts, after in choices:
                split.append(([*parts, negation(wanted)], after))
                if high is None or more <= high:
                    changed = (*after[:index], more, *after[index + 1 :])
                    split.append(([*parts, wanted], changed))
            choices = split
        found = [(conjunction(parts), after) for parts, after in choices]
        return [(value, after) for value, after in found if value != FALSE]
