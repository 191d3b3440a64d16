"""The drafter of a session, kept in step with its token history; which neural drafters it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from akunu_py.decoding.drafting.early_exit import ExitNetwork
from akunu_py.decoding.drafting.neural import ModelNetwork, MtpNetwork, Network
from akunu_py.decoding.learned import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import UsageError
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.fixed import FixedDrafter, NoDrafter
from akunu_py.ngram.networks import LearnedNetwork, PlannedNetwork
from akunu_py.types import Drafter, DraftGuide, DraftMode, DraftNetwork, GenerateOptions


class Drafting:
    """A session's drafter, kept from turn to turn, so that it keeps learning.

    Where the history was changed it is rewound to what is still true, if it can be (`auto`), or
    made again, as it is for other options.

    wrap: what a drafter is wrapped in when it is made, for those who count what it does.
    """

    def __init__(
        self,
        engine: Engine,
        target: Target,
        learned: LearnedState | None,
        beside: Drafting | None = None,
    ) -> None:
        """target: what is drafted for. beside: another session's; what passes and networks cost
        both learn."""
        self._engine = engine
        self._target = target
        self._memory = learned.memory if learned else None
        known = beside or learned
        self.curve: CostCurve = known.curve if known else CostCurve()
        self.networks: dict[str, LearnedNetwork] = known.networks if known else {}
        self._made_for: tuple[DraftMode, int] | None = None
        self._inner: Drafter = NoDrafter()  # what is wrapped and tracked
        self._drafter = TrackedDrafter(self._inner, None)
        self.wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter

    def prepare(self, options: GenerateOptions) -> DraftMode:
        """Makes a drafter for these options, where there is another one: before the target reads
        anything, because networks may want to see how it does. Returns how it drafts."""
        # A model that cannot be rolled back answers all the same; front ends say why it is slow.
        mode: DraftMode = "off" if self._engine.no_draft else options.draft
        if (mode, options.draft_tokens) != self._made_for:
            self._make(mode, options.draft_tokens)
        return mode

    def _make(self, mode: DraftMode, draft_tokens: int) -> None:
        self._target.run = self._target.run_model
        drafter = self._inner = self._new(mode, draft_tokens)
        auto = drafter if isinstance(drafter, AutoDrafter) else None
        self._drafter = TrackedDrafter(self.wrap(drafter), auto)
        self._made_for = mode, draft_tokens

    def drafter(
        self,
        options: GenerateOptions,
        history: Sequence[int],
        read: int | None = None,
        draft_context: Sequence[Sequence[int]] = (),
    ) -> Drafter:
        """A drafter that knows exactly `history`; while it is read, at least `read` tokens of it.

        draft_context: what else it drafts from, and the target never reads. It comes before the
        history, so what changes least should come first. Only what changed is learned again.
        """
        mode = self.prepare(options)
        known = self._set_apart(draft_context) if mode != "off" else []
        unread = len(known)
        known += history
        if not self._drafter.rewind(common_prefix(self._drafter.tokens, known)):
            self._make(mode, options.draft_tokens)
        end = None if read is None else unread + read
        self._drafter.set_unread(unread)
        self._drafter.extend(known[len(self._drafter.tokens) : end])
        return self._drafter

    def set_guide(self, guide: DraftGuide | None) -> None:
        """The grammar of the answer that is drafted for next, None where it has none."""
        if isinstance(self._inner, AutoDrafter | FixedDrafter):
            self._inner.guide = guide

    def set_alone(self, alone: bool) -> None:
        """Whether passes run ahead; see `Target.alone`."""
        if isinstance(self._inner, AutoDrafter):
            self._inner.alone = alone

    @property
    def _planned(self) -> list[PlannedNetwork]:
        return self._inner.networks if isinstance(self._inner, AutoDrafter) else []

    @property
    def network_seconds(self) -> float:
        """What networks took to draft, since the drafter was made."""
        return sum(each.total_seconds for each in self._planned)

    def release(self) -> None:
        """Gives back what networks have read that does not stay with the history."""
        for each in self._planned:
            each.network.forget()

    def costs(self, context: int) -> Sequence[float] | None:
        """What passes over 1, 2, ... rows cost at `context` tokens, as the planner reckons; None
        before a plain step was timed."""
        return self.curve.table(context) if self.curve.measured(1) else None

    def _set_apart(self, draft_context: Sequence[Sequence[int]]) -> list[int]:
        """The draft context, each sequence closed by a stop token, so that no draft runs on from
        one into the next or into the history."""
        end = sorted(self._engine.tokens.stop_tokens)[:1]
        return [token for tokens in draft_context for token in (*tokens, *end)]

    def _new(self, mode: DraftMode, draft_tokens: int) -> Drafter:
        if mode == "off":
            return NoDrafter()
        if mode == "fixed":
            return FixedDrafter(draft_tokens)
        return AutoDrafter(
            self.curve,
            stop_tokens=self._engine.tokens.stop_tokens,
            rerun_on_reject=self._engine.recurrent,
            memory=self._memory,
            networks=networks_for(self._engine, self._target, mode),
            learned=self.networks,
            ngrams=mode in ("auto", "ngram"),
        )


class TrackedDrafter:
    """A drafter, and the tokens that it knows. auto: itself, or what it wraps, if it can rewind."""

    def __init__(self, drafter: Drafter, auto: AutoDrafter | None) -> None:
        self._drafter = drafter
        self._auto = auto
        self.tokens: list[int] = []
        self.propose = drafter.propose
        self.observe = drafter.observe

    @property
    def pipelines(self) -> bool:
        return self._drafter.pipelines

    def rewind(self, length: int) -> bool:
        """Knows only the first `length` tokens then; False where it cannot forget the others."""
        if length < len(self.tokens):
            if self._auto is None:
                return False
            self._auto.rewind(length)
            del self.tokens[length:]
        return True

    def set_unread(self, count: int) -> None:
        """How many of all tokens, from the start, are draft context."""
        if self._auto is not None:
            self._auto.unread = count

    def extend(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._drafter.extend(tokens)
            self.tokens += tokens


# By the draft mode that has one draft alone.
NETWORKS: Mapping[DraftMode, type[Network]] = {
    "mtp": MtpNetwork,
    "model": ModelNetwork,
    "exit": ExitNetwork,
}


def check_mode(engine: Engine, mode: DraftMode) -> None:
    """Raise UsageError if `mode` asks for a neural drafter that the engine cannot have."""
    kind = NETWORKS.get(mode)
    if kind is not None and (why := kind.missing(engine)):
        raise UsageError(f"--draft {mode}: {why}")


def networks_for(engine: Engine, target: Target, mode: DraftMode) -> list[DraftNetwork]:
    """Make the neural drafters that `mode` uses."""
    return [
        kind.make(engine, target)
        for name, kind in NETWORKS.items()
        if (name == mode or (mode == "auto" and kind.in_auto)) and not kind.missing(engine)
    ]
