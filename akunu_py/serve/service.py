"""What all requests share: the model that is served, what it is called, and how it answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from akunu_py.completion.completer import Completer
from akunu_py.completion.types import CompleteOptions
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.serve.errors import RequestError
from akunu_py.serve.infill import Infill
from akunu_py.types import GenerateOptions

_COMPLETERS = 4  # with other options each, that are kept
_ENDING = 64


@dataclass(frozen=True)
class Service:
    """names: what a request may call the model, its own name first. defaults: how an answer is made
    where the request says nothing of it. max_tokens: of such an answer, None for as many as the
    context holds. created: seconds since 1970. completers: see `completer`. ending: the ids of
    requests that shall end with what they have, as our own clients ask."""

    engine: Engine
    names: tuple[str, ...]
    defaults: GenerateOptions
    max_tokens: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    completers: dict[CompleteOptions, Completer] = field(default_factory=dict)
    ending: deque[str] = field(default_factory=lambda: deque(maxlen=_ENDING))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def most_tokens(self) -> int:
        """That an answer may have where the request sets no limit."""
        return self.max_tokens or self.engine.plan.context_length

    def completer(self, session: Session, options: CompleteOptions) -> Completer:
        """The one that completes so; to be called in the thread of the session."""
        if options not in self.completers:
            while len(self.completers) >= _COMPLETERS:
                del self.completers[next(iter(self.completers))]
            made = Completer(self.engine, options, session.learned, session)
            self.completers[options] = made
        return self.completers[options]

    @cached_property
    def infill(self) -> Infill:
        """How the model is asked to fill in the middle."""
        return Infill(self.engine)

    @property
    def description(self) -> dict[str, Any]:
        """The model as OpenAI's and Anthropic's clients list one."""
        date = datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "akunu",
            "type": "model",
            "display_name": self.name,
            "created_at": date,
            "context_length": self.engine.plan.context_length,
        }

    def check_model(self, asked: str | None) -> None:
        """Raises RequestError where a request asks for another model than the served one."""
        if asked is not None:
            check_model(asked, self.names)


def check_model(asked: str, names: Sequence[str]) -> None:
    """Raises RequestError where `asked` is none of the names of the served model."""
    if asked not in names:
        raise RequestError(
            f"this server has {names[0]} loaded, not {asked[:100]!r}; ask for that, "
            f"or start another one: akunu serve --model NAME",
            "not_found",
            param="model",
            code="model_not_found",
        )
