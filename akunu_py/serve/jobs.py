"""What the engine does for a request whose answer is plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from akunu_py.decoding.events import Begun, Ended, Event, Text, Thinking
from akunu_py.decoding.session import Session
from akunu_py.serve.dialect import Job
from akunu_py.types import GenerateOptions


def text_job(prompt: Sequence[int], options: GenerateOptions) -> Job:
    """The answer to a prompt in token ids."""

    def events(session: Session) -> Iterator[Event]:
        generation = session.generate(prompt, options)
        begun = False
        try:
            for piece in generation:
                if not begun:
                    begun = True
                    yield Begun(generation.stats.prompt_tokens, generation.stats.cached_tokens)
                if piece.thinking:
                    yield Thinking(piece.thinking)
                if piece.text:
                    yield Text(piece.text)
        finally:
            generation.cancel()
        yield Ended(generation.finish_reason or "cancelled", generation.stats)

    return events
