"""The draft length planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import sub, truediv

_MAX_FORESIGHT = 64.0  # tokens; a chance near 1 would promise more


def best_draft(
    probabilities: Sequence[float],
    costs: Sequence[float],
    rate: float,
    limit: int,
    *,
    ongoing: bool = False,
    rerun_on_reject: bool = False,
) -> tuple[int, list[float]]:
    """Return the best draft length from 0 to `limit`, and the value of each position.

    A value is the number of tokens above the long-run average, after 0, 1, ... right predictions.

    probabilities: of each prediction if all before it are right; there may be more than `limit`.
    costs: of a pass over 1, 2, ... rows; at least limit + 1 of them.
    rate: tokens per unit of cost in the long run.
    ongoing: more predictions like the last one would follow.
    rerun_on_reject: after a rejection the next pass repeats the accepted tokens.

    A pass over k draft tokens costs `costs[k]` and yields the accepted ones and the bonus. If the
    bonus matches too, the next pass continues with the same predictions; its value counts. Source:
    the renewal-reward theorem with the relative values of an average-reward Markov decision process
    (Howard 1960) for the states "the first j predictions were right"; any other state has value 0.
    """
    count = len(probabilities)
    longest = min(limit, len(costs) - 1)
    if not count or longest < 1:
        return 0, [1.0 - rate * costs[0]]
    charged = [rate * cost for cost in costs[: min(longest, count) + 1]]
    after = value = 0.0
    if ongoing:
        # Assume more copying at the lowest cost per token, as long as the last chance predicts.
        after = probabilities[-1]
        cheapest = min(map(truediv, costs, range(1, longest + 2)))
        value = min(1.0 / (1.0 - after), _MAX_FORESIGHT) * max(0.0, 1.0 - rate * cheapest)
    values = [value, value]
    # Tokens of this pass and value after it, by draft length.
    totals = [1.0 + after * value]
    gains: list[float] = []
    chances = [*probabilities, after]
    for start in range(count - 1, -1, -1):
        chance = chances[start]
        totals = [1.0 + chance * total for total in (value, *totals)]
        gains = list(map(sub, totals, charged))
        if rerun_on_reject:
            gains = list(map(sub, gains, _rerun_costs(chances[start:], charged)))
        value = max(gains)
        values.append(value)
    values.reverse()
    return gains.index(value), values


def _rerun_costs(chances: Sequence[float], charged: Sequence[float]) -> Iterator[float]:
    """Yield the expected cost of repeating accepted tokens, by draft length, in tokens.

    charged: cost of a pass over 1, 2, ... rows, in tokens.
    """
    reached, cost = 1.0, 0.0
    for length, chance in enumerate(chances, start=1):
        yield cost
        rejected = reached * (1.0 - chance)
        cost += rejected * (charged[min(length, len(charged) - 1)] - charged[0])
        reached -= rejected
