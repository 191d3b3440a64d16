"""Answers in channels: several messages, each with a header that says what it is.

gpt-oss (the harmony format) writes `<|channel|>analysis<|message|>` before what it thinks,
`<|channel|>final<|message|>` before what it says, and in the header of a call the function as its
recipient. Muse Spark names the recipient of each: itself, the user, a tool. Sources: OpenAI,
"OpenAI Harmony Response Format" (2025); mlx-lm, chat_templates/muse_spark.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from akunu_py.decoding.text.stop_sequences import Finder, Kind, TextRun, joined

_START, _MESSAGE = "<|start|>", "<|message|>"


@dataclass(frozen=True, slots=True)
class Channels:
    """begins: with what a header may. ends: of a message. thinking, call: what the header of such a
    message holds. markers: all that may be special tokens."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    thinking: str
    call: str | None
    markers: tuple[str, ...]


HARMONY = Channels(
    begins=("<|channel|>", " to=", _START),
    ends=("<|end|>", "<|call|>", "<|return|>"),
    thinking="<|channel|>analysis",
    call="to=functions.",
    markers=("<|channel|>", "<|constrain|>"),
)
MUSE = Channels(
    begins=("to=", " to=", _START),
    ends=("<|eom|>", "<|eot|>"),
    thinking="to=self",
    call=None,  # in markup, which says it all
    markers=(),
)


def channels_of(tokenizer: Any) -> Channels | None:
    """How a model writes in channels; None where it does not."""
    find = tokenizer.backend_tokenizer.token_to_id
    if find(_MESSAGE) is None or find(_START) is None:
        return None
    if find("<|channel|>") is not None:
        return HARMONY
    return MUSE if getattr(tokenizer, "response_transitions", None) else None


def markers_of(channels: Channels) -> tuple[str, ...]:
    """The texts that the splitter must see, though they may be special tokens."""
    return (_START, _MESSAGE, *channels.ends, *channels.markers)


class ChannelSplitter:
    """Separates thinking from the answer, as `ThinkingSplitter` does; a call stays as it was
    written, from `<|start|>` on, for who parses it."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
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
        if self._header is not None:
            header = "".join(self._header)
            self._header = []
            if not any(each.startswith(header[: len(each)]) for each in self._channels.begins):
                runs.append(TextRun(header))
        return joined(runs)

    def _begin(self, *, certain: bool = False) -> list[TextRun]:
        """An answer without any header, as a grammar may force one, is as it is."""
        if self._first is None:
            return []
        text = "".join(run.text for run in self._first)
        if not certain and any(each.startswith(text) for each in self._channels.begins):
            return []
        if not text.startswith(self._channels.begins):
            self._header, self._finder = None, Finder(self._channels.ends)
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
            if self._channels.call and self._channels.call in header:
                header = header.removeprefix(_START).removeprefix("assistant")
                runs = [TextRun(f"{_START}assistant{header}{_MESSAGE}")]
            elif self._channels.thinking in header:
                self._kind = "thinking"
        self._finder = self._next_finder()
        return runs

    def _next_finder(self) -> Finder:
        return Finder(self._channels.ends if self._header is None else [_MESSAGE])
