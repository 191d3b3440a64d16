"""A conversation as plain data: who said what, how it was decoded, how it ended.

Owns the history that goes to the model and the spans that the drafting view colours. Knows nothing
of widgets, and keeps text as the model said it; `text.displayable` is for those who show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from akunu_py.types import FinishReason, Message, Stats

TurnState = Literal["waiting", "reading", "answering", "done", "failed"]
Span = tuple[int, int]


@dataclass(slots=True)
class Turn:
    """A prompt and its answer.

    spans: half-open ranges into `answer` that were accepted draft tokens, in order.
    finish: None until the answer ended, and for an answer that failed.
    """

    number: int
    prompt: str
    answer: str = ""
    spans: list[Span] = field(default_factory=list)
    state: TurnState = "waiting"
    finish: FinishReason | None = None
    stats: Stats | None = None

    def add(self, text: str, drafted: tuple[Span, ...]) -> None:
        """Appends a piece of the answer; `drafted` are ranges into `text`."""
        offset = len(self.answer)
        self.answer += text
        add_spans(self.spans, drafted, offset)

    @property
    def answered(self) -> bool:
        """Whether it belongs to the history: something was said, or the model chose silence."""
        return bool(self.answer) or self.finish == "stop"


@dataclass(slots=True)
class Conversation:
    """The turns so far."""

    turns: list[Turn] = field(default_factory=list)

    def history(self, until: Turn) -> list[Message]:
        """What the model reads to answer `until`: all answered turns before it, and its prompt."""
        messages: list[Message] = []
        for turn in self.turns:
            if turn is until:
                break
            if turn.answered:
                messages.append(Message("user", turn.prompt))
                messages.append(Message("assistant", turn.answer))
        return [*messages, Message("user", until.prompt)]


def add_spans(spans: list[Span], drafted: tuple[Span, ...], offset: int) -> None:
    """Appends ranges, moved by `offset`, to `spans`; ranges that touch become one."""
    for start, end in drafted:
        if spans and spans[-1][1] == start + offset:
            spans[-1] = (spans[-1][0], end + offset)
        else:
            spans.append((start + offset, end + offset))
