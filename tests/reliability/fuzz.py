"""Generated inputs for the fuzzing tests, the same in every run.

`explore` runs a check over inputs from a fixed seed and shrinks one that fails. `lengths` gives a
test a short form for every run and a long form for `-m slow`.
"""

import contextlib
import copy
import resource
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from akunu_py.errors import AkunuError

LONGEST = 1200  # characters of an error
_BYTES_OF_MAXRSS = 1024 if sys.platform == "linux" else 1  # the unit of getrusage
MEGABYTE = 1 << 20
LONGER = 25  # times as many examples in the long form


def peak_mb(of: int = resource.RUSAGE_SELF) -> float:
    """Return the peak memory of this process, or of its largest ended child."""
    return resource.getrusage(of).ru_maxrss * _BYTES_OF_MAXRSS / (1 << 20)


@contextlib.contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fail if Python and numpy allocate more than `limit` bytes at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


# Ends of number types, values that are no numbers, surrogates, control codes.
NUMBERS = st.one_of(
    st.integers(-2, 70_000),
    st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64, -(2**63), 10**400, -(10**400)]),
    st.sampled_from([0.5, -0.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "\x1b[2J", "\x1b]52;c;eA==\x07", "\ud800", "\0", "../x", "a\nb", "9" * 99]
    ),
    st.text(st.characters(), max_size=12),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)


def json_like(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Return a strategy for JSON values. Names in objects come from `keys` or are random."""
    names = st.one_of(keys, TEXTS)
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
        max_leaves=24,
    )


def refused(error: AkunuError) -> AkunuError:
    """Return `error` after checking that it is one short line without control codes."""
    text = str(error)
    assert len(text.splitlines()) == 1, text
    assert len(text) < LONGEST, text
    assert not set(text) & set("\x1b\x00\x07"), text
    assert "hf_secr" not in text, text
    return error


@contextlib.contextmanager
def clear() -> Iterator[list[AkunuError]]:
    """Catch an AkunuError, if it is one short line, and add it to the list."""
    errors: list[AkunuError] = []
    try:
        yield errors
    except AkunuError as error:
        errors.append(refused(error))


def lengths(quick: int) -> pytest.MarkDecorator:
    """Parametrize `examples` with `quick`, and with many more for slow tests."""
    marks = [pytest.mark.slow, pytest.mark.timeout(3600)]
    long = pytest.param(quick * LONGER, marks=marks, id="long")
    return pytest.mark.parametrize("examples", [pytest.param(quick, id="quick"), long])


def explore(check: Callable[[Any], None], examples: int, inputs: st.SearchStrategy[Any]) -> None:
    """Call `check` with `examples` values of `inputs`, from a fixed seed."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def run(value: Any) -> None:
        check(value)

    run()


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """Replace, add or delete one to three values in the valid JSON value `whole`."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        if draw(st.booleans()):
            container[key] = draw(json_like(st.sampled_from([str(key), "id", "text"])))
        elif isinstance(container, dict) and draw(st.booleans()):
            container[draw(TEXTS)] = container[key]
        else:
            del container[key]
    return value


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Change one to four places of `whole`: bits, bytes, lengths, pieces cut, copied or moved."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(0, 40))
        kind = draw(st.integers(0, 5))
        if kind == 0 and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            data[at : at + length] = draw(st.binary(max_size=40))
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length]
        elif kind == 4:
            number = draw(st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]))
            data[at : at + 8] = struct.pack("<Q", number)
        else:
            other = draw(st.integers(0, max(0, len(data) - 1)))
            data[at:at] = data[other : other + length]
    return bytes(data)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value as (container, key)."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(inner)
