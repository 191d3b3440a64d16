"""The drafters of a model: a pool of those that no request uses, which keep what they learned."""

from collections.abc import Callable, Sequence

from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.drafters.neural import (
    ExitDrafter,
    FirstLayers,
    ModelDrafter,
    NeuralDrafterBase,
    find_exit,
)
from akunu_py.engine.drafters.states import HeadDrafter, published_drafter
from akunu_py.engine.engine import Engine
from akunu_py.engine.model.drafters import DraftModel, PublishedDrafter
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.target import Target
from akunu_py.errors import UsageError
from akunu_py.ngram.acceptance_model import SharedWeights
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.fixed import FixedDrafter, NoDrafter
from akunu_py.ngram.neural_plan import DraftPlan
from akunu_py.types import Drafter, DraftGuide, DraftMode, GenerateOptions, PassCosts

_MOST_FREE = 16  # drafters


class TrackedDrafter:
    """A drafter of one history. If that changes, `auto` rewinds; others are made again."""

    def __init__(
        self,
        create: Callable[[], tuple[Drafter, Drafter]] = lambda: (NoDrafter(), NoDrafter()),
        neural: Sequence[NeuralDrafterBase] = (),
        made_for: tuple[DraftMode, int] = ("off", 0),
        weights: SharedWeights | None = None,
    ) -> None:
        """create: returns a drafter, and the same, wrapped. made_for: mode and draft tokens."""
        self.made_for = made_for
        self.neural = neural
        self.context: list[int] = []  # draft context of the request
        # Conversation and number of tokens of the last request that must not be stored.
        self._private: tuple[str, int] | None = None
        self._seconds_before = 0.0
        self._create = create
        self._weights = weights
        self._restart()

    def _restart(self) -> None:
        self._inner, drafter = self._create()
        self.auto = self._inner if isinstance(self._inner, AutoDrafter) else None
        self.tokens: list[int] = []
        self.draft_only = 0  # leading tokens of the draft context
        self._drafter = drafter
        self.propose, self.offer, self.take = drafter.propose, drafter.offer, drafter.take
        self.observe = drafter.observe

    @property
    def pipelines(self) -> bool:
        return self._drafter.pipelines

    @property
    def drafting_cost(self) -> float:
        """Cost of the neural draft of the last offer."""
        return self.auto.drafting_cost if self.auto else 0.0

    def plan_neural(self, limit: int, known: PassCosts) -> DraftPlan | None:
        """Return the best neural draft after the last `offer`, without drafting."""
        return self.auto.plan_neural(limit, known) if self.auto and self.neural else None

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._drafter.extend(tokens)
            self.tokens += tokens

    def follow(self, options: GenerateOptions, prompt: Sequence[int], known: int) -> None:
        """Learn the draft context and the first `known` tokens of `prompt`."""
        if self.auto is not None and self._weights is not None:
            self._weights.load_into(self.auto.model)
        history = [*self.context, *prompt]
        shared = common_prefix(self.tokens, history)
        if shared < len(self.tokens):
            if self.auto is None:
                self._restart()
            else:
                self.auto.rewind(shared)
                del self.tokens[shared:]
        self.draft_only = len(self.context)
        if self.auto is not None:
            self.auto.draft_only_tokens = self.draft_only
            if not self._may_use_texts(options, shared):
                self.auto.forget_texts()
        self.extend(history[len(self.tokens) : self.draft_only + known])
        is_private = options.side_request or not options.may_store
        self._private = (options.conversation, len(self.tokens)) if is_private else None

    def _may_use_texts(self, options: GenerateOptions, shared: int) -> bool:
        """Return whether the last request's texts may be used. shared: common first tokens."""
        if self._private is None:
            return True
        conversation, size = self._private
        return shared >= size or conversation == options.conversation != ""

    def overlap(self, prompt: Sequence[int]) -> int:
        """Return the tokens of the prompt that the drafter knows, minus those it would forget.

        Only the history counts, because the draft context before it follows from the prompt.
        """
        known = self.tokens[self.draft_only :]
        shared = common_prefix(known, prompt)
        return shared - (len(known) - shared)

    def begin_answer(self, guide: DraftGuide | None, *, branches: bool) -> None:
        """Set the grammar of the next answer. branches: its drafts may be token trees."""
        if isinstance(self._inner, AutoDrafter | FixedDrafter):
            self._inner.guide = guide
        if self.auto is not None:
            self.auto.branches = branches

    def share_weights(self) -> None:
        """Share the weights of the acceptance model after an answer."""
        if self.auto is not None and self._weights is not None:
            self._weights.learn(self.auto.model)

    @property
    def neural_seconds(self) -> float:
        """Time that neural drafters took for this request."""
        return self._total_seconds - self._seconds_before

    @property
    def _total_seconds(self) -> float:
        return sum(each.total_seconds for each in self.auto.neural_drafters) if self.auto else 0.0

    def attach(self, target: Target) -> None:
        """Draft for another request from now on."""
        self._seconds_before = self._total_seconds
        for each in self.neural:
            each.attach(target)
        target.followers = self.neural

    def release(self) -> None:
        """Release neural drafters' state that does not stay with the history."""
        for each in self.neural:
            each.release()


