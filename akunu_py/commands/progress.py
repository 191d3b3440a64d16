"""A progress bar on stderr: one a phase."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that is told (phase, bytes done, bytes in all) and draws it.

    Where stderr is not a terminal, each phase is one plain line.
    """
    bar: tqdm[None] | None = None
    current = ""

    def show(phase: str, done: int, total: int) -> None:
        nonlocal bar, current
        if phase != current:
            current = phase
            if bar is not None:
                bar.close()
            bar = None
            if sys.stderr.isatty():
                bar = tqdm(total=total, desc=phase, unit="B", unit_scale=True, dynamic_ncols=True)
            else:
                print(f"{phase} ...", file=sys.stderr)
        if bar is not None:
            bar.update(min(done, total) - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
