"""Pieces of other files for the prompt, which define or mention names near the cursor.

Files are cut at lines without indentation. Near and rare names rank the pieces; a definition counts
most. Other files come first in the prompt, so a chosen piece stays while it is cached.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

_BEFORE, _AFTER = 30, 8  # lines around the cursor whose names count
_HEAD = 4000  # characters at the start of the buffer, whose imports count
_SHORT, _LONG = 300, 2500  # characters of a piece
_CACHED = 64  # files whose pieces are kept
_WANTED = 3  # best pieces that justify another prefill of the buffer while no client waits
_NAME = re.compile(r"(?!\d)(?:\w[\u0300-\u036f]*){3,}")  # combining accents belong to a word
_IMPORT = re.compile(r"\s*(?:import|from|use|using|require|include|#include|export .*\bfrom)\b")
_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "and char class const def elif else end for from function if import int let new not public "
        "private return self static string switch this true false null None True False var void "
        "while with",
    )
)
# By keyword; by type (C, Java); a method with a brace; a value; a function as a value.
# No two neighboring repetitions match the same text: time stays linear on hostile lines.
_DEFINITIONS = tuple(
    re.compile("(?m)^" + pattern)
    for pattern in (
        r"[ \t]*(?:[\w@<>\[\]*&:,.()]+[ \t]+)*?"
        r"(?:def|class|function|func|fn|fun|struct|interface|trait|enum|type|module|namespace|record"
        r"|protocol|extension|object|const|let|var|val|sub|macro_rules!|\#[ \t]*define)\s+"
        r"(?:\([^)\n]*\)\s*)?(?!\d)([\w$][\w.:$]*)",
        r"[\w*&<>:,~\[\]][\w*&<>:,~\[\] \t]*[ \t*&](?!\d)(\w+)[ \t]*\((?![^\n]*;[ \t]*$)",
        r"[ \t]+(?:[\w<>\[\],.?*&]+[ \t]+)*(?!\d)(\w+)[ \t]*\([^;\n]*\)[^;\n=)]*\{[ \t]*$",
        r"(?!\d)(\w[\w.]*)[ \t]*(?::[^=\n]+)?=(?!=)",
        r"[ \t]*(?:[\w.]+\.)?(?!\d)(\w+)[ \t]*[:=][ \t]*(?:async[ \t]+)?function\b",
    )
)
_TOP = re.compile(r"(?m)^(?=[^\s)\]}])")
_CONTINUES = re.compile(r"(?:else|elif|except|finally|catch|end|fi|done|esac|then|\{)\b")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file."""

    path: str
    text: str
    names: frozenset[str]  # all names in the text
    defines: frozenset[str]  # names that the text defines


class RelatedFiles:
    """The chosen pieces, from one request to the next."""

    def __init__(self) -> None:
        self._chosen: list[Chunk] = []

    def sections(self) -> list[tuple[str, str]]:
        """Return (path, text) of chosen pieces in prompt order; join neighbors in a file."""
        sections: list[tuple[str, str]] = []
        for chunk in self._chosen:
            if sections and sections[-1][0] == chunk.path:
                sections[-1] = (chunk.path, f"{sections[-1][1]}\n{chunk.text}\n")
            else:
                sections.append((chunk.path, f"{chunk.text}\n"))
        return sections

    def covers(self, files: Sequence[tuple[str, str]], near: dict[str, float]) -> bool:
        """Return True if the best pieces of `files` are among the chosen ones."""
        ranked = rank([chunk for file in files for chunk in chunks_of(*file)], near)
        return all(chunk in self._chosen for chunk in ranked[:_WANTED])

    def update(
        self,
        files: Sequence[tuple[str, str]],
        near: dict[str, float],
        tokens: Callable[[str], int],
        budget: int,
        fresh: int,
        cached: int,
    ) -> None:
        """Choose again, before a prefill of the buffer. Cached pieces stay if they fit.

        files: (path, text), nearest first. near: from `names_near`. tokens: counts a text's tokens.
        budget: maximum tokens. fresh: maximum new tokens. cached: tokens with a cached prefix.
        """
        texts = dict(files)
        kept: list[Chunk] = []
        used = 0
        for chunk in self._chosen:
            used += tokens(chunk.text)
            if used > min(cached, budget) or chunk.text not in texts.get(chunk.path, ""):
                break
            kept.append(chunk)
        ranked = rank([chunk for file in files for chunk in chunks_of(*file)], near)
        best = fitting(ranked, tokens, budget)
        missing = [chunk for chunk in best if chunk not in kept]
        used = sum(tokens(chunk.text) for chunk in kept)
        for chunk in reversed(kept[:]):  # makes room for the best pieces
            if not missing or budget - used >= tokens(missing[0].text):
                break
            if chunk not in best:
                kept.remove(chunk)
                used -= tokens(chunk.text)
        more = fitting(
            [chunk for chunk in ranked if chunk not in kept], tokens, min(budget - used, fresh)
        )
        self._chosen = kept + more[::-1]  # the best piece is nearest to the buffer