class DrafterPool:
    """The drafters of a model. Each request takes one and gives it back."""

    def __init__(self, engine: Engine, learned: UnsavedState) -> None:
        self._engine = engine
        self._learned = learned
        self._free: list[TrackedDrafter] = []  # the last one given back is last
        # Wraps each new drafter, for callers that count.
        self.wrap: Callable[[Drafter, Target], Drafter] = lambda drafter, target: drafter

    def take(
        self,
        target: Target,
        options: GenerateOptions,
        prompt: Sequence[int],
        draft_context: Sequence[Sequence[int]] = (),
    ) -> TrackedDrafter:
        """Return the free drafter that knows `prompt` best, or a new one.

        Call before the prefill, because neural drafters observe it. draft_context: token sequences
        to draft from, placed before the prompt.
        """
        # Without rollback the model answers without drafts; front ends show the reason.
        mode: DraftMode = "off" if self._engine.no_draft_reason else options.draft
        made_for = mode, options.draft_tokens
        fitting = [each for each in self._free if each.made_for == made_for]
        if fitting:
            drafter = max(fitting, key=lambda each: each.overlap(prompt))
            self._free.remove(drafter)
        else:
            drafter = self._create(target, mode, options.draft_tokens)
        drafter.attach(target)
        drafter.context = []
        if mode != "off":
            end = sorted(self._engine.tokens.stop_tokens)[:1]  # closes each sequence
            drafter.context = [token for tokens in draft_context for token in (*tokens, *end)]
        return drafter

    def give_back(self, drafter: TrackedDrafter) -> None:
        """Keep a drafter for later requests."""
        drafter.release()
        self._free = [*self._free[1 - _MOST_FREE :], drafter]

    def trim(self, most: int) -> None:
        """Drop free drafters, whose indexes take memory, except the `most` last ones."""
        del self._free[: len(self._free) - most]

    def _create(self, target: Target, mode: DraftMode, draft_tokens: int) -> TrackedDrafter:
        modes: list[DraftMode] = ["mtp", "model"] if mode == "auto" else [mode]
        found = [_create_neural(each, self._engine, target) for each in modes]
        neural = [each for each in found if each is not None]

        def create() -> tuple[Drafter, Drafter]:
            drafter: Drafter
            if mode == "off":
                drafter = NoDrafter()
            elif mode == "fixed":
                drafter = FixedDrafter(draft_tokens)
            else:
                drafter = AutoDrafter(
                    self._learned.curve,
                    stop_tokens=self._engine.tokens.stop_tokens,
                    rerun_on_reject=self._engine.recurrent,
                    answer_cache=self._learned.answer_cache,
                    neural_drafters=neural,
                    learned=self._learned.neural_drafters,
                    ngrams=mode in ("auto", "ngram"),
                )
            return drafter, self.wrap(drafter, target)

        return TrackedDrafter(create, neural, (mode, draft_tokens), self._learned.weights)


def _create_neural(mode: DraftMode, engine: Engine, target: Target) -> NeuralDrafterBase | None:
    draft, head = engine.draft_model, engine.mtp_head
    if mode == "mtp" and head is not None:
        return HeadDrafter(head.chain, target, "mtp", head.relative_cost)
    if mode == "model" and isinstance(draft, PublishedDrafter):
        return published_drafter(draft, target)
    if mode == "model" and isinstance(draft, DraftModel):
        return ModelDrafter(draft, target)
    if mode == "exit" and isinstance(layers := find_exit(engine.model, engine), int):
        return ExitDrafter(FirstLayers(engine.model, layers), target)
    return None


def describe_drafters(engine: Engine, learned: UnsavedState) -> tuple[str, tuple[float, ...]]:
    """Return what drafts for an engine, and the acceptance of its neural drafter by position."""
    if engine.no_draft_reason:
        return f"nothing: {engine.no_draft_reason}", ()
    draft = engine.draft_model
    name = f"draft model {draft.name}" if draft else "MTP head" if engine.mtp_head else ""
    if isinstance(draft, PublishedDrafter):
        name = f"{draft.name} ({draft.model.kind})"
    if not name:
        return "n-grams", ()
    known = learned.neural_drafters.get(draft.key if draft else "mtp")
    acceptance = known.expected if known is not None and known.timed else ()
    return f"n-grams and {name}", tuple(round(chance, 3) for chance in acceptance)


def check_mode(engine: Engine, mode: DraftMode) -> None:
    """Raise UsageError if `mode` needs a neural drafter that the engine lacks."""
    why: str | int = ""
    if mode == "mtp":
        why = engine.no_mtp_head_reason
    elif mode == "model" and engine.draft_model is None:
        why = "name one with --draft-model, or draft_model in settings"
    elif mode == "exit":
        why = find_exit(engine.model, engine)
    if isinstance(why, str) and why:
        raise UsageError(f"--draft {mode}: {why}")
