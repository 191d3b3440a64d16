"""Answers in channels, as gpt-oss writes them (the harmony format).

An answer is several messages, each with a header: `<|channel|>analysis<|message|>` before what the
model thinks, `<|channel|>final<|message|>` before what it says, and in the header of a call the
function as its recipient. Source: OpenAI, "OpenAI Harmony Response Format" (2025).
"""

from __future__ import annotations

from typing import Any

from akunu_py.decoding.stop_sequences import Finder, Kind, TextRun, joined

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_FIRST = ("<|channel|>", " to=", _START)
MARKERS = (_START, "<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)


def is_harmony(tokenizer: Any) -> bool:
    """Whether a model writes in channels."""
    find = tokenizer.backend_tokenizer.token_to_id
    return all(find(text) is not None for text in (_START, "<|channel|>", _MESSAGE))


class ChannelSplitter:
    """Separates thinking from the answer, as `ThinkingSplitter` does; a call stays as it was
    written, from `<|start|>` on, for who parses it."""

    def __init__(self) -> None:
        self._header: list[str] | None = []
        self._first: list[TextRun] | None = []  # until it is certain that there is a header
        self._kind: Kind = "answer"
        self._finder = self._next_finder()

    def add(self, text: str, drafted: bool = False) -> list[TextRun]:
        """What `text` made certain, in order, each run with its kind."""
        if self._first is not None:
            self._first.append(TextRun(text, drafted))
            return self._begin()
        runs: list[TextRun] = []
        position = 0
        while position < len(text):
            found, position = self._finder.read(text, drafted, position)
            runs += self._taken(found)
            if self._finder.found is not None:
                runs += self._turn()
        return joined(runs)

    def finish(self) -> list[TextRun]:
        """What is still held back at the end of the text."""
        runs = self._begin(certain=True)
        runs += self._taken(self._finder.take_held())
        if self._header is not None and (header := "".join(self._header).strip()):
            runs.append(TextRun(header))
            self._header = []
        return joined(runs)

    def _begin(self, *, certain: bool = False) -> list[TextRun]:
        """An answer without any header, as a grammar may force one, is as it is."""
        if self._first is None:
            return []
        text = "".join(run.text for run in self._first)
        if not certain and any(each.startswith(text) for each in _FIRST):
            return []
        if not text.startswith(_FIRST):
            self._header, self._finder = None, Finder(_ENDS)
        held, self._first = self._first, None
        return [made for run in held for made in self.add(run.text, run.drafted)]

    def _taken(self, found: list[TextRun]) -> list[TextRun]:
        if self._header is None:
            return [TextRun(run.text, run.drafted, self._kind) for run in found]
        self._header += [run.text for run in found]
        return []

    def _turn(self) -> list[TextRun]:
        """From a header to its message, or from that to the next header."""
        runs: list[TextRun] = []
        if self._header is None:
            self._header = []
        else:
            header = "".join(self._header)
            self._header, self._kind = None, "answer"
            if "to=functions." in header:
                header = header.removeprefix(_START).removeprefix("assistant")
                runs = [TextRun(f"{_START}assistant{header}{_MESSAGE}")]
            elif "<|channel|>analysis" in header:
                self._kind = "thinking"
        self._finder = self._next_finder()
        return runs

    def _next_finder(self) -> Finder:
        return Finder(_ENDS if self._header is None else [_MESSAGE])
