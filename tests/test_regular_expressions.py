"""Every regular expression of the product takes linear time, also on hostile text."""

import ast
import importlib
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from re import _constants as code  # type: ignore[attr-defined]  # the parser is not in typeshed
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from akunu_py.completion.syntax import syntax_of
from tests.support.paths import ROOT
from tests.support.syntax_trees import nodes_of

SIZES = (20, 500, 20_000)  # characters; exponential time shows with few of them
LIMIT_S = 0.05  # CPU time of one match; linear ones take a few milliseconds
SUSPECT_S = 0.0001  # of the shorter texts, before the longest is tried
ANYWHERE = ("findall", "finditer", "split", "sub", "subn")  # methods that match repeatedly
METHODS = ("match", "fullmatch", "search", "compile", *ANYWHERE)
CHARACTERS = [*map(chr, range(1, 127)), "é", "\u3042", "\u0301", "\u3000", "☺"]
LANGUAGES = ("rs", "sh")  # whose patterns are made at run time
Nodes = Iterable[tuple[Any, Any]]


def find_patterns() -> dict[re.Pattern[Any], tuple[str, set[str]]]:
    """Return the place and the methods of all patterns that are known before the program runs."""
    found: dict[re.Pattern[Any], tuple[str, set[str]]] = {}
    for root in ("akunu_py", "bench", "models", "ngram", "tui"):
        for path in sorted((ROOT / root).rglob("*.py")):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            source = path.read_text()
            if path.is_symlink() or name.endswith("__main__"):
                continue
            module = importlib.import_module("akunu_py." + name.removeprefix("akunu_py."))
            for call in calls_of_re(source):
                text = call if call.func.attr == "compile" else call.args[0]  # type: ignore[attr-defined]
                place = f"{name}:{call.lineno}"
                try:
                    value = eval(compile(ast.Expression(text), place, "eval"), dict(vars(module)))
                except NameError:  # made from local values
                    continue
                pattern = value if isinstance(value, re.Pattern) else re.compile(value)
                found.setdefault(pattern, (place, set()))[1].add(call.func.attr)  # type: ignore[attr-defined]
            for constant, value in vars(module).items():
                for pattern in set(patterns_in(value)):
                    place = f"{name}.{constant}"
                    used = set(re.findall(rf"\b{constant}(?:\[[^\]]*\])?\.(\w+)\(", source))
                    found.setdefault(pattern, (place, set()))[1].update(used.intersection(METHODS))
    for language in LANGUAGES:
        for pattern in patterns_in(syntax_of(language=language)):
            found.setdefault(pattern, (f"syntax_of({language!r})", {"search"}))
    return found


def calls_of_re(source: str) -> Iterator[ast.Call]:
    for node in nodes_of(source) if re.search(r"\bre\.", source) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = node.func.value
            if isinstance(module, ast.Name) and module.id == "re" and node.func.attr in METHODS:
                yield node


def patterns_in(value: object, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth < 4 and isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from patterns_in(each, depth + 1)
    elif depth < 4 and isinstance(value, dict):
        yield from patterns_in(list(value.values()), depth)
    elif depth < 4 and is_dataclass(value) and not isinstance(value, type):
        yield from patterns_in([getattr(value, each.name) for each in fields(value)], depth)


def children(operation: Any, value: Any) -> list[Nodes]:
    """Return the parts of a node of a parsed pattern."""
    if operation in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT):
        return [value[2]]
    if operation is code.SUBPATTERN:
        return [value[3]]
    if operation is code.ATOMIC_GROUP:
        return [value]
    if operation is code.BRANCH:
        return list(value[1])
    return [value[1]] if operation in (code.ASSERT, code.ASSERT_NOT) else []


