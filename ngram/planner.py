"""How many tokens to draft, 0 included."""

from __future__ import annotations

from collections.abc import Sequence

_NEGLIGIBLE = 0.01
_FORESIGHT = 64.0  # tokens; a chance near 1 promises more than it can know


def choose_length(
    probabilities: Sequence[float],
    costs: Sequence[float],
    rate: float,
    limit: int,
    *,
    ongoing: bool = False,
    rerun_on_reject: bool = False,
) -> int:
    """The draft length from 0 to `limit` that earns most; see `best_draft`."""
    return best_draft(
        probabilities, costs, rate, limit, ongoing=ongoing, rerun_on_reject=rerun_on_reject
    )[0]


def best_draft(
    probabilities: Sequence[float],
    costs: Sequence[float],
    rate: float,
    limit: int,
    *,
    ongoing: bool = False,
    rerun_on_reject: bool = False,
) -> tuple[int, list[float]]:
    """The draft length from 0 to `limit` that earns most, and how many tokens more than on the long
    run are earned from where the first 0, 1, ... guesses were right.

    probabilities: for each position of the longest possible draft, that its token is accepted,
        given that those before it were. They may reach beyond `limit`: what is not drafted now
        can be drafted by the next pass.
    costs: of a pass over 1, 2, ... rows; at least limit + 1 of them.
    rate: tokens per unit of cost that the generation earns on the long run.
    ongoing: there would have been more guesses like the last one.
    rerun_on_reject: after a rejection the accepted tokens are rows of the next pass too.

    A pass over k drafted tokens costs `costs[k]`, and it yields the accepted ones and the bonus.
    When all are accepted and the bonus is the next guess too, the following pass starts
    further along the same guesses; what it earns there is counted, so that nothing is drafted
    early that is drafted cheaper later. Source: the renewal-reward theorem, with the relative
    values of an average-reward Markov decision process (Howard 1960) for the states "the first j
    guesses were right"; the state off the guesses has value 0.
    """
    count = len(probabilities)
    longest = min(limit, len(costs) - 1)
    if not count or longest < 1:
        return 0, [1.0 - rate * costs[0]]
    values = [0.0] * (count + 2)
    after = 0.0
    if ongoing:
        # Copied at the cheapest cost per token for as long as the last guess's chance promises.
        after = probabilities[-1]
        cheapest = min(cost / rows for rows, cost in enumerate(costs[: longest + 1], start=1))
        values[count] = min(1.0 / (1.0 - after), _FORESIGHT) * max(0.0, 1.0 - rate * cheapest)
        values[count + 1] = values[count]
    charged = [rate * cost for cost in costs[: min(longest, count) + 1]]
    last = len(charged) - 1
    best_length = 0
    for start in range(count - 1, -1, -1):
        best = -float("inf")
        reached = 1.0  # the chance that everything drafted so far is accepted
        tokens = 1.0
        rerun = 0.0
        for length in range(min(longest, count - start) + 1):
            here = start + length
            next_reached = reached * (probabilities[here] if here < count else after)
            value = tokens - charged[length] + next_reached * values[here + 1] - rerun
            if value > best:
                best, best_length = value, length
            if rerun_on_reject:
                rerun += (reached - next_reached) * (charged[min(length + 1, last)] - charged[0])
            tokens += next_reached
            reached = next_reached
            if reached < _NEGLIGIBLE:
                break
        values[start] = best
    return best_length, values