def rank(chunks: Sequence[Chunk], near: dict[str, float]) -> list[Chunk]:
    """Return the `chunks` that mention names of `near`, the best first."""
    spread = Counter(name for chunk in chunks for name in near.keys() & chunk.names)
    weights = {
        name: weight * math.log(1 + len(chunks) / spread[name])
        for name, weight in near.items()
        if name in spread
    }
    scored = []
    for order, chunk in enumerate(chunks):
        mentioned = sum(weights[name] for name in weights.keys() & chunk.names)
        defined = sum(weights[name] for name in weights.keys() & chunk.defines)
        score = 4 * defined + mentioned / math.sqrt(8 + len(chunk.names))
        if mentioned:
            scored.append((-score, order, chunk))
    scored.sort(key=lambda each: each[:2])
    return [chunk for _, _, chunk in scored]


def fitting(ranked: Iterable[Chunk], tokens: Callable[[str], int], budget: int) -> list[Chunk]:
    """Return the pieces, in order, that fit `budget` tokens together."""
    found = []
    for chunk in ranked:
        if budget <= 0:
            break
        size = tokens(chunk.text)
        if size <= budget:
            budget -= size
            found.append(chunk)
    return found


def names_near(prefix: str, suffix: str, recent: Sequence[str] = ()) -> dict[str, float]:
    """Return the weights of names around the cursor: higher for near and called names.

    recent: copied, visited or changed texts, the last one first.
    """
    weights: dict[str, float] = {}

    def add(text: str, weight: float) -> None:
        for found in _NAME.finditer(text):
            called = 1.5 if text[found.end() : found.end() + 1] == "(" else 1.0
            name = found.group()
            if name not in _KEYWORDS:
                weights[name] = max(weights.get(name, 0.0), weight * called)

    lines = prefix[-20_000:].rsplit("\n", _BEFORE + 1)
    for distance, line in enumerate(reversed(lines[-_BEFORE:])):
        add(line, 2.0 if distance == 0 else 1 / (1 + distance / 4))
    for line in suffix[:8000].split("\n", _AFTER + 1)[:_AFTER]:
        add(line, 0.3)
    for line in prefix[:_HEAD].split("\n"):
        if _IMPORT.match(line):
            add(line, 0.25)
    for age, text in enumerate(recent):
        add(text[:4000], 0.8 / (1 + age))
    return weights


@lru_cache(_CACHED)
def chunks_of(path: str, text: str) -> tuple[Chunk, ...]:
    """Return the pieces of a file, cut at unindented lines; short ones joined, long ones cut."""
    pieces: list[str] = []
    for piece in _top_pieces(text):
        if pieces and len(pieces[-1]) + len(piece) < _SHORT:
            pieces[-1] += piece
        elif len(piece) <= _LONG:
            pieces.append(piece)
        else:
            pieces += _cut(piece)
    return tuple(
        Chunk(path, content, frozenset(_NAME.findall(content)), frozenset(defined_names(content)))
        for piece in pieces
        if (content := piece.strip("\n"))
    )


def defined_names(text: str) -> set[str]:
    """Return the unqualified names that `text` seems to define, in common languages."""
    found = set()
    for match in chain.from_iterable(each.finditer(text) for each in _DEFINITIONS):
        name = re.split(r"[.:]+", match.group(1).rstrip(".:"))[-1]
        if name and name not in _KEYWORDS:
            found.add(name)
    return found


def _top_pieces(text: str) -> list[str]:
    """Cut `text` before unindented lines that follow an empty or an indented line."""
    starts = [0]
    for found in _TOP.finditer(text):
        at = found.start()
        above = text[text.rfind("\n", 0, max(0, at - 1)) + 1 : max(0, at - 1)]
        if at and (not above.strip() or above[0] in " \t") and not _CONTINUES.match(text, at):
            starts.append(at)
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def _cut(piece: str) -> list[str]:
    """Cut a long piece at empty lines; each part starts with the first line of the piece."""
    head, _, body = piece.partition("\n")
    parts, part = [], ""
    for block in re.split(r"\n(?=[ \t]*\n)", body):
        if part and len(part) + len(block) > _LONG // 2:
            parts.append(part)
            part = ""
        part += block[:_LONG] + "\n"
    return [f"{head}\n{part}" for part in [*parts, part]]
