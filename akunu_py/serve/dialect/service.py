"""State shared by all requests to one model: the loaded model and its defaults."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from akunu_py.completion.completer import Completer
from akunu_py.completion.prompt.layout import (
    Budgets,
    CodeTokens,
    FimFamily,
    find_family,
    make_prompt,
    name_files,
)
from akunu_py.completion.request import CompleteOptions
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import GenerateOptions

_MAX_COMPLETERS = 4  # kept, one for each set of options


@dataclass(frozen=True)
class Service:
    """The loaded model."""

    engine: Engine
    name: str
    defaults: GenerateOptions
    max_tokens: int | None = None  # default limit; None: the context length
    completers: dict[CompleteOptions, Completer] = field(default_factory=dict)
    # ids of requests that akunu's own clients want to stop with the text so far
    ending: Collection[str] = ()

    @property
    def token_limit(self) -> int:
        """Maximum tokens for requests without a limit."""
        return self.max_tokens or self.engine.plan.context_length

    def completer(self, session: Session, options: CompleteOptions) -> Completer:
        """Return the completer for these options; call in the session's thread."""
        if options not in self.completers:
            while len(self.completers) >= _MAX_COMPLETERS:
                del self.completers[next(iter(self.completers))]
            self.completers[options] = Completer(self.engine, options, session.learned, session)
        return self.completers[options]

    @cached_property
    def infill(self) -> Infill:
        """The model's fill-in-the-middle format."""
        return Infill(self.engine)


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """A fill-in-the-middle prompt."""

    tokens: list[int]
    stop_tokens: tuple[int, ...]  # end the middle
    draft_context: list[tuple[int, ...]]  # more text to draft from


class Infill:
    """The fill-in-the-middle format of a model, with its tokenizer."""

    def __init__(self, engine: Engine) -> None:
        self._code = CodeTokens(engine.tokens.tokenizer, engine.tokens.vocabulary)
        self._context = engine.plan.context_length
        self.family: FimFamily | None = find_family("auto", self._code, engine.name)

    def prompt(self, prefix: str, suffix: str) -> InfillPrompt:
        """Return the prompt for the text between `prefix` and `suffix`, shortened to the context.

        A model without a fill-in-the-middle format continues the prefix.
        """
        room = Budgets(self._context, self._context, 0)
        names = name_files("", "", "", [])
        made = make_prompt(self._code, self.family, room, prefix, suffix, names)
        stops = self._code.marker_ids(self.family.stop) if self.family else frozenset()
        tokens = [*made.tokens, *self._code.encode(made.healed)]  # the answer omits the prefix
        return InfillPrompt(tokens, tuple(sorted(stops)), made.draft_context)
