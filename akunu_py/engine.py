"""Engine: a loaded model, immutable. Session: one mutable timeline of tokens.

Front ends use these two nouns and never touch arrays. A session belongs to the thread that uses
it, because MLX's streams are thread-local; only `Generation.cancel` may come from elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_model, load_tokenizer
from transformers.utils import logging as transformers_logging

from akunu_py import kvcache
from akunu_py.backend import WeightMode, lay_out_weights, weight_bytes, wired_memory
from akunu_py.decode import Target, decode, prefill, speculate
from akunu_py.detokenize import Detokenizer
from akunu_py.errors import DamagedModel, EmptyPrompt, PromptTooLong, UnsupportedModel, UsageError
from akunu_py.ngram.fixed import FixedDrafter
from akunu_py.ngram.off import NoDrafter
from akunu_py.types import (
    Answer,
    Drafter,
    DraftMode,
    FinishReason,
    GenerateOptions,
    Message,
    Piece,
    Stats,
    TextPiece,
)

_UNKNOWN_CONTEXT = 4096
# Checkpoints name one end token, often that of a chat turn; a text that ends says another.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class Engine:
    """A model that is ready to run.

    weights: the format of the weights in words; load_s: seconds it took to load them.
    no_draft: why this model cannot draft, None where it can.
    """

    name: str
    model: Any
    tokenizer: Any
    stop_tokens: frozenset[int]
    context_length: int
    weights: str
    weight_bytes: int
    load_s: float
    no_draft: str | None

    @classmethod
    def load(cls, path: Path, *, name: str | None = None, weights: WeightMode = "auto") -> Engine:
        """Loads the model in the folder `path`.

        Raises DamagedModel where files are missing or unreadable, UnsupportedModel where mlx-lm
        has no such architecture.
        """
        started = time.perf_counter()
        transformers_logging.set_verbosity_error()  # its advice is not for our users
        try:
            model, config = load_model(path, lazy=True)
            tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
        except (OSError, KeyError, RuntimeError, TypeError) as error:
            raise DamagedModel(
                f"the model in {path} cannot be read ({_one_line(error)}); "
                "remove it and fetch it again with: akunu models rm, akunu models pull"
            ) from error
        except ValueError as error:
            raise UnsupportedModel(
                f"the model in {path} cannot be loaded: {_one_line(error)}"
            ) from error
        layout = lay_out_weights(model, weights)
        text_config = config.get("text_config", config)
        return cls(
            name=name or path.name,
            model=model,
            tokenizer=tokenizer,
            stop_tokens=_stop_tokens(tokenizer),
            context_length=int(text_config.get("max_position_embeddings") or _UNKNOWN_CONTEXT),
            weights=layout,
            weight_bytes=weight_bytes(model),
            load_s=time.perf_counter() - started,
            no_draft=kvcache.why_not(kvcache.new_cache(model)),
        )

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw text, with the beginning-of-text token where the model has one."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation in the model's chat template, up to where its answer starts."""
        if not self.tokenizer.has_chat_template:
            raise UsageError(
                f"{self.name} has no chat template, so it cannot chat; "
                "continue a text instead: akunu run --raw"
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        tokens = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        return [int(token) for token in tokens]


class Session:
    """One timeline of tokens: what was read and said, and the KV cache that holds it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._target = Target(engine.model)

    def chat(self, messages: Sequence[Message], options: GenerateOptions) -> Generation:
        """The answer to a conversation, as a stream; see `generate`."""
        return self.generate(self.engine.encode_chat(messages), options)

    def generate(self, prompt: Sequence[int], options: GenerateOptions) -> Generation:
        """What the model says after `prompt` (token ids), as a stream to iterate over.

        What the cache already holds of the prompt is not read again. Raises EmptyPrompt,
        PromptTooLong, and UsageError for options that cannot be honoured, before anything runs.
        """
        return Generation(self.engine, self._target, prompt, options)


class Generation:
    """One answer while it is made: iterate for its pieces; `stats` and `text` grow meanwhile.

    finish_reason: None until the end, then "stop" (the model ended its answer), "length"
    (max_tokens), "context" (the context is full) or "cancelled".
    on_prefill: called with (prompt tokens read, prompt tokens in all) while the prompt is read.
    """

    def __init__(
        self, engine: Engine, target: Target, prompt: Sequence[int], options: GenerateOptions
    ) -> None:
        _check(engine, prompt, options)
        self._engine = engine
        self._target = target
        self._prompt = list(prompt)
        self._options = options
        self._room = engine.context_length - len(self._prompt)
        self._cancelled = threading.Event()
        self._detokenizer = Detokenizer(engine.tokenizer, self._prompt[-1])
        self.on_prefill: Callable[[int, int], None] = lambda done, total: None
        self.stats = Stats(prompt_tokens=len(self._prompt))
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def cancel(self) -> None:
        """Ends the answer after the pass that is running. May be called from any thread."""
        self._cancelled.set()

    def answer(self) -> Answer:
        """Runs to the end and returns the whole."""
        for _ in self:
            pass
        reason = self.finish_reason or "cancelled"
        return Answer(self.text, tuple(self.tokens), reason, replace(self.stats))

    def __iter__(self) -> Iterator[TextPiece]:
        with wired_memory():
            for piece in self._pieces():
                yield self._take(piece)
        self.finish_reason = self._why_ended()
        if rest := self._detokenizer.finish():
            self.text += rest
            yield TextPiece(rest, Piece(()))

    def _pieces(self) -> Iterator[Piece]:
        """The first token, which comes from the prefill; then a piece per decode pass."""
        started = time.perf_counter()
        target, stop = self._target, self._engine.stop_tokens
        if not self._prefill():
            return
        first, _ = speculate(target, (), stop)
        prefilled = time.perf_counter()
        self.stats.prefill_s = prefilled - started
        yield Piece(tuple(first), seconds=self.stats.prefill_s)
        if first[0] in stop or self._cancelled.is_set():
            return
        # A model that cannot be rolled back answers all the same; front ends say why it is slow.
        mode: DraftMode = "off" if self._engine.no_draft else self._options.draft
        drafter = new_drafter(mode, self._options.draft_tokens)
        drafter.extend([*self._prompt, *first])
        limit = min(self._options.max_tokens, self._room) - 1
        passes = decode(target, drafter, limit, stop, runs_ahead=mode == "off")
        with contextlib.closing(passes):
            for piece in passes:
                yield piece
                # The reader's time counts too: this is the speed that a person sees.
                self.stats.decode_s = time.perf_counter() - prefilled
                if self._cancelled.is_set():
                    return

    def _prefill(self) -> bool:
        """Brings the cache to the prompt but for its last token; False where cancelled."""
        cached = self._target.go_to(self._prompt)
        self.stats.cached_tokens = cached
        total = len(self._prompt) - 1

        def go_on(done: int) -> bool:
            self.on_prefill(cached + done, total)
            return not self._cancelled.is_set()

        return prefill(self._target, go_on)

    def _take(self, piece: Piece) -> TextPiece:
        """Counts a piece and turns it into text."""
        self.stats.add(piece, from_prefill=not self.tokens)
        self.tokens += piece.tokens
        text, drafted = "", []
        for index, token in enumerate(piece.tokens):
            if token in self._engine.stop_tokens:
                break
            start = len(text)
            text += self._detokenizer.add(token)
            if index < piece.accepted and len(text) > start:
                drafted.append((start, len(text)))
        self.text += text
        return TextPiece(text, piece, tuple(drafted))

    def _why_ended(self) -> FinishReason:
        if self.tokens and self.tokens[-1] in self._engine.stop_tokens:
            return "stop"
        if len(self.tokens) == self._options.max_tokens:
            return "length"
        return "context" if len(self.tokens) == self._room else "cancelled"


def new_drafter(mode: DraftMode, draft_tokens: int) -> Drafter:
    """A fresh drafter for `mode`."""
    return FixedDrafter(draft_tokens) if mode == "fixed" else NoDrafter()


def _check(engine: Engine, prompt: Sequence[int], options: GenerateOptions) -> None:
    if options.max_tokens < 1:
        raise UsageError(f"max_tokens must be at least 1, got {options.max_tokens}")
    if options.draft_tokens < 1:
        raise UsageError(
            f"draft_tokens must be at least 1, got {options.draft_tokens}; for none use --draft off"
        )
    if not prompt:
        raise EmptyPrompt("the prompt is empty: give a text to answer")
    if len(prompt) >= engine.context_length:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, but the context of {engine.name} holds "
            f"{engine.context_length} with the answer; shorten the prompt"
        )


def _stop_tokens(tokenizer: Any) -> frozenset[int]:
    ends = {tokenizer.get_vocab().get(text) for text in _END_TOKENS}
    special = set(tokenizer.all_special_ids)
    return frozenset(tokenizer.eos_token_ids) | {end for end in ends if end in special}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
