"""Strategies for the events of answers, to test the encoders of all dialects."""

from __future__ import annotations

import itertools
import json

from hypothesis import strategies as st

from akunu_py.decoding.events import (
    Event,
    Finished,
    Logprobs,
    PrefillProgress,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.serve.dialect.interface import CollectedAnswer
from akunu_py.types import FinishReason, Stats, TokenLogprobs

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
_REASONS: tuple[FinishReason, ...] = ("stop", "length", "context")


@st.composite
def _tool_call(draw: st.DrawFn) -> list[Event]:
    arguments = json.dumps(draw(st.dictionaries(TEXTS, TEXTS, max_size=2)), ensure_ascii=False)
    cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=3)))
    parts = [arguments[a:b] for a, b in itertools.pairwise([0, *cuts, len(arguments)])]
    return [
        ToolCallStarted(draw(TEXTS), draw(TEXTS)),
        *map(ToolCallArguments, parts),
        ToolCallFinished(),
    ]


def _text_with_logprobs() -> st.SearchStrategy[list[Event]]:
    """Generate a text with the logprobs of its tokens."""
    token = st.builds(TokenLogprobs, TEXTS, st.floats(-9, 0), st.just((("a", -1.0), ("b", -2.0))))
    tokens = st.lists(token, min_size=1, max_size=3)
    return tokens.map(
        lambda found: [Logprobs(tuple(found)), TextDelta("".join(each.text for each in found))]
    )


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Generate all events of a finished answer."""
    size = draw(st.integers(1, 9))
    thinking = [ThinkingDelta(text) for text in draw(st.lists(TEXTS, max_size=3))]
    pieces: list[list[Event]] = draw(
        st.lists(
            st.one_of(
                TEXTS.map(lambda text: [TextDelta(text)]), _text_with_logprobs(), _tool_call()
            ),
            max_size=5,
        )
    )
    stats = Stats(prompt_tokens=size, generated_tokens=draw(st.integers(0, 9)), cached_tokens=1)
    return [
        *[PrefillProgress(done, size) for done in range(draw(st.integers(0, size)))],
        PromptProcessed(size, 1),
        *thinking,
        *[event for piece in pieces for event in piece],
        Finished(draw(st.sampled_from(_REASONS)), stats, draw(st.just("") | TEXTS)),
    ]


def collect_answer(events: list[Event]) -> CollectedAnswer:
    answer = CollectedAnswer()
    for event in events:
        answer.add(event)
    return answer
