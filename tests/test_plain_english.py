"""Plain English in docstrings, comments, messages, plugins and docs, and one thing per name."""

import ast
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.syntax_trees import nodes_of

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("akunu_py", "bench", "models", "ngram", "tui")
LONGEST = 35  # words in a sentence
# Everyday phrases in technical roles, which a reader has to translate.
PHRASES = (
    "told", "beside", "nobody", "whoever", "gone on with", "go on with", "goes on with",
    "went on with", "what was read", "what it had read", "who asks", "who steps", "as many as",
    "as many tokens as", "as far as", "whatever becomes of", "is none that", "shall",
    "the dearest", "nobody learns", "else what", "how far that came", "who drafts",
    "from all there is", "so much memory", "is none of the", "may call it, too", "pass over rows",
    "what passes cost", "what it takes to", "who wants", "still to be read", "to be read before",
    "kept after all", "is short of it", "history on disk", "those beside",
)  # fmt: skip
COMMENT = re.compile(r"(?:^|\s)#+ ?(.+)")
BANNED = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
BANNED_IN_NAMES = {"told", "tell", "beside", "nobody", "whoever", "shall", "dearest", "who"}
# In tests, where requests are sent, prompts prefilled, and answers generated.
BANNED_IN_TEST_NAMES = BANNED_IN_NAMES | {"tells", "ask", "asks", "asked", "asking", "said"}
KINDS = {
    ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.Name,
    ast.Attribute, ast.Expr, ast.Constant, ast.JoinedStr,
}  # fmt: skip
# How the editors' languages mark a comment that fills its line.
COMMENTS = {".lua": "--", ".js": "//", ".vim": '"', ".el": ";", ".toml": "#", ".tcss": "/*"}


class Passage(NamedTuple):
    """A piece of prose and its place."""

    place: str
    text: str


@cache
def sources(*folders: str) -> list[tuple[Path, str]]:
    """Return the Python files of folders (default: the product's) with their texts."""
    found = (path for folder in folders or WINGS for path in (ROOT / folder).rglob("*.py"))
    real = {path.resolve() for path in found}
    return [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in sorted(real)]


@cache
def nodes_in(path: Path) -> list[ast.AST]:
    """Return the nodes of a Python file's syntax tree that have names or texts."""
    nodes = nodes_of((ROOT / path).read_text(encoding="utf-8"))
    return [node for node in nodes if type(node) in KINDS]


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Let no garbage collection visit the syntax trees, and free them after the last test."""
    gc.disable()
    yield
    nodes_in.cache_clear()
    gc.enable()


def prose_of(path: Path, source: str, *, strings: bool = True) -> Iterator[Passage]:
    """Yield docstrings, comments, and the strings that users read: help, messages, settings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in nodes_in(path):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield Passage(f"{path}:{node.body[0].lineno}", text)
    if strings:
        yield from (Passage(f"{path}:{line}", string) for string, line in strings_of(path))
    texts: set[int] = set()  # lines of long strings
    for node in nodes_in(path):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            texts.update(range(node.lineno, (node.end_lineno or 0) + 1))
    comment = (0, "")  # its last line, and its text
    for number, line in enumerate(source.splitlines(), 1):
        if "#" not in line or number in texts or not (found := COMMENT.search(line)):
            continue
        continues = comment[0] + 1 == number and not line[: found.start()].strip()
        if comment[1] and not continues:
            yield Passage(f"{path}:{comment[0]}", comment[1])
        comment = (number, f"{comment[1]} {found[1]}" if continues else found[1])
    if comment[1]:
        yield Passage(f"{path}:{comment[0]}", comment[1])


def strings_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield strings of several words that are no docstrings, with their lines."""
    skipped: set[ast.AST] = set()  # docstrings, and the parts of f-strings
    for node in nodes_in(path):
        if isinstance(node, ast.Expr):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
    for node in nodes_in(path):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node not in skipped:
            text = literal(node)
            if re.search(r"[A-Za-z]{2,} ", text) and not is_data(text):
                yield text, node.lineno


def is_data(text: str) -> bool:
    """Return True for regexes, SQL, source code and other strings that are no prose."""
    return bool(re.search(r"\\[a-z]|[{}<>=]\n|\bSELECT\b|\bCREATE\b|\(\?|\n.*\n.*\n", text))


def literal(node: ast.expr) -> str:
    """Return the text of a string literal; placeholders count as one word."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    return "X" if isinstance(node, ast.FormattedValue) else ""


