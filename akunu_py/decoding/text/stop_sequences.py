"""Stop sequences: an answer ends before the first of some literal texts.

`Finder`, which `thinking` also uses, searches a stream of text for literals and keeps track of the
characters from drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from akunu_py.errors import UsageError

Kind = Literal["answer", "thinking"]


@dataclass(frozen=True, slots=True)
class TextRun:
    """Text of one origin and one kind."""

    text: str
    drafted: bool = False  # whether it came from accepted draft tokens
    kind: Kind = "answer"


class StopText:
    """Streams text up to the first stop sequence, as early as is certain.

    The sequence that is complete first wins; of several at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Without stops all text passes at once. Raises UsageError for an empty stop."""
        if "" in stops:
            raise UsageError("a stop sequence needs at least one character, got an empty one")
        self._finder = Finder(stops) if stops else None

    @property
    def found(self) -> str | None:
        """The stop sequence that ended the text, None if none did."""
        return self._finder.found if self._finder else None

    def add(self, text: str, drafted: bool = False) -> list[TextRun]:
        """Return the text that is certain to be no part of a stop sequence."""
        if self._finder is None:
            return [TextRun(text, drafted)] if text else []
        return self._finder.read(text, drafted)[0] if self.found is None else []

    def finish(self) -> list[TextRun]:
        """Return the text held back at the end; nothing after a match."""
        return self._finder.take_held() if self._finder and self.found is None else []


class Finder:
    """Finds the first of some non-empty literals to complete in a stream of text.

    Holds back the longest end of the text that begins a literal. Linear time for each literal.
    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings" (1977).
    """

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = [(literal, _fallbacks(literal)) for literal in literals]
        self._matched = [0] * len(self._literals)  # characters of each literal
        self._held: deque[TextRun] = deque()
        self._skip = 0  # characters of the first run held that are no longer held
        self._length = 0  # characters held
        self.found: str | None = None

    def read(self, text: str, drafted: bool = False, begin: int = 0) -> tuple[list[TextRun], int]:
        """Read text[begin:] up to the end of the first complete literal.

        Returns the text that is certain to be no part of it, and the index behind the read text.
        Once `found` is set, `take_held` returns the literal, and no more can be read.
        """
        assert self.found is None
        end = len(text)
        for index in range(begin, end):
            complete = [
                literal
                for at, (literal, fallbacks) in enumerate(self._literals)
                if self._advance(at, literal, fallbacks, text[index])
            ]
            if complete:
                self.found, end = max(complete, key=len), index + 1
                break
        if begin < end:
            self._held.append(TextRun(text[begin:end], drafted))
            self._length += end - begin
        keep = max(self._matched, default=0) if self.found is None else len(self.found)
        return self._take(self._length - keep), end

    def take_held(self) -> list[TextRun]:
        """Return the text held back: the beginning of a literal, or the found literal."""
        self._matched = [0] * len(self._literals)
        return self._take(self._length)

    def _advance(self, at: int, literal: str, fallbacks: list[int], character: str) -> bool:
        """Match one more character of a literal; return whether the literal is complete."""
        matched = self._matched[at]
        while matched and literal[matched] != character:
            matched = fallbacks[matched - 1]
        matched += literal[matched] == character
        self._matched[at] = matched
        return matched == len(literal)

    def _take(self, count: int) -> list[TextRun]:
        """Return the first `count` of the characters held."""
        self._length -= count
        taken = []
        while count:
            run = self._held[0]
            end = min(self._skip + count, len(run.text))
            taken.append(TextRun(run.text[self._skip : end], run.drafted))
            count -= end - self._skip
            self._skip = end
            if end == len(run.text):
                self._held.popleft()
                self._skip = 0
        return joined(taken)


def _fallbacks(literal: str) -> list[int]:
    """Return the KMP failure function: for each prefix, the length of its longest border."""
    fallbacks, length = [0], 0
    for character in literal[1:]:
        while length and literal[length] != character:
            length = fallbacks[length - 1]
        length += literal[length] == character
        fallbacks.append(length)
    return fallbacks


def joined(runs: Iterable[TextRun]) -> list[TextRun]:
    """Merge adjacent runs of the same origin and kind, and drop empty ones."""
    groups = groupby((run for run in runs if run.text), lambda run: (run.drafted, run.kind))
    return [TextRun("".join(run.text for run in group), *key) for key, group in groups]
