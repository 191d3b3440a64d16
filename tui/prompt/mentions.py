"""What the @names in the prompt box mean, as one types: which are files, and how long those are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.tui.prompt.attachments import find, looks_like_a_file, mention_spans, tokens_of


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """The names in a prompt that are files or directories, each with its size in tokens, estimated.
    directory: where they are looked for."""

    directory: Path
    tokens: Mapping[str, int]

    def with_names(self, names: Sequence[str]) -> NamedFiles:
        """Looks `names` up; call it in another thread."""
        tokens = {}
        for name in names:
            if (found := find(name, self.directory)) is not None:
                tokens[name] = tokens_of(found[1])
        return NamedFiles(self.directory, tokens)

    def describe(self) -> str:
        """How many there are, and how much they add to the prompt; "" for none."""
        count, tokens = len(self.tokens), sum(self.tokens.values())
        files = "1 file" if count == 1 else f"{count} files"
        return f"{files}, about {tokens:,} tokens" if count else ""

    def spans(self, line: str) -> list[tuple[int, int, bool]]:
        """Where in a line names are, and whether they are found; words that need be no file are
        left out."""
        return [
            (start, end, name in self.tokens)
            for start, end, name in mention_spans(line)
            if name in self.tokens or looks_like_a_file(name)
        ]


class PastedTexts:
    """Long pasted texts, which stand in the box as `[pasted 5,000 lines]`."""

    LINES, CHARACTERS = 12, 3000  # as much stays as it is
    _CHIP = re.compile(r"\[pasted [\d,]+ (?:lines|characters)(?: #\d+)?\]")

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """What stands for a pasted text in the box: itself where it is short."""
        lines = text.count("\n") + 1
        if lines <= self.LINES and len(text) <= self.CHARACTERS:
            return text
        words = f"{lines:,} lines" if lines > self.LINES else f"{len(text):,} characters"
        chip, number = f"[pasted {words}]", 1
        while self._texts.get(chip, text) != text:
            number += 1
            chip = f"[pasted {words} #{number}]"
        self._texts[chip] = text
        return chip

    def unfold(self, text: str) -> str:
        """The text with what was pasted in it."""
        return self._CHIP.sub(lambda chip: self._texts.get(chip[0], chip[0]), text)

    def before(self, text: str) -> str | None:
        """The chip at the very end of `text`, None for none."""
        return next((chip for chip in self._texts if text.endswith(chip)), None)
