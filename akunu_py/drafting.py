"""Which drafter a session drafts with, and keeping it in step with the session's timeline."""

from __future__ import annotations

from collections.abc import Sequence

from akunu_py.engine import Engine
from akunu_py.experience import Experience
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.fixed import FixedDrafter
from akunu_py.ngram.off import NoDrafter
from akunu_py.types import Drafter, DraftMode, GenerateOptions

# Plain steps in a row before they run ahead. Off: at once. Auto: replays of chat lose 3 % to steps
# that are under way when a draft comes up, 0.4 % with this patience. Fixed: never, as akunu does.
_PATIENCE: dict[DraftMode, int | None] = {"off": 0, "auto": 4, "fixed": None}


class Drafting:
    """A session's drafter: kept from turn to turn while the timeline only grows, so that it goes
    on learning; made anew where the timeline was changed or other options are asked for."""

    def __init__(self, engine: Engine, experience: Experience | None) -> None:
        self._engine = engine
        self._memory = experience.memory if experience else None
        self._curve = experience.curve if experience else CostCurve()
        self._made_for: tuple[DraftMode, int] | None = None
        self._drafter = _Told(NoDrafter())
        self.patience: int | None = 0

    def drafter(self, options: GenerateOptions, timeline: Sequence[int]) -> Drafter:
        """A drafter that knows exactly `timeline`."""
        # A model that cannot be rolled back answers all the same; front ends say why it is slow.
        mode: DraftMode = "off" if self._engine.no_draft else options.draft
        wanted = (mode, options.draft_tokens)
        told = self._drafter.tokens
        if wanted != self._made_for or told != timeline[: len(told)]:
            self._drafter, self._made_for = _Told(self._new(mode, options.draft_tokens)), wanted
        self._drafter.extend(timeline[len(self._drafter.tokens) :])
        self.patience = _PATIENCE[mode]
        return self._drafter

    def _new(self, mode: DraftMode, draft_tokens: int) -> Drafter:
        if mode == "off":
            return NoDrafter()
        if mode == "fixed":
            return FixedDrafter(draft_tokens)
        return AutoDrafter(
            self._curve,
            stop_tokens=self._engine.stop_tokens,
            rerun_on_reject=self._engine.recurrent,
            memory=self._memory,
        )


class _Told:
    """A drafter, and what it was told."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.tokens: list[int] = []
        self.propose = drafter.propose
        self.feedback = drafter.feedback

    def extend(self, tokens: Sequence[int]) -> None:
        self._drafter.extend(tokens)
        self.tokens += tokens
