"""Events of one request, in the order in which they occur, and facts about its model.

PrefillProgress comes during the prefill, PromptProcessed after it, then the answer. Finished or
Failed comes last, once. A tool call is one ToolCallStarted, any number of ToolCallArguments, and
one ToolCallFinished.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from akunu_py.types import FinishReason, Stats, TokenLogprobs

Span = tuple[int, int]  # half-open range of characters
Rejected = tuple[int, str]  # the position of a rejected draft in a text, and the draft's text


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Progress of the prefill."""

    done: int  # prompt tokens processed
    total: int


@dataclass(frozen=True, slots=True)
class PromptProcessed:
    """The prompt is processed."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that needed no prefill


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More of the model's thinking before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer. A delta with the details of a decode step may have no text."""

    text: str
    # For akunu's own clients:
    drafted: tuple[Span, ...] = ()  # ranges of `text` from accepted drafts
    rejected: tuple[Rejected, ...] = ()
    passes: tuple[int, ...] = ()  # tokens of each decode pass
    stats: Stats | None = None  # of the answer so far
    speedup: float | None = None  # over plain decoding, by the cost model; with some deltas
    branches: tuple[Rejected, ...] = ()  # rejected alternatives to drafts, of token trees

    def __add__(self, more: TextDelta) -> TextDelta:
        offset, drafted = len(self.text), list(self.drafted)
        add_spans(drafted, more.drafted, offset)
        return TextDelta(
            self.text + more.text,
            tuple(drafted),
            self.rejected + shifted(more.rejected, offset),
            self.passes + more.passes,
            more.stats or self.stats,
            more.speedup or self.speedup,
            self.branches + shifted(more.branches, offset),
        )


def shifted(rejected: Iterable[Rejected], offset: int) -> tuple[Rejected, ...]:
    """Return `rejected` for a text with `offset` more characters at its beginning."""
    return tuple((place + offset, text) for place, text in rejected)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of the tokens of the next events, if requested."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model begins a tool call."""

    id: str  # of the call; the tool's result refers to it
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of the call."""

    text: str  # part of a JSON object


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """The arguments of the call are complete."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason
    stats: Stats
    stop: str = ""  # the stop sequence that ended the answer, "" for none
    details: object = None  # of a completion: a `Completion`
    thinking_tokens: int = 0  # counted by the server


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; no more of the answer follows."""

    error: Exception


_Output = ThinkingDelta | TextDelta | Logprobs
_Call = ToolCallStarted | ToolCallArguments | ToolCallFinished
Event = PrefillProgress | PromptProcessed | _Output | _Call | Finished | Failed


def append_event(events: list[Any], event: Event) -> None:
    """Append an event, merged with the last one if possible.

    Thinking is merged across the details of its decode steps, which are deltas without text.
    """
    place, last = -1, events[-1] if events else None
    if isinstance(event, ThinkingDelta) and isinstance(last, TextDelta) and not last.text:
        place, last = -2, events[-2] if events[1:] else None
    if isinstance(event, PrefillProgress) and isinstance(last, PrefillProgress):
        events[place] = event
    elif isinstance(event, TextDelta) and isinstance(last, TextDelta):
        events[place] = last + event
    elif isinstance(event, ThinkingDelta | ToolCallArguments) and type(last) is type(event):
        events[place] = replace(event, text=last.text + event.text)
    else:
        events.append(event)


def add_spans(spans: list[Span], more: Iterable[Span], offset: int) -> None:
    """Append ranges, shifted by `offset`, to `spans`; adjacent ranges are merged."""
    for start, end in more:
        if spans and spans[-1][1] == start + offset:
            spans[-1] = (spans[-1][0], end + offset)
        else:
            spans.append((start + offset, end + offset))


@dataclass(frozen=True, slots=True)
class LoadedModelFacts:
    """Facts about a model for users; see `Engine`."""

    name: str
    weights: str
    context_length: int
    no_draft: str | None
    note: str  # how it fits into memory
    not_batched: str | None = None  # why requests take turns, None if they share passes
    server: str = ""  # address of the server that runs it; "": loaded here
    shows_tools: bool = True  # The chat template describes tools.
    drafter: str = "n-grams"  # what drafts, or why nothing does
    acceptance: tuple[float, ...] = ()  # of its neural drafter, by position in a draft


@dataclass(frozen=True, slots=True)
class SharedPasses:
    """Counters of decode passes of several requests."""

    passes: int = 0
    requests: int = 0  # sum of the requests in these passes

    def __add__(self, other: SharedPasses) -> SharedPasses:
        return SharedPasses(self.passes + other.passes, self.requests + other.requests)
