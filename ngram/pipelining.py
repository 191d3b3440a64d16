"""When plain steps are pipelined: the next one is launched before the previous one is read."""

from __future__ import annotations

from collections.abc import Sequence

from akunu_py.ngram.cost import CostCurve

# Prior chance of a draft after 1 to 8 or more plain steps in a row.
_REDRAFT_CHANCES = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.08)
_REDRAFT_RATE = 0.03
_LATE_DRAFT_LOSS = 0.5  # share of the full loss if a draft appears while the next step runs
_FIRST_TOKEN_CHANCE = 0.6  # acceptance of a draft's first token
# Discounts for a predicted draft, and for its first token's chance.
_PREDICTED_DISCOUNT, _FIRST_TOKEN_DISCOUNT = 0.75, 0.65


class Pipelining:
    """Decides whether the next plain step is pipelined, by the chance that a draft follows it."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._plain_steps = 0  # since the last draft
        self._redraft_chances = list(_REDRAFT_CHANCES)

    def plain_cost(
        self, costs: Sequence[float], pipelined: float, gain: float, chances: Sequence[float]
    ) -> float:
        """Return the expected cost of a plain step in seconds, at most the unpipelined time.

        It is the `pipelined` time, plus the expected loss if a draft appears while the next step
        runs. costs: by rows. gain: see `RecentGain`. chances: of the upcoming predictions.
        """
        curve = self._curve
        plain, two, three = costs[:3]
        chance = self._redraft_chances[min(self._plain_steps, len(_REDRAFT_CHANCES) - 1)]
        lost = _LATE_DRAFT_LOSS * chance * (gain - 1.0 + _FIRST_TOKEN_CHANCE)  # in tokens
        if len(chances) > 1 and curve.measured(2) and curve.measured(3):
            first, then = chances[:2]
            if then * pipelined > gain * (two - pipelined):  # worth drafting after this step
                # Drafting now costs one more row and the pipeline gap, but saves the step.
                saved = gain * (2.0 - (plain + three - two) / pipelined)
                promised = _FIRST_TOKEN_DISCOUNT * then - 1.0 + saved
                lost = max(lost, _PREDICTED_DISCOUNT * first * promised)
        lost *= pipelined / gain
        return min(plain, pipelined + lost)

    def add_plan(self, *, drafts: bool) -> None:
        """Learn from a plan how often a draft follows a run of plain steps of this length."""
        if self._plain_steps:
            place = min(self._plain_steps, len(_REDRAFT_CHANCES)) - 1
            self._redraft_chances[place] += _REDRAFT_RATE * (drafts - self._redraft_chances[place])

    def add_pass(self, *, drafted: bool) -> None:
        """Count the plain steps since the last pass with a draft."""
        self._plain_steps = 0 if drafted else self._plain_steps + 1
