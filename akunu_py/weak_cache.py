"""Cache a function's result for each model or tokenizer, until that object is deleted."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def cached_weakly(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Call `function` once per first argument, and return that result on later calls.

    Other arguments are only used by the first call. An entry does not keep its object alive.
    """
    results: dict[int, tuple[weakref.ref[Any], _Result]] = {}  # by id

    @functools.wraps(function)
    def cached(owner: Any, *others: Any) -> _Result:
        number = id(owner)  # an `nn.Module` is a dict, which has no hash
        if number not in results or results[number][0]() is not owner:
            reference = weakref.ref(owner, lambda _: results.pop(number, None))
            results[number] = reference, function(owner, *others)
        return results[number][1]

    return cached
