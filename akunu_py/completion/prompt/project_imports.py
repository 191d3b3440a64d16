"""Closed files that the buffer imports or includes, found on disk within its project."""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from akunu_py.completion.completion_request import CompletionRequest, SourceFile
from akunu_py.completion.prompt.layout import project_root

_FILES = 8  # maximum files for one buffer
_CHARACTERS = 16_000  # of the head of each file
_LARGEST = 1 << 20  # bytes of a file
_HEAD = 20_000  # characters at the start of the buffer that are searched for imports
_SOURCE_ROOTS = ("src", "lib", "app", "source", "include", "src/main/java", "src/main/kotlin")

_LANGUAGES = tomllib.loads(Path(__file__).with_name("imports.toml").read_text(encoding="utf-8"))
_BY_SUFFIX = {suffix: row for row in _LANGUAGES["language"] for suffix in row["suffixes"].split()}
_PATTERNS = {suffix: re.compile(row["pattern"]) for suffix, row in _BY_SUFFIX.items()}
_PYTHON = re.compile(
    r"(?m)^[ \t]*(?:from[ \t]++(\.*+)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)"
    r"|import[ \t]+([\w., \t]+))"
)
_RUST = re.compile(
    r"(?m)^[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?(?:mod[ \t]+(\w+)[ \t]*;|use[ \t]+crate::([\w:]+))"
)
_STYLE = re.compile(r"""(?m)^[ \t]*@(?:use|forward|import)[ \t]+['"]([^'":\n]+)['"]""")
_MODULES = (".py", "/__init__.py", ".pyi")
Candidates = Iterator[list[str]]  # for each import, the paths to try in order
Finder = Callable[[str, str, list[str]], Candidates]  # the buffer's text and path, source roots


def _python(text: str, path: str, roots: list[str]) -> Candidates:
    for dots, module, names, modules in _PYTHON.findall(text):
        bases = roots
        if dots:
            bases = [os.path.join(os.path.dirname(path), *[".."] * (len(dots) - 1))]
        for name in modules.replace(",", " ").split():
            yield _below(bases, name, _MODULES)
        if module or dots:
            members = re.findall(r"\w+", re.sub(r"\bas[ \t]+\w+", "", names))
            yield _below(bases, module, _MODULES) if module else []
            for member in members:
                yield _below(bases, f"{module}.{member}".lstrip("."), _MODULES)


def _below(bases: list[str], name: str, ends: Sequence[str], separator: str = ".") -> list[str]:
    """Return the paths below `bases` that a name, such as `a.b`, may have with each of `ends`."""
    stems = [os.path.join(base, *name.split(separator)) for base in bases]
    return [stem + end for stem in stems for end in ends]


def _named(text: str, path: str, roots: list[str]) -> Candidates:
    """Yield the paths of files by the names that the pattern of the language finds."""
    suffix = os.path.splitext(path)[1].lower()
    ends, separator = _BY_SUFFIX[suffix]["ends"], _BY_SUFFIX[suffix].get("separator", "")
    for name in _PATTERNS[suffix].findall(text):
        stem = os.path.join(os.path.dirname(path), name)
        bare = os.path.splitext(stem)[0]  # TypeScript imports a.js for a.ts
        relative = [each + end for each in (stem, bare) for end in ends]
        yield _below(roots, name, ends, separator) if separator else relative


def _rust(text: str, path: str, roots: list[str]) -> Candidates:
    bases = [base for base in roots if os.path.basename(base) == "src"]
    stem, name = os.path.split(path)
    inner = stem if name in ("mod.rs", "lib.rs", "main.rs") else os.path.splitext(path)[0]
    for module, used in _RUST.findall(text):
        if module:
            yield [os.path.join(inner, f"{module}.rs"), os.path.join(inner, module, "mod.rs")]
        parts = [part for part in used.split("::") if part]
        for length in range(len(parts), 0, -1):
            yield [os.path.join(base, *parts[:length]) + ".rs" for base in bases]


def _style(text: str, path: str, roots: list[str]) -> Candidates:
    for name in _STYLE.findall(text):
        directory, base = os.path.split(os.path.join(os.path.dirname(path), name))
        names = (f"_{base}.scss", f"{base}.scss", f"{base}.less", f"_{base}.sass", base)
        yield [os.path.join(directory, each) for each in names]


_FINDERS: dict[str, Finder] = {  # by file type
    **dict.fromkeys(_BY_SUFFIX, _named),
    **dict.fromkeys((".py", ".pyi"), _python),
    **dict.fromkeys((".scss", ".less", ".sass"), _style),
    ".rs": _rust,
}


def imported_files(request: CompletionRequest) -> tuple[SourceFile, ...]:
    """Return the heads of the closed files that the buffer imports, in its order."""
    path = os.path.normpath(request.path)
    finder = _FINDERS.get(os.path.splitext(path)[1].lower())
    root = project_root(path, request.root)
    if finder is None or not root or not os.path.isabs(path):
        return ()
    within = os.path.realpath(root) + os.sep
    seen = {os.path.realpath(each) for each in (path, *(file.path for file in request.files))}
    found: list[SourceFile] = []
    text = request.prefix + request.suffix if len(request.prefix) < _HEAD else request.prefix
    above = [each for each in Path(path).parents if each.is_relative_to(os.path.normpath(root))]
    directories = *above, *(Path(root, each) for each in _SOURCE_ROOTS)
    roots = [str(each) for each in directories if each.is_dir()]
    for candidates in finder(text[:_HEAD], path, roots):
        for candidate in candidates:
            if not os.path.isfile(candidate):  # most candidates; resolving links takes longer
                continue
            real = os.path.realpath(candidate)
            if not real.startswith(within):
                continue
            if real not in seen and (head := head_of_file(candidate, _CHARACTERS)):
                seen.add(real)
                found.append(SourceFile(os.path.normpath(candidate), head))
            break
        if len(found) == _FILES:
            break
    return tuple(found)


def head_of_file(path: str, characters: int) -> str:
    """Return whole lines of the head of a file, "" if it is missing, too large or no text."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return ""
        with open(path, "rb") as file:
            data = file.read(4 * characters)
    except (OSError, ValueError):  # ValueError: a NUL character in the path
        return ""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")[:characters]
    if "\0" in text:
        return ""
    return text if len(text) < characters else text[: text.rfind("\n") + 1]
