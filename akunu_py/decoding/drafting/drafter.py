"""A session's drafter, kept in sync with the token history, and its neural drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from akunu_py.decoding.drafting.neural import (
    ExitDrafter,
    ModelDrafter,
    MtpDrafter,
    NeuralDrafterBase,
)
from akunu_py.decoding.learned_state import UnsavedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import UsageError
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.fixed import FixedDrafter, NoDrafter
from akunu_py.ngram.neural_plan import PlannedDrafter
from akunu_py.types import Drafter, DraftGuide, DraftMode, GenerateOptions


class Drafting:
    """A session's drafter, kept from turn to turn so that it keeps learning.

    `auto` rewinds when the history changes; other drafters are made again.
    """

    def __init__(
        self,
        engine: Engine,
        target: Target,
        learned: UnsavedState,
    ) -> None:
        self._engine = engine
        self._target = target
        self._learned = learned
        self.curve = learned.curve
        self._made_for: tuple[DraftMode, int] | None = None
        # Conversation and number of tokens of the last request that must not be stored.
        self._private: tuple[str, int] | None = None
        self._inner: Drafter = NoDrafter()
        self._drafter = TrackedDrafter(self._inner, None)
        # Wraps each new drafter, for callers that count.
        self.wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter

    def prepare(self, options: GenerateOptions) -> DraftMode:
        """Make a drafter for these options if they changed; return the effective mode.

        Call before prefill, because neural drafters may observe it.
        """
        # Without rollback the model answers without drafts; front ends show the reason.
        mode: DraftMode = "off" if self._engine.no_draft_reason else options.draft
        if (mode, options.draft_tokens) != self._made_for:
            self._replace_drafter(mode, options.draft_tokens)
        return mode

    def _replace_drafter(self, mode: DraftMode, draft_tokens: int) -> None:
        self._target.run = self._target.run_model
        drafter = self._inner = self._create_drafter(mode, draft_tokens)
        auto = drafter if isinstance(drafter, AutoDrafter) else None
        self._drafter = TrackedDrafter(self.wrap(drafter), auto)
        self._made_for = mode, draft_tokens

    def drafter(
        self,
        options: GenerateOptions,
        history: Sequence[int],
        known_tokens: int | None = None,
        draft_context: Sequence[Sequence[int]] = (),
    ) -> Drafter:
        """Return a drafter that knows `history`, or at least its first `known_tokens` tokens.

        draft_context: token sequences to draft from, placed before the history.
        """
        mode = self.prepare(options)
        known = self._join_context(draft_context) if mode != "off" else []
        draft_only = len(known)
        known += history
        shared = common_prefix(self._drafter.tokens, known)
        if not self._drafter.rewind(shared):
            self._replace_drafter(mode, options.draft_tokens)
        if isinstance(self._inner, AutoDrafter):
            self._learned.weights.load_into(self._inner.model)
            if not self._may_use_texts(options, shared):
                self._inner.forget_texts()
        end = None if known_tokens is None else draft_only + known_tokens
        self._drafter.set_draft_only(draft_only)
        self._drafter.extend(known[len(self._drafter.tokens) : end])
        size = len(self._drafter.tokens)
        is_private = options.side_request or not options.may_store
        self._private = (options.conversation, size) if is_private else None
        return self._drafter

    def learn_answer(self) -> None:
        """Share the weights of the acceptance model after an answer."""
        if isinstance(self._inner, AutoDrafter):
            self._learned.weights.learn(self._inner.model)

    def _may_use_texts(self, options: GenerateOptions, shared: int) -> bool:
        """Return whether a request may be drafted for with all that the last one taught.

        shared: tokens at the start of both texts.
        """
        if self._private is None:
            return True
        conversation, size = self._private
        return shared >= size or conversation == options.conversation != ""

    def overlap(self, prompt: Sequence[int]) -> int:
        """Return the tokens of the prompt that the drafter knows, minus those it would forget.

        Only the history counts, because the draft context before it follows from the prompt.
        """
        known = self._drafter.tokens[self._drafter.draft_only :]
        shared = common_prefix(known, prompt)
        return shared - (len(known) - shared)

    def set_guide(self, guide: DraftGuide | None) -> None:
        """Set the grammar of the next answer, or None."""
        if isinstance(self._inner, AutoDrafter | FixedDrafter):
            self._inner.guide = guide

    @property
    def _planned(self) -> list[PlannedDrafter]:
        return self._inner.neural_drafters if isinstance(self._inner, AutoDrafter) else []

    @property
    def neural_seconds(self) -> float:
        """Time that neural drafters took since the drafter was made."""
        return sum(each.total_seconds for each in self._planned)

    def release(self) -> None:
        """Release neural drafters' state that does not stay with the history."""
        for each in self._planned:
            each.neural_drafter.release()

    def costs(self, context: int) -> Sequence[float] | None:
        """Return the planned costs of 1, 2, ... rows, None before a plain step was timed."""
        return self.curve.table(context) if self.curve.measured(1) else None

    def _join_context(self, draft_context: Sequence[Sequence[int]]) -> list[int]:
        """Join the draft context, each sequence closed by a stop token."""
        end = sorted(self._engine.tokens.stop_tokens)[:1]
        return [token for tokens in draft_context for token in (*tokens, *end)]

    def _create_drafter(self, mode: DraftMode, draft_tokens: int) -> Drafter:
        if mode == "off":
            return NoDrafter()
        if mode == "fixed":
            return FixedDrafter(draft_tokens)
        neural = [
            kind.create(self._engine, self._target)
            for name, kind in NEURAL_DRAFTERS.items()
            if (name == mode or (mode == "auto" and kind.in_auto))
            and not kind.unavailable(self._engine)
        ]
        return AutoDrafter(
            self.curve,
            stop_tokens=self._engine.tokens.stop_tokens,
            rerun_on_reject=self._engine.recurrent,
            answer_cache=self._learned.answer_cache,
            neural_drafters=neural,
            learned=self._learned.neural_drafters,
            ngrams=mode in ("auto", "ngram"),
            can_pipeline=lambda: self._target.alone,
        )


