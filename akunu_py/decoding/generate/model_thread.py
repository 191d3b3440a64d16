"""The thread that owns a model: MLX's streams are thread-local, so it loads and runs the model."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")
_SAVE_AFTER_S = 2.0  # without a request it looks as if nobody was about to ask more
_WATCH_S = 5.0 if sys.platform == "darwin" else None  # where the system tells how short memory is


class ModelThread(Generic[Request]):
    """A thread that calls `load`, then `serve` with one request after the other, then `unload`.

    idle: called while no request waits, with the seconds since the last one was served; returns
    after how many it is to be called again, None for not before the next request was served.
    All four turn their exceptions into messages themselves: one that escapes ends the thread.
    closing: set when the thread shall end without more work; `serve` has to look at it.
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
        self.closing = threading.Event()
        # A daemon, because a model that is being loaded cannot be interrupted.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins to load, unless it has. Requests may be put before."""
        if self._thread.ident is None:
            self._thread.start()

    def put(self, request: Request) -> None:
        """Queues a request. May be called from any thread."""
        self._requests.put(request)

    @property
    def wanted(self) -> bool:
        """Whether there is something to do: a request waits, or the thread shall end."""
        return not self._requests.empty() or self.closing.is_set()

    def close(self, timeout: float | None = None, *, drain: bool = False) -> bool:
        """Ends the thread: at once, or with `drain` when all requests are served.

        False where it is still busy after `timeout` seconds (None: waits for ever).
        """
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
        """The next request, None at the end."""
        since = time.monotonic()
        pause = self._idle(0.0)
        while pause is not None:
            try:
                return self._requests.get(timeout=pause)
            except queue.Empty:
                pause = self._idle(time.monotonic() - since)
        return self._requests.get()


class Idle:
    """What a thread does while nobody asks: it saves what was read, then unloads the model.

    save: saves something, and returns whether there may be more; called again every `watch_s`
    seconds, because it also gives memory back where the system is short of it; None for once.
    unload: called when nobody asked for `unload_s` seconds, None for never; the next request has to
    load the model again.
    """

    def __init__(
        self,
        save: Callable[[], bool],
        unload: Callable[[], None] = lambda: None,
        unload_s: float | None = None,
        watch_s: float | None = _WATCH_S,
    ) -> None:
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
    """Gives back the memory of a model that nothing refers to any more."""
    gc.collect()
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_cache()


def release_streams() -> None:
    """Gives back what MLX keeps for this thread, before it ends; without it the program may abort
    at its end (github.com/ml-explore/mlx/pull/4373)."""
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_streams()
