"""Limits of the output of tools."""

from __future__ import annotations

from akunu_py.mcp.output import limit_for, shorten


def test_a_long_output_keeps_its_start_and_its_end() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 50 + "b" * 50, 50) == f"{'a' * 40}\n[50 characters left out]\n{'b' * 10}"
    assert (limit_for(0), limit_for(8192), limit_for(1 << 20)) == (2000, 8192, 50_000)
