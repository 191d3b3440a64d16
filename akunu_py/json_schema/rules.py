"""Rules of a context-free grammar, without dead ends: each allowed prefix can be completed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from akunu_py.errors import SchemaError
from akunu_py.json_schema.regex import Expr, is_empty

_MAX_SYMBOLS = 100_000  # llguidance numbers its own symbols with 16 bits


class Rule(str):
    """The name of a rule."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A text of the grammar: special tokens, which are not part of a terminal."""

    text: str


@dataclass(frozen=True, slots=True)
class Repetition:
    """A sequence of symbols, repeated `low` to `high` times, None for any number."""

    symbols: tuple[Symbol, ...]
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The rest of an array or object after its opening bracket, in any order."""

    required: tuple[Rule, ...]  # each of them once
    optional: tuple[Rule, ...]  # each of them at most once
    others: tuple[Rule, ...]  # any number of them
    comma: Expr
    close: Expr
    least: int = 0  # at most 1 if there are others
    most: int | None = None  # None if there are others


Symbol = Expr | Rule | Verbatim | Repetition | Shuffle
Alternative = tuple[Symbol, ...]


class Rules:
    """A grammar that is being built: rules with alternatives, written as Lark at the end."""

    def __init__(self, prefix: str = "") -> None:
        """prefix: of all names, "start" included, so that grammars can be combined."""
        self._prefix = prefix
        self._rules: dict[Rule, list[Alternative]] = {}
        self._lines: list[str] = []
        self._terminals: dict[Expr, str] = {}
        self._size = 0  # symbols on both sides of all alternatives

    def new(self) -> Rule:
        rule = Rule(f"{self._prefix}n{len(self._rules)}")
        self._rules[rule] = []
        return rule

    def add(self, rule: Rule, alternative: Sequence[Symbol]) -> None:
        """Add an alternative to a rule. Raises SchemaError if the grammar becomes too large."""
        self._size += 1 + sum(_symbol_count(symbol) for symbol in alternative)
        if self._size > _MAX_SYMBOLS:
            raise SchemaError("its grammar becomes too large; make it simpler")
        self._rules[rule].append(tuple(alternative))

    def to_lark(self, start: Rule) -> str | None:
        """Return the grammar in llguidance's dialect of Lark, None if nothing can be completed."""
        productive = self._productive()
        if start not in productive:
            return None
        lines = self._lines = [f"{self._prefix}start: {start}"]
        pending, done = [start], {start}
        while pending:
            rule = pending.pop()
            alternatives = []
            for alternative in self._rules[rule]:
                pruned = self._prune(alternative, productive)
                if pruned is None:
                    continue
                alternatives.append(self._text(pruned))
                for found in _rules_in(pruned):
                    if found not in done:
                        done.add(found)
                        pending.append(found)
            lines.append(f"{rule}: {' | '.join(dict.fromkeys(alternatives))}")
        lines += [f"{name}: {expr.atom}" for expr, name in self._terminals.items()]
        return "\n".join(lines) + "\n"

    def _productive(self) -> set[Rule]:
        """Return the rules that can be completed: a least fixed point."""
        productive: set[Rule] = set()
        blocked: dict[Rule, list[tuple[Rule, Alternative]]] = {}
        pending = [(rule, each) for rule, listed in self._rules.items() for each in listed]
        while pending:
            rule, alternative = pending.pop()
            if rule in productive:
                continue
            missing = _unproductive(alternative, productive)
            if missing:
                blocked.setdefault(missing, []).append((rule, alternative))
            elif not any(isinstance(each, Expr) and is_empty(each) for each in alternative):
                productive.add(rule)
                pending += blocked.pop(rule, [])
        return productive

    def dead_end(self, start: Rule) -> list[Rule]:
        """Return `start` and the chain of rules that prevent its completion, while it is unique."""
        productive, found = self._productive(), [start]
        while True:
            missing = {_unproductive(each, productive) for each in self._rules[found[-1]]}
            rule = missing.pop() if len(missing) == 1 else None
            if rule is None or rule in found:
                return found
            found.append(rule)

    def _prune(self, alternative: Alternative, productive: set[Rule]) -> Alternative | None:
        """Return an alternative without options that cannot be completed, None if it cannot be."""
        if _unproductive(alternative, productive):
            return None
        symbols: list[Symbol] = []
        for symbol in alternative:
            if isinstance(symbol, Expr) and is_empty(symbol):
                return None
            if isinstance(symbol, Repetition) and (
                symbol.high == 0 or not productive.issuperset(_rules_in(symbol.symbols))
            ):
                continue
            if isinstance(symbol, Shuffle):
                optional, others = (
                    tuple(rule for rule in listed if rule in productive)
                    for listed in (symbol.optional, symbol.others)
                )
                if len(symbol.required) + len(optional) + bool(others) < symbol.least:
                    return None
                symbol = replace(symbol, optional=optional, others=others)
            symbols.append(symbol)
        return tuple(symbols)

    def _text(self, symbols: Alternative) -> str:
        return " ".join(map(self._symbol, symbols)) or '""'

    def _symbol(self, symbol: Symbol) -> str:
        match symbol:
            case Rule():
                return symbol
            case Verbatim(text):
                return text
            case Shuffle():
                return self._shuffled(symbol)
            case Repetition(symbols, low, high):
                counts = f"{{{low},{'' if high is None else high}}}"
                times = "*" if (low, high) == (0, None) else counts
                return f"({self._text(symbols)}){times}"
        return self._terminals.setdefault(symbol, f"{self._prefix.upper()}T{len(self._terminals)}")

    def _shuffled(self, symbol: Shuffle) -> str:
        """Write the rules of a shuffle. The bits of a parameter are the members so far."""
        first, more = (f"{self._prefix}{kind}{len(self._lines)}" for kind in "fm")
        comma, close = map(self._symbol, (symbol.comma, symbol.close))
        named = [*symbol.required, *symbol.optional]
        starts = [f"{rule} {more}::{1 << bit}" for bit, rule in enumerate(named)]
        starts += [f"{rule} {more}::0" for rule in symbol.others]
        if not symbol.least and not symbol.required:
            starts.append(close)
        again, done = "bit_clear({})", "true"
        if symbol.most is not None:
            again = f"and({again}, bit_count_lt(_, {symbol.most}))"
        if symbol.required:
            done = f"is_ones([0:{len(symbol.required)}])"
        elif symbol.least > 1:
            done = f"bit_count_ge(_, {symbol.least})"
        nexts = [
            f"{comma} {rule} {more}::set_bit({bit}) %if {again.format(bit)}"
            for bit, rule in enumerate(named)
        ]
        nexts += [f"{comma} {rule} {more}::_" for rule in symbol.others]
        self._lines.append(f"{first}: {' | '.join(starts)}")
        self._lines.append(f"{more}::_: {' | '.join([*nexts, f'{close} %if {done}'])}")
        return first


def _symbol_count(symbol: Symbol) -> int:
    """Return an estimate of the number of llguidance's symbols for `symbol`."""
    if isinstance(symbol, Shuffle):
        return 5 * len((*symbol.required, *symbol.optional, *symbol.others))
    return len(symbol.symbols) if isinstance(symbol, Repetition) else 1


def _unproductive(symbols: Alternative, productive: set[Rule]) -> Rule | None:
    """Return the first needed rule that cannot be completed."""
    needed = _rules_in(symbols, optional=False)
    return next((rule for rule in needed if rule not in productive), None)


def _rules_in(symbols: Alternative, *, optional: bool = True) -> list[Rule]:
    """Return the rules in `symbols`. optional: also those that may be left out."""
    found = [symbol for symbol in symbols if isinstance(symbol, Rule)]
    for symbol in symbols:
        if isinstance(symbol, Repetition) and (symbol.low or optional):
            found += _rules_in(symbol.symbols, optional=optional)
        elif isinstance(symbol, Shuffle):
            more = (*symbol.optional, *symbol.others) if optional else ()
            found += (*symbol.required, *more)
    return found