class TrackedDrafter:
    """A drafter and its known tokens. auto: the drafter if it can rewind."""

    def __init__(self, drafter: Drafter, auto: AutoDrafter | None) -> None:
        self._drafter = drafter
        self._auto = auto
        self.tokens: list[int] = []
        self.draft_only = 0  # leading tokens of the draft context
        self.propose = drafter.propose
        self.offer, self.take = drafter.offer, drafter.take
        self.observe = drafter.observe

    @property
    def pipelines(self) -> bool:
        return self._drafter.pipelines

    def rewind(self, length: int) -> bool:
        """Keep only the first `length` tokens; return False if that is impossible."""
        if length < len(self.tokens):
            if self._auto is None:
                return False
            self._auto.rewind(length)
            del self.tokens[length:]
        return True

    def set_draft_only(self, count: int) -> None:
        """Set how many tokens at the start are draft context."""
        self.draft_only = count
        if self._auto is not None:
            self._auto.draft_only_tokens = count

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._drafter.extend(tokens)
            self.tokens += tokens


# By the draft mode that uses only this one.
NEURAL_DRAFTERS: Mapping[DraftMode, type[NeuralDrafterBase]] = {
    "mtp": MtpDrafter,
    "model": ModelDrafter,
    "exit": ExitDrafter,
}


def check_mode(engine: Engine, mode: DraftMode) -> None:
    """Raise UsageError if `mode` needs a neural drafter that the engine lacks."""
    kind = NEURAL_DRAFTERS.get(mode)
    if kind is not None and (why := kind.unavailable(engine)):
        raise UsageError(f"--draft {mode}: {why}")
