"""Measure how often a prompt contains the definition of the called function.

Calls come from real source files whose definition is in another file of the package. The lexer
decides what a definition is, independently of the product. The order of other files is random.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from pygments.lexers import get_lexer_by_name
from pygments.token import Name

from akunu_py.completion.prompt.related import RelatedFiles, names_near
from tests.measure.oracle.source import LANGUAGES

BUDGETS = (512, 1024, 2048, 4096)
FIRST_LINES, RELATED = "first lines", "related"  # of the nearest files; chosen by the product
_CALL = re.compile(r"\b([A-Za-z_]\w{3,})\(")
_OPEN_FILES = 16  # besides the buffer
_CALLS = 6  # of a file
_DEFINED = (Name.Function, Name.Class)


@dataclass(frozen=True, slots=True)
class Call:
    """A cursor after a call."""

    path: str
    prefix: str
    suffix: str
    others: tuple[tuple[str, str], ...]
    line: str  # the definition


def measure_definitions(
    directory: Path, tokens: Callable[[str], int], progress: Callable[[str], None]
) -> dict[str, dict[str, list[float]]]:
    """Return the share of calls with the definition in the prompt, for each of `BUDGETS`.

    By language and method; "all" covers all languages, "calls" is the number of calls.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for package in sorted({path.parent for path in directory.rglob("*") if path.is_file()}):
        for call in calls_of(package):
            progress(call.path)
            language = LANGUAGES[Path(call.path).suffix]
            for name in (language, "all"):
                counts = found.setdefault(
                    name, {"calls": [0], **{method: [0] * len(BUDGETS) for method in _METHODS}}
                )
                counts["calls"][0] += 1
            for method, choose in _METHODS.items():
                for index, budget in enumerate(BUDGETS):
                    if any(call.line in text for text in choose(call, tokens, budget)):
                        found[language][method][index] += 1
                        found["all"][method][index] += 1
    return {
        name: {
            key: [
                round(value / counts["calls"][0], 4) if key in _METHODS else value
                for value in values
            ]
            for key, values in counts.items()
        }
        for name, counts in found.items()
    }


def calls_of(package: Path) -> Iterator[Call]:
    """Yield calls of functions that exactly one other file of the directory defines."""
    texts = {
        str(path): path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(package.iterdir())
        if path.suffix in LANGUAGES and path.is_file()
    }
    lines: dict[str, list[tuple[str, str]]] = {}  # definitions of each name: (path, line)
    for path, text in texts.items():
        for name, line in _definitions(path, text):
            lines.setdefault(name, []).append((path, line))
    for path, text in texts.items():
        rng = random.Random(crc32(text.encode()))
        calls = [
            found
            for found in _CALL.finditer(text)
            if len(definitions := lines.get(found[1], [])) == 1 and definitions[0][0] != path
        ]
        for found in rng.sample(calls, min(_CALLS, len(calls))):
            defining, line = lines[found[1]][0]
            others = [other for other in texts if other not in (path, defining)]
            chosen = [defining, *rng.sample(others, min(_OPEN_FILES - 1, len(others)))]
            rng.shuffle(chosen)
            files = tuple((other, texts[other]) for other in chosen)
            yield Call(path, text[: found.end()], text[text.find("\n", found.end()) :], files, line)


def _definitions(path: str, text: str) -> list[tuple[str, str]]:
    """Return (name, line) of the definitions in a file."""
    found = []
    for at, kind, value in get_lexer_by_name(LANGUAGES[Path(path).suffix]).get_tokens_unprocessed(
        text
    ):
        start = text.rfind("\n", 0, at) + 1
        line = text[start : text.find("\n", at)].strip()
        called = re.match(r"(?:return|await|yield|[\w.]+ ?=[^>]|[.(])", line)
        if kind in _DEFINED and len(line) > len(value) + 4 and not called and line[-1] != ";":
            found.append((value, line))
    names = Counter(name for name, _ in found)
    return [(name, line) for name, line in found if names[name] == 1]


def _first_lines(call: Call, tokens: Callable[[str], int], budget: int) -> Sequence[str]:
    """Return the first lines of the nearest files, the baseline."""
    texts = []
    for _, text in call.others:
        lines = text.splitlines(keepends=True)
        low, high = 0, len(lines)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if tokens("".join(lines[:middle])) <= budget else (low, middle - 1)
            )
        if low == 0:
            break
        texts.append("".join(lines[:low]))
        budget -= tokens(texts[-1])
    return texts


def _related(call: Call, tokens: Callable[[str], int], budget: int) -> Sequence[str]:
    related = RelatedFiles()
    near = names_near(call.prefix, call.suffix)
    related.update(call.others, near, tokens, budget, budget, 0)
    return [text for _, text in related.sections()]


_METHODS: dict[str, Callable[[Call, Callable[[str], int], int], Sequence[str]]] = {
    FIRST_LINES: _first_lines,
    RELATED: _related,
}
