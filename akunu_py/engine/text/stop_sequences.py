"""Stop sequences: an answer ends before the first of some literal texts.

`Finder`, which `thinking` also uses, searches a stream of text for literals and keeps track of the
characters from drafts.
"""

import re
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


class Finder:
    """Finds the first of some non-empty literals to complete in a stream of text.

    Holds back the longest end of the text that begins a literal.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = tuple(literals)
        self._text = self._drafted = ""  # held back; "1" for each drafted character
        self.found: str | None = None

    def search(self, text: str, drafted: bool = False, begin: int = 0) -> tuple[list[TextRun], int]:
        """Search text[begin:] up to the end of the first complete literal.

        Returns the text before any possible match, and the end index of the searched text.
        Once `found` is set, `flush` returns the literal, and `search` must not be called.
        """
        assert self.found is None
        known, self._text = len(self._text), self._text + text[begin:]
        places = ((self._text.find(each), each) for each in self._literals)
        if ends := [(at + len(each), -len(each), each) for at, each in places if at >= 0]:
            end, _, self.found = min(ends)
            self._text = self._text[:end]
        fresh = len(self._text) - known
        self._drafted += ("1" if drafted else "0") * fresh
        keep = len(self.found or "") or partial_match_length(self._text, self._literals)
        return self._release(len(self._text) - keep), begin + fresh

    def flush(self) -> list[TextRun]:
        """Release the withheld text: the beginning of a literal, or the found literal."""
        return self._release(len(self._text))

    def _release(self, count: int) -> list[TextRun]:
        """Return the first `count` characters that are held back."""
        text, drafted = self._text[:count], self._drafted[:count]
        self._text, self._drafted = self._text[count:], self._drafted[count:]
        runs = (match.span() for match in re.finditer("0+|1+", drafted))
        return [TextRun(text[start:end], drafted[start] == "1") for start, end in runs]


class StopText(Finder):
    """Streams text up to the first stop sequence, as early as is certain.

    The sequence that is complete first wins; of several at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Without stops all text passes at once. Raises UsageError for an empty stop."""
        if "" in stops:
            raise UsageError("a stop sequence needs at least one character, got an empty one")
        super().__init__(stops)

    def add(self, text: str, drafted: bool = False) -> list[TextRun]:
        """Return the text that is certain to be no part of a stop sequence."""
        return self.search(text, drafted)[0] if self.found is None else []

    def finish(self) -> list[TextRun]:
        """Return the text held back at the end; nothing after a match."""
        return self.flush() if self.found is None else []


def partial_match_length(text: str, literals: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` may begin one of `literals`."""
    most = min(len(text), max(map(len, literals), default=1) - 1)
    lengths = range(most, 0, -1)
    return next((n for n in lengths if any(each.startswith(text[-n:]) for each in literals)), 0)


def merge_runs(runs: Iterable[TextRun]) -> list[TextRun]:
    """Merge adjacent runs of the same origin and kind, and drop empty ones."""
    groups = groupby((run for run in runs if run.text), lambda run: (run.drafted, run.kind))
    return [TextRun("".join(run.text for run in group), *key) for key, group in groups]
