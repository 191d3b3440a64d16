"""Jobs: one answer each, to a conversation with tools or to a plain prompt.

A job is called with a session and yields the events of its request. Between two events at most one
pass or one prompt chunk runs, so that jobs can take turns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from akunu_py.decoding.constraint.tool_calls import constrained
from akunu_py.decoding.events import (
    Event,
    Failed,
    Finished,
    Logprobs,
    PrefillProgress,
    PromptProcessed,
    ThinkingDelta,
    ToolCallFinished,
)
from akunu_py.decoding.generate.session import Generation, Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.tools.tool_call_parser import ToolCallParser, parser_for
from akunu_py.types import GenerateOptions, Message, Tool, ToolChoice

if TYPE_CHECKING:
    from akunu_py.decoding.generate.session import Session

# Yields the events of an answer, last Ended; None for a step without an event.
Job = Callable[["Session"], Iterator[Event | None]]


class JobHandle:
    """A submitted job."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        client: str,
        wake: Callable[[], None],
        *,
        short: bool,
    ) -> None:
        self.job = job
        self.client = client
        self.short = short
        self._on_event = on_event
        self._wake = wake
        self._cancelled = threading.Event()
        self.ended = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Cancel the job after its current step. Callable from any thread at any time."""
        self._cancelled.set()
        self._wake()

    def tell(self, event: Event) -> None:
        """Deliver an event, unless the job is finished. A failing callback cancels the job."""
        if self.ended:
            return
        self.ended = isinstance(event, Finished | Failed)
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - a failing callback must not stop other jobs
            self._cancelled.set()


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
    """Return a job that answers a conversation.

    choice: default "auto". parallel: allow several calls; otherwise the answer ends after one.
    predicted: text the answer may repeat, to draft from. variables: of the chat template. Raises
    UsageError or UnsupportedModel at once if the request cannot be honored.
    """
    chosen = choice or ToolChoice()
    prompt = engine.tokens.encode_chat(messages, tools, variables)
    sampling = constrained(engine.tokens, options.sampling, tools, chosen, parallel=parallel)
    markers = parser_for(engine.tokens.tokenizer, tools).markers
    asked = replace(options, sampling=sampling, markers=(*options.markers, *markers))
    context = [engine.tokens.encode_text(predicted)] if predicted else []
    exclusive = options.sampling.constraint is not None and chosen.mode in ("auto", "none")
    one_call = not parallel or chosen.mode == "named"

    def events(session: Session) -> Iterator[Event | None]:
        stable = None
        if session.target.history.needs_checkpoints:
            stable = engine.tokens.stable_prefix(messages, prompt, tools, variables)
        parser = parser_for(
            engine.tokens.tokenizer, tools, allowed=chosen.mode != "none", exclusive=exclusive
        )
        generation = session.generate(prompt, asked, context, stable)
        yield from _events(generation, parser, one_call=one_call)

    return events


def text_job(
    prompt: Sequence[int],
    options: GenerateOptions,
    draft_context: Sequence[Sequence[int]] = (),
) -> Job:
    """Return a job that continues a prompt in token ids. draft_context: see `Session.generate`."""

    def events(session: Session) -> Iterator[Event | None]:
        generation = session.generate(prompt, options, draft_context)
        yield from _events(
            generation, parser_for(session.engine.tokens.tokenizer, ()), one_call=False
        )

    return events


def _events(
    generation: Generation, parser: ToolCallParser, *, one_call: bool
) -> Iterator[Event | None]:
    begun = enough = False
    delivered = 0
    with contextlib.closing(generation.steps()) as steps:
        for step in steps:
            if isinstance(step, PrefillProgress):
                yield step
                continue
            if not begun:
                begun = True
                yield PromptProcessed(
                    generation.stats.prompt_tokens, generation.stats.cached_tokens
                )
            if fresh := tuple(generation.logprobs[delivered:]):
                delivered += len(fresh)
                yield Logprobs(fresh)
            found: list[Event] = [ThinkingDelta(step.thinking)] if step.thinking else []
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
    yield Finished(reason, replace(generation.stats), generation.stop_sequence)


def _first_end(events: Sequence[Event]) -> int:
    """Return the index after the first end of a call, 0 if there is none."""
    ends = (index for index, event in enumerate(events) if isinstance(event, ToolCallFinished))
    return next(ends, -1) + 1
