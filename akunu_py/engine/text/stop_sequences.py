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


class Finder:
    """Finds the first of some non-empty literals to complete in a stream of text.

    Holds back the longest end of the text that begins a literal. Linear time for each literal.
    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings" (1977).
    """

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = [(literal, _failure_function(literal)) for literal in literals]
        self._matched = [0] * len(self._literals)  # characters of each literal
        self._buffer: deque[TextRun] = deque()
        self._skip = 0  # characters of the first buffered run that were returned
        self._length = 0  # buffered characters
        self.found: str | None = None

    def search(self, text: str, drafted: bool = False, begin: int = 0) -> tuple[list[TextRun], int]:
        """Search text[begin:] up to the end of the first complete literal.

        Returns the text before any possible match, and the end index of the searched text.
        Once `found` is set, `flush` returns the literal, and `search` must not be called.
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
            self._buffer.append(TextRun(text[begin:end], drafted))
            self._length += end - begin
        keep = max(self._matched, default=0) if self.found is None else len(self.found)
        return self._release(self._length - keep), end

    def flush(self) -> list[TextRun]:
        """Release the withheld text: the beginning of a literal, or the found literal."""
        self._matched = [0] * len(self._literals)
        return self._release(self._length)

    def _advance(self, at: int, literal: str, fallbacks: list[int], character: str) -> bool:
        """Match one more character of a literal; return whether the literal is complete.

        at: the literal's index in `_matched`. fallbacks: its failure function (Knuth et al., 1977).
        """
        matched = self._matched[at]
        while matched and literal[matched] != character:
            matched = fallbacks[matched - 1]
        matched += literal[matched] == character
        self._matched[at] = matched
        return matched == len(literal)

    def _release(self, count: int) -> list[TextRun]:
        """Return the first `count` buffered characters."""
        self._length -= count
        runs = []
        while count:
            run = self._buffer[0]
            end = min(self._skip + count, len(run.text))
            runs.append(TextRun(run.text[self._skip : end], run.drafted))
            count -= end - self._skip
            self._skip = end
            if end == len(run.text):
                self._buffer.popleft()
                self._skip = 0
        return merge_runs(runs)


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


def _failure_function(literal: str) -> list[int]:
    """Return the KMP failure function: for each prefix, the length of its longest border."""
    fallbacks, length = [0], 0
    for character in literal[1:]:
        while length and literal[length] != character:
            length = fallbacks[length - 1]
        length += literal[length] == character
        fallbacks.append(length)
    return fallbacks


def merge_runs(runs: Iterable[TextRun]) -> list[TextRun]:
    """Merge adjacent runs of the same origin and kind, and drop empty ones."""
    groups = groupby((run for run in runs if run.text), lambda run: (run.drafted, run.kind))
    return [TextRun("".join(run.text for run in group), *key) for key, group in groups]
