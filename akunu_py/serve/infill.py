"""Prompts that ask a model to fill in the middle, as it was trained to be asked."""

from __future__ import annotations

from dataclasses import dataclass

from akunu_py.completion.fim import FimFamily, find_family
from akunu_py.completion.prompt import Budgets, make_prompt, name_files
from akunu_py.completion.tokens import CodeTokens
from akunu_py.decoding.model.engine import Engine


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """tokens: what the model reads. stop_tokens: what ends the middle. draft_context: what is
    drafted from besides."""

    tokens: list[int]
    stop_tokens: tuple[int, ...]
    draft_context: list[tuple[int, ...]]


class Infill:
    """The tokenizer of a model, as filling in needs it, and its format."""

    def __init__(self, engine: Engine) -> None:
        self._code = CodeTokens(engine.tokens.tokenizer, engine.tokens.vocabulary)
        self._context = engine.plan.context_length
        self.family: FimFamily | None = find_family("auto", self._code, engine.name)

    def prompt(self, prefix: str, suffix: str) -> InfillPrompt:
        """The prompt for what is between two texts, however long they are. Where the model has no
        format, it continues the prefix."""
        room = Budgets(self._context, self._context, 0)
        names = name_files("", "", "", [])
        made = make_prompt(self._code, self.family, room, prefix, suffix, names)
        stops = self._code.marker_ids(self.family.stop) if self.family else frozenset()
        # Nobody samples the end of the prefix again here.
        tokens = [*made.tokens, *self._code.encode(made.healed)]
        return InfillPrompt(tokens, tuple(sorted(stops)), made.draft_context)
