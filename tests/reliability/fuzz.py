"""How the fuzzing tests look for inputs: the same ones each time, few by default, many if asked.

`explore` runs a check over inputs that Hypothesis makes up from a fixed seed and shrinks where one
fails. `lengths` gives a test its two forms: a short one for every run, a long one under `-m slow`.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from akunu_py.errors import AkunuError

LONGEST = 1200  # characters of an error's line
_BYTES_OF_MAXRSS = 1024 if sys.platform == "linux" else 1  # the unit of getrusage
LONGER = 10  # times as many examples in the long run
# By the module of tests: how many inputs it tried, and how many seconds the longest took.
TRIED: Counter[str] = Counter()
LONGEST_S: dict[str, float] = {}


def peak_mb(of: int = resource.RUSAGE_SELF) -> float:
    """The most memory that this process held, or the largest of its ended children."""
    return resource.getrusage(of).ru_maxrss * _BYTES_OF_MAXRSS / (1 << 20)


# What fits nowhere: the ends of number types, what is no number, half characters, control codes.
NUMBERS = st.one_of(
    st.integers(-2, 70_000),
    st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64, -(2**63), 10**400, -(10**400)]),
    st.sampled_from([0.5, -0.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "\x1b[2J", "\x1b]52;c;eA==\x07", "\ud800", "\0", "../x", "a\nb", "9" * 99]
    ),
    st.text(st.characters(), max_size=12),  # halves of characters too
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)


def json_like(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """What a JSON file may hold; the names in its objects come from `keys`, or are made up."""
    names = st.one_of(keys, TEXTS)
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
        max_leaves=24,
    )


def refused(error: AkunuError) -> AkunuError:
    """The error, which is one short line that a terminal and a log may see."""
    text = str(error)
    assert len(text.splitlines()) == 1, text
    assert len(text) < 1000, text
    assert not set(text) & set("\x1b\x00\x07"), text
    assert "hf_secr" not in text, text
    return error


@contextlib.contextmanager
def clear() -> Iterator[None]:
    """Lets our own errors pass, if they say what is wrong in one line."""
    said = "nothing"
    try:
        yield
    except AkunuError as error:
        said = str(error)
    assert 0 < len(said) < LONGEST
    assert "\n" not in said


def lengths(quick: int) -> pytest.MarkDecorator:
    """Parametrises `examples`: `quick` of them, or many more where slow tests are asked for."""
    marks = [pytest.mark.slow, pytest.mark.timeout(3600)]  # making inputs up takes most of the time
    long = pytest.param(quick * LONGER, marks=marks, id="long")
    return pytest.mark.parametrize("examples", [pytest.param(quick, id="quick"), long])


@contextlib.contextmanager
def counted(module: str) -> Iterator[None]:
    """Counts an input that a module of tests tries, and how long it takes."""
    start = time.perf_counter()
    yield
    TRIED[module] += 1
    LONGEST_S[module] = max(time.perf_counter() - start, LONGEST_S.get(module, 0.0))


def explore(check: Callable[[Any], None], examples: int, inputs: st.SearchStrategy[Any]) -> None:
    """Calls `check` with that many of `inputs`, from a fixed seed."""

    def count(value: Any) -> None:
        with counted(check.__module__):
            check(value)

    run = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(given(inputs)(count))
    run()


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """`whole`, a good JSON value, with one to three places in it replaced, added or taken away."""
    value = _copy(whole)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        container, key = places[draw(st.integers(0, len(places) - 1))]
        if draw(st.booleans()):
            container[key] = draw(json_like(st.sampled_from([str(key), "id", "text"])))
        elif isinstance(container, dict) and draw(st.booleans()):
            container[draw(TEXTS)] = container[key]
        else:
            del container[key]
        if not list(_places(value)):
            break
    return value


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with one to four places changed: bits, bytes, pieces cut out or said twice."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(0, 40))
        kind = draw(st.integers(0, 3))
        if kind == 0 and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            data[at : at + length] = draw(st.binary(max_size=40))
        elif kind == 2:
            del data[at : at + length]
        else:
            data[at:at] = data[at : at + length]
    return bytes(data)


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
