"""Errors and warnings on stderr, a line each.

Names and texts in them come from files and from models: what a terminal might obey is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from akunu_py.tui.text import on_one_line


def tell_warnings(warnings: Iterable[str]) -> None:
    """Prints each warning in a line of its own."""
    for warning in warnings:
        print(f"akunu: {on_one_line(warning)}", file=sys.stderr)
