"""What the engine does for a request whose answer is plain text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from akunu_py.decoding.events import Begun, Ended, Event, Reading, Text, Thinking
from akunu_py.decoding.scheduler import Job
from akunu_py.decoding.session import Session
from akunu_py.types import GenerateOptions


def text_job(
    prompt: Sequence[int],
    options: GenerateOptions,
    draft_context: Sequence[Sequence[int]] = (),
) -> Job:
    """The answer to a prompt in token ids; see `Session.generate`."""

    def events(session: Session) -> Iterator[Event | None]:
        generation = session.generate(prompt, options, draft_context)
        begun = False
        with contextlib.closing(generation.steps()) as steps:
            for step in steps:
                if isinstance(step, Reading):
                    yield step
                    continue
                if not begun:
                    begun = True
                    yield Begun(generation.stats.prompt_tokens, generation.stats.cached_tokens)
                if step.thinking:
                    yield Thinking(step.thinking)
                if step.text:
                    yield Text(step.text)
        yield Ended(generation.finish_reason or "cancelled", generation.stats)

    return events
