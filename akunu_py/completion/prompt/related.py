"""What of other files the model reads: pieces that define or mention what stands at the cursor.

Files are cut where something begins in the first column. Names near the cursor, weighed by how near
and how rare they are, rank the pieces; a piece that defines one counts most. What was chosen stays,
in its order and with its text, as long as the model would have to read again for a better choice:
other files come first in a prompt, and what was read of them stays in the KV cache.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

_BEFORE, _AFTER = 30, 8  # lines around the cursor whose names count
_HEAD = 4000  # characters of the buffer's beginning: what is imported there may be used
_SHORT, _LONG = 300, 2500  # characters of a piece
_WANTED = 3  # pieces that are worth reading the buffer again, when nobody waits
_NAME = re.compile(r"[A-Za-z_]\w{2,}")
_IMPORT = re.compile(r"\s*(?:import|from|use|using|require|include|#include|export .*\bfrom)\b")
_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "and char class const def elif else end for from function if import int let new not public "
        "private return self static string switch this true false null None True False var void "
        "while with",
    )
)
# By a keyword; in C, Java, ... by a type; a method with a brace; a value; a function as a value.
_DEFINITIONS = tuple(
    re.compile("(?m)^" + pattern)
    for pattern in (
        r"[ \t]*(?:[\w@<>\[\]*&:,.()]+[ \t]+)*?"
        r"(?:def|class|function|func|fn|fun|struct|interface|trait|enum|type|module|namespace|record"
        r"|protocol|extension|object|const|let|var|val|sub|macro_rules!|\#[ \t]*define)\s+"
        r"(?:\([^)\n]*\)\s*)?([A-Za-z_$][\w.:$]*)",
        r"(?:[\w*&<>:,~\[\]]+[ \t*&]+)+([A-Za-z_]\w*)[ \t]*\((?![^\n]*;[ \t]*$)",
        r"[ \t]+(?:[\w<>\[\],.?*&]+[ \t]+)*([A-Za-z_]\w*)[ \t]*\([^;\n]*\)[^;\n=]*\{[ \t]*$",
        r"([A-Za-z_][\w.]*)[ \t]*(?::[^=\n]+)?=(?!=)",
        r"[ \t]*(?:[\w.]+\.)?([A-Za-z_]\w*)[ \t]*[:=][ \t]*(?:async[ \t]+)?function\b",
    )
)
_TOP = re.compile(r"(?m)^(?=[^\s)\]}])")
_CONTINUES = re.compile(r"(?:else|elif|except|finally|catch|end|fi|done|esac|then|\{)\b")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file. names: all in it. defines: those that it defines."""

    path: str
    text: str
    names: frozenset[str]
    defines: frozenset[str]


class RelatedFiles:
    """The chosen pieces, from one request to the next."""

    def __init__(self) -> None:
        self._chosen: list[Chunk] = []

    def chosen(self) -> list[tuple[str, str]]:
        """(path, text) of what the model reads, in the order of the prompt."""
        sections: list[tuple[str, str]] = []
        for chunk in self._chosen:
            if sections and sections[-1][0] == chunk.path:
                sections[-1] = (chunk.path, f"{sections[-1][1]}\n{chunk.text}\n")
            else:
                sections.append((chunk.path, f"{chunk.text}\n"))
        return sections

    def has(self, files: Sequence[tuple[str, str]], near: dict[str, float]) -> bool:
        """Whether the best pieces of `files` are among the chosen."""
        chunks = [chunk for path, text in files for chunk in chunks_of(path, text)]
        best = rank(chunks, near)[:_WANTED]
        return all(chunk in self._chosen for chunk in best)

    def choose(
        self,
        files: Sequence[tuple[str, str]],
        near: dict[str, float],
        tokens: Callable[[str], int],
        budget: int,
        fresh: int,
        read: int,
    ) -> None:
        """Chooses again, for when what stands behind the files has to be read again anyway.

        files: (path, text), the nearest first. near: `names_near` the cursor. tokens: how many a
        text has. budget: tokens of all pieces. fresh: of those that are not read yet. read: tokens
        that the model has read of the pieces chosen before, which stay if they fit.
        """
        texts = dict(files)
        kept: list[Chunk] = []
        used = 0
        for chunk in self._chosen:
            used += tokens(chunk.text)
            if used > min(read, budget) or chunk.text not in texts.get(chunk.path, ""):
                break
            kept.append(chunk)
        ranked = rank([chunk for path, text in files for chunk in chunks_of(path, text)], near)
        best = fitting(ranked, tokens, budget)
        missing = [chunk for chunk in best if chunk not in kept]
        used = sum(tokens(chunk.text) for chunk in kept)
        for chunk in reversed(kept[:]):  # what is worth less makes room for the best
            if not missing or budget - used >= tokens(missing[0].text):
                break
            if chunk not in best:
                kept.remove(chunk)
                used -= tokens(chunk.text)
        more = fitting(
            [chunk for chunk in ranked if chunk not in kept], tokens, min(budget - used, fresh)
        )
        self._chosen = kept + more[::-1]  # the best stands next to the buffer


def rank(chunks: Sequence[Chunk], near: dict[str, float]) -> list[Chunk]:
    """Those of `chunks` that have to do with `near`, the best first."""
    spread = Counter(name for chunk in chunks for name in chunk.names)
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
    """The first of `ranked` that fit `budget` together."""
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
    """The names around a cursor with their weights: more where nearer, called, or in its line.

    recent: texts that were copied, jumped to or changed, the last one first.
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


@lru_cache(64)
def chunks_of(path: str, text: str) -> tuple[Chunk, ...]:
    """The pieces of a file: what begins in the first column, short ones together, long ones cut."""
    pieces: list[str] = []
    for piece in _top_pieces(text):
        if pieces and len(pieces[-1]) + len(piece) < _SHORT:
            pieces[-1] += piece
        elif len(piece) <= _LONG:
            pieces.append(piece)
        else:
            pieces += _cut(piece)
    return tuple(
        Chunk(path, content, frozenset(_NAME.findall(content)), frozenset(defined(content)))
        for piece in pieces
        if (content := piece.strip("\n"))
    )


def defined(text: str) -> set[str]:
    """The names that `text` defines, as far as one can tell in any language."""
    found = set()
    for match in chain.from_iterable(each.finditer(text) for each in _DEFINITIONS):
        name = re.split(r"[.:]+", match.group(1).rstrip(".:"))[-1]
        if name and name not in _KEYWORDS:
            found.add(name)
    return found


def _top_pieces(text: str) -> list[str]:
    """`text` cut before lines of the first column that follow an empty or a deeper line."""
    starts = [0]
    for found in _TOP.finditer(text):
        at = found.start()
        above = text[text.rfind("\n", 0, max(0, at - 1)) + 1 : max(0, at - 1)]
        if at and (not above.strip() or above[0] in " \t") and not _CONTINUES.match(text, at):
            starts.append(at)
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def _cut(piece: str) -> list[str]:
    """A long piece cut at its shallowest empty lines; each part begins with the first line."""
    head, _, body = piece.partition("\n")
    parts, part = [], ""
    blocks = re.split(r"\n(?=[ \t]*\n)", body)
    for block in blocks:
        if part and len(part) + len(block) > _LONG // 2:
            parts.append(part)
            part = ""
        part += block[:_LONG] + "\n"
    return [f"{head}\n{part}" for part in [*parts, part]]
