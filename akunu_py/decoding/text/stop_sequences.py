"""Stop sequences: an answer ends before the first of some literal texts, however it was cut up.

`Finder` searches a stream of text for literals, for `thinking` as well, and keeps track of which
characters came from drafts. Text in, text out: nothing here knows tokens.
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
    """Text of one origin and one kind. drafted: whether it came from accepted draft tokens."""

    text: str
    drafted: bool = False
    kind: Kind = "answer"


class StopText:
    """Gives out a text up to the first stop sequence in it, as early as is certain.

    The sequence that is complete first wins, so of two of which one begins the other the shorter
    one; of those that are complete at the same character, the longest. Neither the sequence nor
    what follows is given out. Sequences are compared code point by code point. Linear time in the
    text and in the sequences.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Without any stops all text is given out at once. Raises UsageError for an empty one."""
        if "" in stops:
            raise UsageError("a stop sequence needs at least one character, got an empty one")
        self._finder = Finder(stops) if stops else None

    @property
    def found(self) -> str | None:
        """The stop sequence that ended the text, None as long as none did."""
        return self._finder.found if self._finder else None

    def add(self, text: str, drafted: bool = False) -> list[TextRun]:
        """What `text` made certain to be no part of a stop sequence; nothing after a match."""
        if self._finder is None:
            return [TextRun(text, drafted)] if text else []
        return self._finder.read(text, drafted)[0] if self.found is None else []

    def finish(self) -> list[TextRun]:
        """What is still held back, where the text ends otherwise; nothing after a match."""
        return self._finder.take_held() if self._finder and self.found is None else []


class Finder:
    """Finds, in a stream of text, which of some literals is complete first.

    Held back is the longest end of the text so far that begins a literal, no more and no less.
    Source: Aho and Corasick, "Efficient string matching" (1975).
    """

    def __init__(self, literals: Iterable[str]) -> None:
        """`literals`: none of them empty."""
        # Each node stands for a beginning of a literal; node 0 for the empty one.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._complete: list[str | None] = [None]  # the longest literal that ends in this node
        for literal in literals:
            self._insert(literal)
        self._fail = self._link()
        self._node = 0
        self._held: deque[TextRun] = deque()
        self._skip = 0  # characters of the first held run that were taken
        self._length = 0  # characters held
        self.found: str | None = None

    def read(self, text: str, drafted: bool, begin: int = 0) -> tuple[list[TextRun], int]:
        """Reads text[begin:] up to the end of the first literal that becomes complete.

        Gives the text that is certain to be no part of it, and the index after what was read. With
        `found` set the literal itself is held, for `take_held`, and no more can be read.
        """
        assert self.found is None
        node, end = self._node, len(text)
        for index in range(begin, end):
            character = text[index]
            while node and character not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(character, 0)
            if self._complete[node] is not None:
                self.found, end = self._complete[node], index + 1
                break
        self._node = node
        if begin < end:
            self._held.append(TextRun(text[begin:end], drafted))
            self._length += end - begin
        keep = self._depth[node] if self.found is None else len(self.found)
        return self._take(self._length - keep), end

    def take_held(self) -> list[TextRun]:
        """What was held back: the beginning of a literal, or the whole one that was found."""
        self._node = 0
        return self._take(self._length)

    def _insert(self, literal: str) -> None:
        node = 0
        for character in literal:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._complete.append(None)
            node = self._next[node][character]
        self._complete[node] = literal

    def _link(self) -> list[int]:
        """For each node the one to continue from where it has no next: its longest proper end."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            if self._complete[node] is None:
                self._complete[node] = self._complete[fail[node]]
            for character, child in self._next[node].items():
                end = fail[node]
                while end and character not in self._next[end]:
                    end = fail[end]
                fail[child] = self._next[end].get(character, 0)
                queue.append(child)
        return fail

    def _take(self, count: int) -> list[TextRun]:
        """The first `count` of the characters held."""
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


def joined(runs: Iterable[TextRun]) -> list[TextRun]:
    """The same text in as few runs as possible, none of them empty."""
    groups = groupby((run for run in runs if run.text), lambda run: (run.drafted, run.kind))
    return [TextRun("".join(run.text for run in group), *key) for key, group in groups]