def classes(nodes: Nodes) -> Iterator[re.Pattern[str]]:
    """Yield the characters and character classes of a pattern as patterns."""
    for operation, value in nodes:
        if operation in (code.LITERAL, code.NOT_LITERAL, code.IN, code.ANY):
            state = parser.State()
            state.str = ""
            yield re._compiler.compile(parser.SubPattern(state, [(operation, value)]))  # type: ignore[attr-defined]
        for part in children(operation, value):
            yield from classes(part)


def example(nodes: Nodes, repeats: int) -> str:
    """Return a text that the nodes may match, with optional parts if `repeats` is 1."""
    text = ""
    for operation, value in nodes:
        parts = children(operation, value)
        if operation is code.LITERAL:
            text += chr(value)
        elif operation in (code.NOT_LITERAL, code.IN, code.ANY):
            is_class = next(classes([(operation, value)]))
            text += next(filter(is_class.match, ["a", *CHARACTERS]), "")
        elif operation in (code.ASSERT, code.ASSERT_NOT) or not parts:
            continue
        elif operation in (code.SUBPATTERN, code.ATOMIC_GROUP, code.BRANCH):
            text += example(parts[0], repeats)
        else:
            text += example(parts[0], repeats) * max(value[0], min(repeats, value[1]))
    return text


def repetitions(nodes: Nodes, before: frozenset[str]) -> Iterator[tuple[frozenset[str], Nodes]]:
    """Yield the repeated parts of a pattern, with examples of the text before them."""
    nodes = list(nodes)
    for number, (operation, value) in enumerate(nodes):
        texts = {text + example(nodes[:number], repeats) for text in before for repeats in (0, 1)}
        for part in children(operation, value):
            if operation in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT):
                yield frozenset(texts), part
            yield from repetitions(part, frozenset(texts))


def hostile_texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (start, unit, end) of texts whose unit is repeated; most ends match nothing."""
    nodes = parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)
    kinds = list(classes(nodes))
    alike = {tuple(bool(kind.match(each)) for kind in kinds): each for each in CHARACTERS}
    units = [each for matched, each in alike.items() if any(matched)]
    cases = {("", unit) for unit in units}
    for before, part in repetitions(nodes, frozenset([""])):
        branches = [each for node in part for each in children(*node)]
        more = {example(each, repeats) for each in (part, *branches) for repeats in (0, 1)} - {""}
        cases |= {(start, unit) for start in before for unit in [*units, *more]}
    for start, unit in sorted(cases):
        for end in ("\0", "\n\0"):
            yield start, unit, end


def seconds(pattern: re.Pattern[Any], method: str, text: Any) -> float:
    """Return the CPU time of a match."""
    start = time.thread_time()
    if method in ANYWHERE:
        for _ in pattern.finditer(text):
            pass
    else:
        getattr(pattern, method)(text)
    return time.thread_time() - start


def slow_text(pattern: re.Pattern[Any], methods: set[str]) -> str:
    """Describe the first text on which the pattern takes too long, "" for none."""
    for start, unit, end in hostile_texts(pattern):
        for method in methods - {"compile"} or {"finditer"}:
            for size in SIZES:
                text: Any = start + unit * (size // len(unit) + 1) + end
                if isinstance(pattern.pattern, bytes):
                    text = text.encode("latin-1", "replace")
                taken = seconds(pattern, method, text)
                if taken > LIMIT_S and seconds(pattern, method, text) > LIMIT_S:
                    return f"{method} of {start!r} + {unit!r} * {size} + {end!r}: {taken:.1f} s"
                if size > SIZES[0] and taken < SUSPECT_S:
                    break
    return ""


@pytest.mark.long
def test_every_regular_expression_takes_linear_time() -> None:
    patterns = find_patterns()
    assert len(patterns) > 150
    found = {place: slow_text(each, methods) for each, (place, methods) in patterns.items()}
    assert {place: text for place, text in found.items() if text} == {}


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"x[ab]*[bc]*d"])
def test_slow_expressions_are_found(pattern: str) -> None:
    assert slow_text(re.compile(pattern), {"search"})
