"""The draft length planner."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

_NEGLIGIBLE = 0.01
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
    values = [0.0] * (count + 2)
    after = 0.0
    if ongoing:
        # Assume more copying at the lowest cost per token, as long as the last chance predicts.
        after = probabilities[-1]
        cheapest = min(cost / rows for rows, cost in enumerate(costs[: longest + 1], start=1))
        values[count] = min(1.0 / (1.0 - after), _MAX_FORESIGHT) * max(0.0, 1.0 - rate * cheapest)
        values[count + 1] = values[count]
    chances = [*probabilities, after]
    lengths = range(min(longest, count) + 1)
    charged = [rate * costs[length] for length in lengths]
    best_length = 0
    for start in range(count - 1, -1, -1):
        best = -inf
        reached = 1.0  # the chance that everything drafted so far is accepted
        tokens = 1.0
        rerun = 0.0
        choices = zip(lengths, charged, chances[start:], values[start + 1 :], strict=False)
        for length, charge, chance, value_after in choices:
            next_reached = reached * chance
            value = tokens - charge + next_reached * value_after - rerun
            if value > best:
                best, best_length = value, length
            if rerun_on_reject:
                next_charge = charged[min(length + 1, len(charged) - 1)]
                rerun += (reached - next_reached) * (next_charge - charged[0])
            tokens += next_reached
            reached = next_reached
            if reached < _NEGLIGIBLE:
                break
        values[start] = best
    return best_length, values
