"""Reasoning, recognised by the model's markers and separated from the answer.

Stop sequences apply to the answer only: the text passes through `ThinkingSplitter` first, then its
answer runs, but not the thinking, through `StopText`. A block opens only before the answer has
begun, since one who explains a marker must not have the rest of the answer folded away; so
thinking always comes before the answer, and the order of the text is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from akunu_py.decoding.text.stop_sequences import Finder, TextRun, joined

_NEWLINES = "\r\n"
_PROMPT_END = 16  # tokens; enough for a marker and the newlines behind it

Markers = tuple[str, str]


def thinking_markers(tokenizer: Any) -> Markers | None:
    """What opens and what closes reasoning, from mlx-lm's TokenizerWrapper; None without any."""
    if not getattr(tokenizer, "has_thinking", False):
        return None
    return str(tokenizer.think_start), str(tokenizer.think_end)


def special_marker_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens of the markers that decoding without special tokens drops, with their text.

    Where a model has any, its detokenized text lacks the markers unless this text is put there.
    """
    if thinking_markers(tokenizer) is None:
        return {}
    return _special(tokenizer, {*tokenizer.think_start_tokens, *tokenizer.think_end_tokens})


def special_tokens_in(tokenizer: Any, texts: Sequence[str]) -> dict[int, str]:
    """The tokens of `texts` that decoding without special tokens drops, with their text."""
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return _special(tokenizer, {int(token) for tokens in encoded for token in tokens})


def _special(tokenizer: Any, tokens: set[int]) -> dict[int, str]:
    return {
        int(token): str(tokenizer.decode([token], skip_special_tokens=False))
        for token in sorted(tokens)
        if not tokenizer.decode([token], skip_special_tokens=True)
    }


def opens_thinking(prompt_text: str, markers: Markers | None) -> bool:
    """Whether what follows the prompt is thinking, because it ends with the opening marker.

    prompt_text: the rendered prompt, or its end, with its special tokens.
    """
    return markers is not None and prompt_text.rstrip().endswith(markers[0])


def prompt_opens_thinking(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """`opens_thinking` for a prompt in token ids."""
    end = tokenizer.decode(list(prompt[-_PROMPT_END:]), skip_special_tokens=False)
    return opens_thinking(end, thinking_markers(tokenizer))


class ThinkingSplitter:
    """Separates thinking from the answer in a stream of text, as early as is certain.

    Markers are left out, with the newlines directly after them and the whitespace before an
    opening one. A closing marker without an open block and an opening one after the beginning of
    the answer or inside a block are text. A block that is never closed is thinking to the end.
    """

    def __init__(self, start: str | None, end: str | None, *, inside: bool) -> None:
        """inside: whether the prompt opened the block. Without markers everything is answer."""
        self._start, self._end = start or "", end or ""
        self._thinking = inside
        self._trim = inside  # whether newlines are left out until other text comes
        self._blank: list[TextRun] = []  # whitespace before the answer or an opening marker
        self._finder: Finder | None = None  # None: only answer from here on
        if start and end:
            self._finder = Finder([self._end if inside else self._start])

    def add(self, text: str, drafted: bool = False) -> list[TextRun]:
        """What `text` made certain, in order, each run with its kind."""
        runs: list[TextRun] = []
        position = 0
        while self._finder and position < len(text):
            if self._trim and text[position] in _NEWLINES:
                position += 1
                continue
            self._trim = False
            found, position = self._finder.read(text, drafted, position)
            runs += self._think(found) if self._thinking else self._open(found)
        runs.append(TextRun(text[position:], drafted))
        return joined(runs)

    def finish(self) -> list[TextRun]:
        """What is still held back at the end of the text."""
        if self._finder is None:
            return []
        held = self._finder.take_held()
        self._finder = None
        return _thinking(held) if self._thinking else joined([*self._blank, *held])

    def _think(self, found: list[TextRun]) -> list[TextRun]:
        """Inside a block: its text, up to the closing marker."""
        assert self._finder is not None
        if self._finder.found is not None:
            self._turn(thinking=False)
        return _thinking(found)

    def _open(self, found: list[TextRun]) -> list[TextRun]:
        """Before the answer: nothing, until it begins or a block opens."""
        assert self._finder is not None
        self._blank += found
        if any(not run.text.isspace() for run in found):
            return self.finish()
        if self._finder.found is not None:
            self._blank = []
            self._turn(thinking=True)
        return []

    def _turn(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._trim = True
        self._finder = Finder([self._end if thinking else self._start])


def _thinking(runs: list[TextRun]) -> list[TextRun]:
    return [replace(run, kind="thinking") for run in runs]
