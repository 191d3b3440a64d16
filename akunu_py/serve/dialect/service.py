"""State shared by all requests to one model: the loaded model and its defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import methodcaller
from typing import Any

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import CompleteOptions, room_for_text
from akunu_py.completion.prompt.layout import (
    CodeTokens,
    FimFamily,
    find_family,
    make_prompt,
    name_files,
)
from akunu_py.engine.engine import Embedding, Engine
from akunu_py.engine.host import ModelHost
from akunu_py.engine.loop import StepLoop
from akunu_py.errors import PromptTooLong
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.types import GenerateOptions, Message

_USUAL_LENGTH = 8  # characters of a token, at most
_CUT_TOKENS = 100  # more tokens, at most, if a text is cut within a word
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

    def completer(self, loop: StepLoop, options: CompleteOptions) -> Completer:
        """Return the completer for these options; call in the loop's thread."""
        if options not in self.completers:
            while len(self.completers) >= _MAX_COMPLETERS:
                del self.completers[next(iter(self.completers))]
            self.completers[options] = Completer(self.engine, options, loop=loop)
        return self.completers[options]

    def check_length(self, messages: Iterable[Message | str]) -> None:
        """Raise PromptTooLong, with an estimate, if a prompt exceeds the context by far.

        Tokenizing the whole of a prompt takes 2 s and 300 MB for each megabyte.
        """
        text = "".join(each if isinstance(each, str) else each.content for each in messages)
        context = self.engine.plan.context_length
        part = _USUAL_LENGTH * context
        while part < len(text):
            tokens = len(self.engine.tokens.encode_text(text[:part]))
            if tokens > context + _CUT_TOKENS:
                raise PromptTooLong("", tokens * len(text) // part, context - 1)
            part *= 2

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a part of a text."""
        return len(self.engine.tokens.encode_text(text))

    @cached_property
    def _fim(self) -> tuple[CodeTokens, FimFamily | None]:
        code = CodeTokens(self.engine.tokens.tokenizer, self.engine.tokens.vocabulary)
        return code, find_family("auto", code, self.engine.name)

    @property
    def fills_in(self) -> bool:
        """Whether the model has a known fill-in-the-middle format."""
        return self._fim[1] is not None

    def infill_prompt(self, prefix: str, suffix: str) -> TextPrompt:
        """Return the prompt for the text between `prefix` and `suffix`, cut to the context.

        Raises RequestError if the model has no known fill-in-the-middle format.
        """
        code, family = self._fim
        if family is None:
            raise invalid("suffix", f"{self.name} has no known fill-in-the-middle format")
        room = room_for_text(self.engine.plan.context_length)
        most = _USUAL_LENGTH * room
        before, after = len(code.encode(prefix[-most:])), len(code.encode(suffix[:most]))
        # The text after the cursor has at least a quarter, as in llama.cpp.
        after = min(after, max(room // 4, room - before))
        budgets = CompleteOptions(prefix_tokens=room - after, suffix_tokens=after)
        made = make_prompt(code, family, budgets, prefix, suffix, name_files("", "", ""))
        stops = tuple(sorted(code.marker_ids(family.stop)))
        return TextPrompt(made.tokens, stops, made.draft_context)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The tokens of a prompt without a chat template."""

    tokens: list[int]
    stop_tokens: tuple[int, ...] = ()  # end the answer
    draft_context: Sequence[Sequence[int]] = ()  # more text to draft from


@dataclass(frozen=True, slots=True)
class Embedder:
    """An embedding model in its own thread."""

    name: str
    host: ModelHost

    def embed(self, texts: Sequence[str | Sequence[int]], **options: Any) -> list[Embedding]:
        """Return the embeddings of texts or token ids; see `Engine.embed`."""
        futures = [self.host.call(methodcaller("embed", text, **options)) for text in texts]
        return [future.result() for future in futures]
