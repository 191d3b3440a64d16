"""What the parsers of all commands share."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. Options are never guessed from their beginnings."""

    def __init__(self, **options: object) -> None:
        super().__init__(**({"allow_abbrev": False} | options))  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see: {self.prog} --help\n")


def positive(text: str) -> int:
    """An option's value that must be a whole number above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return value
