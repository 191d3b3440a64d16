"""No line of another file keeps the completion helper busy."""

from __future__ import annotations

import itertools

import pytest

from akunu_py.completion.prompt.related import defined_names

UNITS = ["*", "&", "a", "a ", "* ", "(", ")", "a(", " a()", ":", "a.", "=", "def ", "\n", " ", "{"]


@pytest.mark.timeout(20)
def test_hostile_lines_take_linear_time() -> None:
    """An exponential expression never ends, and a quadratic one exceeds the time limit."""
    for head, unit, tail in itertools.product(("", " ", "/* "), UNITS, ("", "!", ";", " {", "(")):
        defined_names(head + unit * 20_000 + tail)


def test_lines_of_asterisks_hide_no_definition() -> None:
    banner = f"/* banner\n{'*' * 75}\n*/\nint add(int a) {{\n}}\nstatic char **split(void)\n"
    assert defined_names(banner) == {"add", "split"}
