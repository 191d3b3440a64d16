"""Warnings on stderr, in the form of our errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def tell_warnings(warnings: Iterable[str]) -> None:
    """Prints each warning in a line of its own."""
    for warning in warnings:
        print(f"akunu: {warning}", file=sys.stderr)