def pages() -> Iterator[Passage]:
    """Yield all Markdown pages but the log of experiments, paragraph by paragraph."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("packaging/**/*.md")]
    for path in sorted(files):
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"`[^`]*`|<!--.*?-->", "X", text)
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)", text):
            if block.lstrip().startswith("|"):
                block = block.replace("|", "\n\n")  # each cell by itself
            yield Passage(str(path.relative_to(ROOT)), block)


def other_sources() -> Iterator[Passage]:
    """Yield comments and strings of the editor plugins, TOML files and style sheets."""
    for path in (path for wing in WINGS for path in sorted((ROOT / wing).rglob("*"))):
        mark = COMMENTS.get(Path(path.name.removesuffix(".in")).suffix)
        if path.is_dir() or (mark is None and path.name != "akunu.txt"):
            continue
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if mark is None:  # Vim's help page
            yield from (Passage(name, block) for block in re.split(r"\n\s*\n", text))
            continue
        comments = re.compile(rf"(?m)(?:^[ \t]*{re.escape(mark)}.*\n?)+")
        for block in comments.findall(text):
            lines = (line.strip().lstrip(mark + "* ") for line in block.splitlines())
            yield Passage(name, " ".join(line.removesuffix("*/") for line in lines))
        if path.parent.name != "workloads":  # texts of the benchmark's prompts
            for found in re.findall(
                r'"([^"\n]*)"|\'([^\'\n]*)\'|`([^`\n]*)`', comments.sub("", text)
            ):
                yield Passage(name, "".join(found))


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than `LONGEST` words."""
    if len(text.split()) <= LONGEST:
        return []
    text = re.sub(r"(?m)^ {4,}\S.*\n?", "\n", text)  # tables and formulas are indented
    blocks = re.split(r"\n\s*\n|\n\s*[-*]\s", text)
    found = (part for block in blocks for part in re.split(r"(?<=[.!?:;])\s+|→", block))
    return [" ".join(part.split()) for part in found if len(part.split()) > LONGEST]


def faults(passages: Iterable[Passage]) -> list[str]:
    """Return a line for each banned phrase and each long sentence."""
    found = []
    for place, text in passages:
        lowered = text.lower()
        if any(phrase in lowered for phrase in PHRASES):  # the pattern is slow
            found += [f"{place}: {match[0]!r}" for match in BANNED.finditer(text)]
        found += [f"{place}: {len(each.split())} words: {each}" for each in long_sentences(text)]
    return found


def prose_in(*folders: str, strings: bool = True) -> Iterator[Passage]:
    """Yield the prose of the Python files in folders; strings: include those that users read."""
    for path, text in sources(*folders):
        yield from prose_of(path, text, strings=strings)


def build_scripts() -> Iterator[Passage]:
    """Yield comments and help texts of the Makefile, the CI and pyproject.toml."""
    comment = re.compile(r"(?m)(?:^|\s)##? +(\S.*)$|^  \"[a-z0-9]+: (.*)\",$")
    for path in [ROOT / "Makefile", *(ROOT / ".ci").iterdir(), ROOT / "pyproject.toml"]:
        for found in comment.finditer(path.read_text(encoding="utf-8")):
            yield Passage(f"{path.name}: {found[0].strip()}", found[1] or found[2])


PROSE: dict[str, Callable[[], Iterator[Passage]]] = {
    **{wing: partial(prose_in, wing) for wing in WINGS},
    "tests": partial(prose_in, "tests", strings=False), "build scripts": build_scripts,
    "docs": pages, "editor plugins and data files": other_sources,
}  # fmt: skip


@pytest.mark.parametrize("prose", PROSE)
def test_prose_is_in_plain_english(prose: str) -> None:
    passages = list(PROSE[prose]())
    assert len(passages) > 40
    found = faults(passages)
    assert not found, "\n".join(found)


def names_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines, with their lines."""
    for node in nodes_in(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake case or camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


@pytest.mark.parametrize(
    ("folders", "banned"), [((), BANNED_IN_NAMES), (("tests",), BANNED_IN_TEST_NAMES)]
)
def test_names_are_in_plain_english(folders: tuple[str, ...], banned: set[str]) -> None:
    found = [
        f"{path}:{line}: {name}"
        for path, _ in sources(*folders)
        for name, line in names_of(path)
        if words_of(name) & banned
    ]
    assert not found, "\n".join(found)


def test_class_names_are_unique() -> None:
    nodes = (node for path, _ in sources() for node in nodes_in(path))
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []


def test_no_two_wings_have_a_module_of_the_same_name() -> None:
    wings: dict[str, set[str]] = {}
    for path, _ in sources():
        parts = path.parts if path.parts[0] != "akunu_py" else path.parts[1:]
        if not path.name.startswith("__"):
            wings.setdefault(path.name, set()).add(parts[0])
    assert [name for name, found in wings.items() if len(found) > 1] == []
