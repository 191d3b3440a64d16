"""A target's passes, without a session."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator

from akunu_py.decoding.generate.decode import Decoding
from akunu_py.decoding.target import Target
from akunu_py.types import Drafter, Piece


def decode(target: Target, drafter: Drafter, limit: int, stop: Collection[int]) -> Generator[Piece]:
    """Yield the pieces of `Decoding`; closing the generator closes it."""
    decoding = Decoding(target, drafter, limit, stop)
    with contextlib.closing(decoding):
        while decoding.limit > 0:
            yield decoding.step()
