"""The thread that loads and runs a model, because MLX's streams are thread-local."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")
_SAVE_AFTER_S = 2.0  # idle time before saving
_WATCH_S = 5.0 if sys.platform == "darwin" else None  # only macOS reports memory pressure


class ModelThread(Generic[Request]):
    """A thread that calls `load`, `serve` for each request, then `unload`.

    idle: called while no request waits, with the seconds since the last one; returns the delay
    until its next call, or None. The callbacks handle their own exceptions; an escaping one ends
    the thread.
    """

    def __init__(
        self,
        name: str,
        *,
        load: Callable[[], object],
        serve: Callable[[Request], None],
        unload: Callable[[], None],
        idle: Callable[[float], float | None] = lambda seconds: None,
    ) -> None:
        self._load = load
        self._serve = serve
        self._unload = unload
        self._idle = idle
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.closing = threading.Event()  # stop without more work; `serve` has to check it
        # A daemon, because loading a model cannot be interrupted.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start loading, once. Requests may be queued before."""
        if self._thread.ident is None:
            self._thread.start()

    def put(self, request: Request) -> None:
        """Queue a request. Callable from any thread."""
        self._requests.put(request)

    @property
    def wanted(self) -> bool:
        """Whether a request waits or the thread is closing."""
        return not self._requests.empty() or self.closing.is_set()

    def close(self, timeout: float | None = None, *, drain: bool = False) -> bool:
        """Stop the thread, with `drain` after all requests. Returns False on timeout."""
        if not drain:
            self.closing.set()
        self._requests.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._load()
            while (request := self._next()) is not None:
                self._serve(request)
        finally:
            try:
                self._unload()
            finally:
                release_streams()

    def _next(self) -> Request | None:
        since = time.monotonic()
        pause = self._idle(0.0)
        while pause is not None:
            try:
                return self._requests.get(timeout=pause)
            except queue.Empty:
                pause = self._idle(time.monotonic() - since)
        return self._requests.get()


class Idle:
    """Idle work of a model thread: save prompt caches, then unload the model."""

    def __init__(
        self,
        save: Callable[[], bool],
        unload: Callable[[], None] = lambda: None,
        unload_s: float | None = None,
        watch_s: float | None = _WATCH_S,
    ) -> None:
        """save: returns whether there is more to save. unload_s, watch_s: None for never."""
        self._save = save
        self._unload = unload
        self._unload_s = unload_s
        self._watch_s = watch_s

    def __call__(self, seconds: float) -> float | None:
        if seconds < _SAVE_AFTER_S:
            return _SAVE_AFTER_S - seconds
        if self._save():
            return 0.0
        if self._unload_s is not None and seconds >= self._unload_s:
            self._unload()
            return None
        left = None if self._unload_s is None else self._unload_s - seconds
        return min((each for each in (left, self._watch_s) if each is not None), default=None)


def release_memory() -> None:
    """Free the memory of a model without references."""
    gc.collect()
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_cache()


def release_streams() -> None:
    """Free MLX's state for this thread, or the process may abort at exit (mlx PR 4373)."""
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_streams()
