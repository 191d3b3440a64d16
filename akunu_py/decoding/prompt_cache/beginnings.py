"""How likely a text that was asked for once is asked for again, by how it begins.

Texts that begin alike go on alike: an agent's conversations have one system prompt, its requests
for titles another. The estimate is that of prediction by partial matching: the share of those that
begin most like it, with a little of the share of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from akunu_py.decoding.token_ids import common_prefix

_LENGTH = 64  # tokens of a beginning
_REMEMBERED = 64  # beginnings
_OF_ALL = 0.5  # texts that the share of all counts for
_CONTINUED = 2  # texts that are taken for continued before there were any


class Beginnings:
    """How texts began, and how many of those that began so there were and were asked for again."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], tuple[int, int]] = {}  # the latest last

    def add(self, tokens: Sequence[int], *, again: bool) -> None:
        """A text was asked for: for the first time, or `again`, which is told once."""
        key = tuple(tokens[:_LENGTH])
        begun, continued = self._counts.pop(key, (0, 0))
        self._counts[key] = (begun + (not again), continued + again)
        if len(self._counts) > _REMEMBERED:
            del self._counts[next(iter(self._counts))]

    def chance(self, tokens: Sequence[int]) -> float:
        """How likely a text is continued that was added, and not again yet."""
        key = tuple(tokens[:_LENGTH])
        others = [
            (common_prefix(each, key), begun - (each == key), continued)
            for each, (begun, continued) in self._counts.items()
        ]
        nearest = max((shared for shared, begun, _ in others if begun), default=0)
        near = [each for each in others if 2 * each[0] >= nearest]
        of_all = _share(others, _CONTINUED, 1.0)
        return _share(near, _OF_ALL, of_all)


def _share(texts: Sequence[tuple[int, int, int]], weight: float, prior: float) -> float:
    begun, continued = (sum(each[at] for each in texts) for at in (1, 2))
    return (continued + weight * prior) / (max(begun, continued) + weight)
