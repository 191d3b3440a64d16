"""Progress on stderr: a bar for each phase on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from akunu_py.models.store.progress import Meter, Progress
from akunu_py.text import on_one_line, say

_INTERVAL_S = 10.0


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows (phase, bytes done, total bytes)."""
    with watched() as on_progress:
        yield Meter(on_progress)


@contextlib.contextmanager
def watched() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a Progress."""
    shown = _Bars() if sys.stderr.isatty() else _Lines()
    try:
        yield shown
    finally:
        shown.close()


class _Bars:
    """One bar for each phase; a phase of unknown size is a line."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            self.close()
            self._phase = progress.phase
            if not progress.total:
                say(f"{progress.phase} ...", error=True)
        if self._bar is None and progress.total:
            self._bar = tqdm(
                total=progress.total,
                initial=progress.done,
                desc=on_one_line(progress.phase),
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(progress.speed()), refresh=False)
            self._bar.update(min(progress.done, progress.total) - self._bar.n)
            if progress.stalled:
                self._bar.refresh()  # update() redraws only after progress

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Lines:
    """A line when a phase begins, and then every ten seconds."""

    def __init__(self) -> None:
        self._phase = ""
        self._printed_at = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase = progress.phase
            say(f"{progress.phase} ...", error=True)
        elif not progress.total or now - self._printed_at < _INTERVAL_S:
            return
        else:
            say(progress.describe(separator=", "), error=True)
        self._printed_at = now

    def close(self) -> None:
        pass
