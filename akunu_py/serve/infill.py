"""Prompts that ask a model to fill in the middle, as it was trained to be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from akunu_py.completion.fim import FimFamily, find_family
from akunu_py.completion.prompt import Budgets, make_prompt, name_files
from akunu_py.completion.tokens import CodeTokens
from akunu_py.decoding.engine import Engine


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
        self._code = CodeTokens(engine.tokenizer, engine.vocabulary)
        self._context = engine.context_length
        self.family: FimFamily | None = find_family("auto", self._code, engine.name)

    def prompt(
        self,
        prefix: str,
        suffix: str,
        *,
        path: str = "",
        files: Sequence[tuple[str, str]] = (),
        budgets: tuple[int, int] | None = None,
    ) -> InfillPrompt:
        """The prompt for what is between `prefix` and `suffix`. Where the model has no format, it
        continues the prefix.

        files: (path, text) of other files, which the model reads as far as its format has a place
        for them, and which are drafted from. budgets: tokens of the prefix and of the suffix that
        are read at most; None for all, however long.
        """
        before, after = budgets or (self._context, self._context)
        names = name_files(path, "", "", [name for name, _ in files])
        made = make_prompt(
            self._code, self.family, Budgets(before, after, 0), prefix, suffix, names, files, files
        )
        stops = self._code.marker_ids(self.family.stop) if self.family else frozenset()
        tokens = made.tokens
        if made.healed:  # nobody samples the end of the prefix again here
            tokens = [*tokens, *self._code.encode(made.healed)]
        return InfillPrompt(tokens, tuple(sorted(stops)), made.draft_context)
