"""The conversation store in a thread of its own, so that the chat never waits for the disk.

`save` returns at once: a new message and the end of an answer are written now, an answer that grows
once a second. What could not be written stays queued and is tried again until it can, which
`SavingFailed` and `SavingResumed` report. Everything else is awaited with `call`, and finds what
was queued before.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from textual.message import Message as TextualMessage

from akunu_py.chats.store import ConversationStore
from akunu_py.chats.tree import ChatMessage
from akunu_py.errors import ConversationError, describe

Result = TypeVar("Result")

_INTERVAL_S = 1.0  # between two states of an answer that grows
_RETRY_S = 5.0


@dataclass
class SavingFailed(TextualMessage):
    """Conversations are not saved for now, for the reason `error`."""

    error: str


@dataclass
class SavingResumed(TextualMessage):
    """Everything is saved again."""


@dataclass
class StoreWarning(TextualMessage):
    """Something was wrong with the database, and was dealt with."""

    text: str


class StoreThread:
    """Saves conversations in the database at `path`. Call it from the app's thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._post: Callable[[TextualMessage], object] = lambda message: None
        self._wake = threading.Condition()
        # What is to be written, in this order: a message may be the parent of a later one.
        self._unwritten: dict[tuple[str, ...], Callable[[ConversationStore], object]] = {}
        self._known: set[tuple[str, ...]] = set()  # was queued before
        self._due: float | None = None  # when to write; None where there is nothing to write
        self._retry = 0.0  # nothing is written before that time, unless a call needs it
        self._calls: deque[tuple[Future[Any], Callable[[ConversationStore], Any]]] = deque()
        self._closing = False
        self._store: ConversationStore | None = None
        self.error: str | None = None
        # A daemon, because a disk may never answer.
        self._thread = threading.Thread(target=self._run, name="conversations", daemon=True)

    def start(self, post: Callable[[TextualMessage], object]) -> None:
        """Begins; `post` is called from the thread."""
        self._post = post
        self._thread.start()

    def save(self, conversation: str, message: ChatMessage, title: str = "") -> None:
        """Saves a message or its new state, soon. See `ConversationStore.save`."""
        key = "save", conversation, message.id
        grows = key in self._known and message.finish_reason is None
        self._known.add(key)
        self._write_later(
            key,
            lambda store: store.save(conversation, message, title),
            _INTERVAL_S if grows else 0.0,
        )

    def choose(self, conversation: str, message: str) -> None:
        """Remembers the active branch, soon. See `ConversationStore.choose`."""
        key = "choose", conversation, message
        self._write_later(key, lambda store: store.choose(conversation, message), last=True)

    def remove(self, conversation: str, message: str) -> None:
        """Erases a message and all that follow it, soon. See `ConversationStore.remove`."""
        key = "remove", conversation, message
        self._write_later(key, lambda store: store.remove(conversation, message), last=True)

    async def call(self, function: Callable[[ConversationStore], Result]) -> Result:
        """What `function` gives, called in the thread after all that was queued before:
        `await thread.call(lambda store: store.search(words))`.

        Raises ConversationError. A call that is cancelled before its turn is never made.
        """
        future: Future[Result] = Future()
        with self._wake:
            if self._closing:
                raise ConversationError("conversations are closed; start akunu again")
            self._calls.append((future, function))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def close(self, timeout: float) -> bool:
        """Writes what is left. False where something is left that cannot be written (`error` says
        why), or the thread is still busy after `timeout` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive() and not self._unwritten

    def _write_later(
        self,
        key: tuple[str, ...],
        function: Callable[[ConversationStore], object],
        delay: float = 0.0,
        *,
        last: bool = False,
    ) -> None:
        """Puts a change in its place: that of an earlier one with the same key, unless `last`."""
        with self._wake:
            if last:
                self._unwritten.pop(key, None)
            self._unwritten[key] = function
            due = time.monotonic() + delay
            self._due = due if self._due is None else min(self._due, due)
            self._wake.notify()

    # In the thread

    def _run(self) -> None:
        self._write()  # opens the database, and reports at once where that is not possible
        while self._wait():
            # Taken before writing: what was queued before the call is written then.
            call = self._calls.popleft() if self._calls else None
            self._write()
            if call is not None:
                self._run_call(*call)
        self._write()
        self._close()

    def _wait(self) -> bool:
        """Waits for a call, or until a change is due; False where the thread is to end."""
        with self._wake:
            while not (self._calls or self._closing):
                timeout = None
                if self._due is not None:
                    timeout = max(self._due, self._retry) - time.monotonic()
                    if timeout <= 0:
                        break
                self._wake.wait(timeout)
            return bool(self._calls or not self._closing)

    def _write(self) -> None:
        """Writes what was queued, in order, until something cannot be written."""
        with self._wake:
            self._due = None
            changes = list(self._unwritten.items())
        try:
            if self._store is None:
                self._store = ConversationStore.open(self._path)
                for warning in self._store.warnings:
                    self._post(StoreWarning(warning))
            for key, change in changes:
                change(self._store)
                with self._wake:
                    if self._unwritten[key] is change:
                        del self._unwritten[key]
        except Exception as error:  # noqa: BLE001 - a bug must not end the saving in silence
            self._fail(describe(error))
        else:
            if self.error is not None:
                self.error = None
                self._post(SavingResumed())

    def _fail(self, error: str) -> None:
        """Reports why nothing can be written, and tries later with the database opened again,
        which finds out what is wrong with it."""
        self._close()
        self._retry = time.monotonic() + _RETRY_S
        with self._wake:
            if self._unwritten:
                self._due = self._retry
        if error != self.error:
            self.error = error
            self._post(SavingFailed(error))

    def _run_call(self, future: Future[Any], function: Callable[[ConversationStore], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._store is None:
                raise ConversationError(self.error or "conversations are closed")
            future.set_result(function(self._store))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)

    def _close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(ConversationError):
                self._store.close()
            self._store = None
