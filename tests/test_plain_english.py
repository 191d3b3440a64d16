"""Plain English in docstrings, comments, help texts and docs, and one class per name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("akunu_py", "bench", "models", "ngram", "tui")
LONGEST = 35  # words in a sentence
# Everyday phrases in technical roles, which a reader has to translate.
PHRASES = (
    "told", "beside", "nobody", "whoever", "gone on with", "go on with", "goes on with",
    "went on with", "what was read", "what it had read", "who asks", "who steps", "as many as",
    "as many tokens as", "as far as", "whatever becomes of", "is none that", "shall",
    "the dearest", "nobody learns", "else what", "how far that came", "who drafts",
)  # fmt: skip
BANNED = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)


class Passage(NamedTuple):
    """A piece of prose and its place."""

    place: str
    text: str


@cache
def sources() -> list[tuple[Path, str]]:
    """Return the product's Python files with their texts."""
    found = (path for wing in WINGS for path in (ROOT / wing).rglob("*.py"))
    real = {path.resolve() for path in found}
    return [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in sorted(real)]


def prose_of(path: Path, source: str) -> Iterator[Passage]:
    """Yield docstrings, comments, and the help of command-line options."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield Passage(f"{path}:{node.body[0].lineno}", text)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in ("help", "description", "epilog"):
                    yield Passage(f"{path}:{keyword.value.lineno}", literal(keyword.value))
    comment = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("# ")
        if (
            comment
            and comment[0] + 1 == token.start[0]
            and not token.line[: token.start[1]].strip()
        ):
            comment = (token.start[0], f"{comment[1]} {text}")
        else:
            if comment:
                yield Passage(f"{path}:{comment[0]}", comment[1])
            comment = (token.start[0], text)
    if comment:
        yield Passage(f"{path}:{comment[0]}", comment[1])


def literal(node: ast.expr) -> str:
    """Return the text of a string literal; placeholders count as one word."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    return "X" if isinstance(node, ast.FormattedValue) else ""


def pages() -> Iterator[Passage]:
    """Yield README, CONTRIBUTING and the docs without the log, paragraph by paragraph."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for path in files:
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"`[^`]*`|<!--.*?-->", "X", text)
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)", text):
            if not block.lstrip().startswith("|"):  # tables have no sentences
                yield Passage(str(path.relative_to(ROOT)), block)


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than `LONGEST` words."""
    text = re.sub(r"(?m)^ {4,}\S.*\n?", "\n", text)  # tables and formulas are indented
    blocks = re.split(r"\n\s*\n|\n\s*[-*]\s", text)
    found = (part for block in blocks for part in re.split(r"(?<=[.!?:;])\s+|→", block))
    return [" ".join(part.split()) for part in found if len(part.split()) > LONGEST]


def faults(passages: Iterator[Passage]) -> list[str]:
    """Return a line for each banned phrase and each long sentence."""
    found = []
    for place, text in passages:
        found += [f"{place}: {match[0]!r}" for match in BANNED.finditer(text)]
        found += [f"{place}: {len(each.split())} words: {each}" for each in long_sentences(text)]
    return found


@pytest.mark.parametrize("wing", WINGS)
def test_sources_are_in_plain_english(wing: str) -> None:
    own = [(path, text) for path, text in sources() if path.parts[0] == wing]
    assert own
    found = faults(each for path, text in own for each in prose_of(path, text))
    assert not found, "\n".join(found)


def test_docs_are_in_plain_english() -> None:
    found = faults(pages())
    assert not found, "\n".join(found)


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for _, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_wings_have_a_module_of_the_same_name() -> None:
    wings: dict[str, set[str]] = {}
    for path, _ in sources():
        parts = path.parts if path.parts[0] != "akunu_py" else path.parts[1:]
        if not path.name.startswith("__"):
            wings.setdefault(path.name, set()).add(parts[0])
    assert [name for name, found in wings.items() if len(found) > 1] == []


def test_the_check_finds_what_it_should() -> None:
    source = '"""Does what was read."""\n# Nobody\n# learns it.\nadd("-x", help=f"told {x}")\n'
    assert len(faults(prose_of(Path("x.py"), source))) == 3
    assert len(faults(iter([Passage("x", "word " * 36)]))) == 1
    assert not faults(iter([Passage("x", "word " * 20 + "end. " + "word " * 20)]))
