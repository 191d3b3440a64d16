"""Events of one request, in the order in which they occur, and facts about its model.

PrefillProgress comes during the prefill, PromptProcessed after it, then the answer. Finished or
Failed comes last, once. A tool call is one ToolCallStarted, any number of ToolCallArguments, and
one ToolCallFinished.
"""

from __future__ import annotations

from dataclasses import dataclass

from akunu_py.types import FinishReason, Stats, TextPiece, TokenLogprobs


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
    """More of the answer."""

    text: str


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
class Gauges:
    """Measurements other than the counts of an answer."""

    memory: int = 0  # bytes of model, cache and activations
    speedup: float | None = None  # over plain decoding, by the cost model; None: unknown


@dataclass(frozen=True, slots=True)
class AnnotatedPiece:
    """The result of one pass, with its drafts, for akunu's chat."""

    piece: TextPiece
    stats: Stats  # of the answer so far
    rejected: str = ""  # text of rejected draft tokens
    from_prefill: bool = False
    gauges: Gauges | None = None  # with some pieces


@dataclass(frozen=True, slots=True)
class AnnotatedEnd:
    """The end of an answer for akunu's chat."""

    reason: FinishReason  # "cancelled" also if the client of a server ended it
    gauges: Gauges


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason
    stats: Stats
    stop: str = ""  # the stop sequence that ended the answer, "" for none
    details: object = None  # for akunu's own clients: an `AnnotatedEnd` or a `Completion`


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; no more of the answer follows."""

    error: Exception


Call = ToolCallStarted | ToolCallArguments | ToolCallFinished
Event = (
    PrefillProgress
    | PromptProcessed
    | ThinkingDelta
    | TextDelta
    | Logprobs
    | Call
    | AnnotatedPiece
    | Finished
    | Failed
)


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
