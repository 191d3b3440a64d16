"""Test parameters that are left to the slow tests."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return `values` as parameters that are marked slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def cover(*options: Iterable[Any]) -> list[Any]:
    """Return all combinations of `options`; all but a minimal set are marked slow.

    The minimal set contains every option at least once.
    """
    lists = [list(each) for each in options]
    chosen = {tuple(place % len(each) for each in lists) for place in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(each[place] for each, place in zip(lists, places, strict=True)),
            marks=() if places in chosen else pytest.mark.slow,
        )
        for places in itertools.product(*(range(len(each)) for each in lists))
    ]
