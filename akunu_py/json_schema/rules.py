"""Rules of a context-free grammar, without dead ends: each allowed prefix can be completed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from akunu_py.errors import SchemaError
from akunu_py.json_schema.regex import Expr, is_empty

_MAX_SYMBOLS = 100_000  # llguidance numbers its own symbols with 16 bits


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule."""

    name: str


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
        self._rules: dict[str, list[Alternative]] = {}
        self._lines: list[str] = []
        self._size = 0  # symbols on both sides of all alternatives

    def new(self) -> Rule:
        rule = Rule(f"{self._prefix}n{len(self._rules)}")
        self._rules[rule.name] = []
        return rule

    def add(self, rule: Rule, alternative: Sequence[Symbol]) -> None:
        """Add an alternative to a rule. Raises SchemaError if the grammar becomes too large."""
        self._size += 1 + sum(_symbol_count(symbol) for symbol in alternative)
        if self._size > _MAX_SYMBOLS:
            raise SchemaError("its grammar becomes too large; make it simpler")
        self._rules[rule.name].append(tuple(alternative))

    def to_lark(self, start: Rule) -> str | None:
        """Return the grammar in llguidance's dialect of Lark, None if nothing can be completed."""
        productive = self._productive()
        if start.name not in productive:
            return None
        terminals: dict[Expr, str] = {}
        lines = self._lines = [f"{self._prefix}start: {start.name}"]
        pending, done = [start.name], {start.name}
        while pending:
            name = pending.pop()
            alternatives = []
            for alternative in self._rules[name]:
                pruned = self._prune(alternative, productive)
                if pruned is None:
                    continue
                alternatives.append(self._text(pruned, terminals))
                for found in _rules_in(pruned):
                    if found not in done:
                        done.add(found)
                        pending.append(found)
            lines.append(f"{name}: {' | '.join(dict.fromkeys(alternatives))}")
        lines += [f"{name}: {expr.atom}" for expr, name in terminals.items()]
        return "\n".join(lines) + "\n"

    def _productive(self) -> set[str]:
        """Return the rules that can be completed: a least fixed point."""
        productive: set[str] = set()
        blocked: dict[str, list[tuple[str, Alternative]]] = {}
        pending = [(name, each) for name, listed in self._rules.items() for each in listed]
        while pending:
            name, alternative = pending.pop()
            if name in productive:
                continue
            missing = _unproductive(alternative, productive)
            if missing:
                blocked.setdefault(missing, []).append((name, alternative))
            elif not any(isinstance(each, Expr) and is_empty(each) for each in alternative):
                productive.add(name)
                pending += blocked.pop(name, [])
        return productive

    def dead_end(self, start: Rule) -> list[Rule]:
        """Return `start` and the chain of rules that prevent its completion, while it is unique."""
        productive, found = self._productive(), [start]
        while True:
            missing = {_unproductive(each, productive) for each in self._rules[found[-1].name]}
            rule = Rule(missing.pop()) if len(missing) == 1 else Rule("")
            if not rule.name or rule in found:
                return found
            found.append(rule)

    def _prune(self, alternative: Alternative, productive: set[str]) -> Alternative | None:
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
                    tuple(rule for rule in listed if rule.name in productive)
                    for listed in (symbol.optional, symbol.others)
                )
                if len(symbol.required) + len(optional) + bool(others) < symbol.least:
                    return None
                symbol = replace(symbol, optional=optional, others=others)
            symbols.append(symbol)
        return tuple(symbols)

    def _text(self, symbols: Alternative, terminals: dict[Expr, str]) -> str:
        return " ".join(self._symbol(symbol, terminals) for symbol in symbols) or '""'

    def _symbol(self, symbol: Symbol, terminals: dict[Expr, str]) -> str:
        """Write a symbol as Lark. terminals: the name of each regex, which may grow."""
        match symbol:
            case Rule(name):
                return name
            case Verbatim(text):
                return text
            case Shuffle():
                return self._shuffled(symbol, terminals)
            case Repetition(symbols, low, high):
                counts = f"{{{low},{'' if high is None else high}}}"
                times = "*" if (low, high) == (0, None) else counts
                return f"({self._text(symbols, terminals)}){times}"
        return terminals.setdefault(symbol, f"{self._prefix.upper()}T{len(terminals)}")

    def _shuffled(self, symbol: Shuffle, terminals: dict[Expr, str]) -> str:
        """Write the rules of a shuffle. The bits of a parameter are the members so far."""
        first, more = (f"{self._prefix}{kind}{len(self._lines)}" for kind in "fm")
        comma, close = (self._symbol(each, terminals) for each in (symbol.comma, symbol.close))
        named = [*symbol.required, *symbol.optional]
        starts = [f"{rule.name} {more}::{1 << bit}" for bit, rule in enumerate(named)]
        starts += [f"{rule.name} {more}::0" for rule in symbol.others]
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
            f"{comma} {rule.name} {more}::set_bit({bit}) %if {again.format(bit)}"
            for bit, rule in enumerate(named)
        ]
        nexts += [f"{comma} {rule.name} {more}::_" for rule in symbol.others]
        self._lines.append(f"{first}: {' | '.join(starts)}")
        self._lines.append(f"{more}::_: {' | '.join([*nexts, f'{close} %if {done}'])}")
        return first


def _symbol_count(symbol: Symbol) -> int:
    """Return an estimate of the number of llguidance's symbols for `symbol`."""
    if isinstance(symbol, Shuffle):
        return 5 * len((*symbol.required, *symbol.optional, *symbol.others))
    return len(symbol.symbols) if isinstance(symbol, Repetition) else 1


def _unproductive(symbols: Alternative, productive: set[str]) -> str:
    """Return the first needed rule that cannot be completed, "" if there is none."""
    needed = _rules_in(symbols, optional=False)
    return next((name for name in needed if name not in productive), "")


def _rules_in(symbols: Alternative, *, optional: bool = True) -> list[str]:
    """Return the names of the rules in `symbols`. optional: also those that may be left out."""
    found = [symbol.name for symbol in symbols if isinstance(symbol, Rule)]
    for symbol in symbols:
        if isinstance(symbol, Repetition) and (symbol.low or optional):
            found += _rules_in(symbol.symbols, optional=optional)
        elif isinstance(symbol, Shuffle):
            more = (*symbol.optional, *symbol.others) if optional else ()
            found += [rule.name for rule in (*symbol.required, *more)]
    return found
