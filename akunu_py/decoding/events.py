"""Events of one request, in the order in which they occur.

Reading events come during the prefill, Begun after it, then the answer. Ended or Failed comes
last, once. Tool calls follow each other, each as CallBegun, CallArguments for every part of its
arguments, and CallEnded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from akunu_py.types import FinishReason, Stats, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Reading:
    """`done` of `total` tokens of the prompt are read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt is read; `cached_tokens` of it were known from before."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Thinking:
    """More of what the model thinks before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the tokens that the next events are of, where they are asked for."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool. id: of the call, which its result refers to."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call: a part of a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments of the call are complete."""


@dataclass(frozen=True, slots=True)
class Told:
    """More than the other events tell, for a client of ours that shows it. text: what of it is the
    answer's or its thinking. value: all of it, ready for JSON."""

    text: str
    value: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer ended. stop: the stop sequence that ended it, "" for none."""

    reason: FinishReason
    stats: Stats
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more of the answer."""

    error: Exception


Event = (
    Reading
    | Begun
    | Thinking
    | Text
    | Logprobs
    | CallBegun
    | CallArguments
    | CallEnded
    | Told
    | Ended
    | Failed
)
