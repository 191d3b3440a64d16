"""What the engine does for a request, as jobs of the scheduler: the answer to a conversation, with
calls of tools, and what continues a text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from akunu_py.decoding.engine import Engine
from akunu_py.decoding.events import Begun, CallEnded, Ended, Event, Logprobs, Reading, Thinking
from akunu_py.decoding.scheduling.job import Job
from akunu_py.decoding.session import Generation, Session
from akunu_py.decoding.tool_calls.choice import constrained
from akunu_py.decoding.tool_calls.parser import ToolCallParser, parser_for
from akunu_py.types import GenerateOptions, Message, Tool, ToolChoice


def chat_job(
    engine: Engine,
    messages: Sequence[Message],
    options: GenerateOptions,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    *,
    parallel: bool = True,
    predicted: str = "",
    variables: Mapping[str, Any] = {},
) -> Job:
    """The answer to a conversation.

    choice: whether tools are called, "auto" by default. parallel: whether there may be more than
    one call; otherwise the answer ends with the first. predicted: a text that the answer may
    repeat, to draft from. variables: of the chat template. Raises UsageError, UnsupportedModel for
    what cannot be honoured, at once.
    """
    chosen = choice or ToolChoice()
    prompt = engine.tokens.encode_chat(messages, tools, variables)
    sampling = constrained(engine.tokens, options.sampling, tools, chosen, parallel=parallel)
    markers = parser_for(engine.tokens, tools).markers
    asked = replace(options, sampling=sampling, markers=(*options.markers, *markers))
    context = [engine.tokens.encode_text(predicted)] if predicted else []
    either = options.sampling.constraint is not None and chosen.mode in ("auto", "none")
    one_call = not parallel or chosen.mode == "named"

    def events(session: Session) -> Iterator[Event | None]:
        stable = None
        if session.target.history.needs_checkpoints:
            stable = engine.tokens.stable_prefix(messages, prompt, tools, variables)
        parser = parser_for(engine.tokens, tools, allowed=chosen.mode != "none", either=either)
        generation = session.generate(prompt, asked, context, stable)
        yield from _events(generation, parser, one_call=one_call)

    return events


def text_job(
    prompt: Sequence[int],
    options: GenerateOptions,
    draft_context: Sequence[Sequence[int]] = (),
) -> Job:
    """The answer to a prompt in token ids. draft_context: see `Session.generate`."""

    def events(session: Session) -> Iterator[Event | None]:
        generation = session.generate(prompt, options, draft_context)
        yield from _events(generation, parser_for(session.engine.tokens, ()), one_call=False)

    return events


def _events(
    generation: Generation, parser: ToolCallParser, *, one_call: bool
) -> Iterator[Event | None]:
    begun = enough = False
    told = 0
    with contextlib.closing(generation.steps()) as steps:
        for step in steps:
            if isinstance(step, Reading):
                yield step
                continue
            if not begun:
                begun = True
                yield Begun(generation.stats.prompt_tokens, generation.stats.cached_tokens)
            if fresh := tuple(generation.logprobs[told:]):
                told += len(fresh)
                yield Logprobs(fresh)
            found: list[Event] = [Thinking(step.thinking)] if step.thinking else []
            found += parser.add(step.text) if not enough else []
            if one_call and (last := _first_end(found)):
                del found[last:]
                enough = True
                generation.cancel()
            yield from found
            if not found:
                yield None
    if not enough:
        yield from parser.finish()
    reason = "stop" if enough else generation.finish_reason or "cancelled"
    yield Ended(reason, replace(generation.stats), generation.stop_sequence)


def _first_end(events: Sequence[Event]) -> int:
    """The index behind the first end of a call, 0 where there is none."""
    ends = (index for index, event in enumerate(events) if isinstance(event, CallEnded))
    return next(ends, -1) + 1
