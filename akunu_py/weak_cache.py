"""Results that are cached as long as a model or a tokenizer exists."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def cached_weakly(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Cache the result of `function` by its first argument, for as long as that exists."""
    results: dict[int, tuple[weakref.ref[Any], _Result]] = {}  # by id

    @functools.wraps(function)
    def cached(owner: Any, *others: Any) -> _Result:
        number = id(owner)  # an `nn.Module` is a dict, which has no hash
        if number not in results or results[number][0]() is not owner:
            reference = weakref.ref(owner, lambda _: results.pop(number, None))
            results[number] = reference, function(owner, *others)
        return results[number][1]

    return cached
