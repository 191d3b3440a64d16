"""The conversation store in a thread, so that the chat never waits for the disk.

`save` returns immediately. New messages and finished answers are written at once, growing answers
once a second. Failed writes are retried; `SavingFailed` and `SavingResumed` report the state.
"""

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

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.options import ChatOptions
from akunu_py.chats.tree import ChatMessage
from akunu_py.errors import ConversationError, describe

Result = TypeVar("Result")


@dataclass
class SavingFailed(TextualMessage):
    error: str


@dataclass
class SavingResumed(TextualMessage):
    """Everything is saved again."""


@dataclass
class StoreWarning(TextualMessage):
    text: str


class StoreThread:
    """Saves conversations in a database. Call its methods from the app's thread."""

    def __init__(self, path: Path, *, interval_s: float = 1.0, retry_s: float = 5.0) -> None:
        self._path = path
        self._interval_s = interval_s  # between two writes of a growing answer
        self._retry_s = retry_s  # after a failed write
        self._post: Callable[[TextualMessage], object] = lambda message: None
        self._wake = threading.Condition()
        # Pending writes, in order: a message may be the parent of a later one.
        self._pending: dict[tuple[str, ...], Callable[[ConversationStore], object]] = {}
        self._saved_keys: set[tuple[str, ...]] = set()  # keys of all writes so far
        self._next_write: float | None = None  # time of the next write, None for none
        self._retry_at = 0.0  # earliest time of the next write after a failure
        self._calls: deque[tuple[Future[Any], Callable[[ConversationStore], Any]]] = deque()
        self._closing = False
        self._store: ConversationStore | None = None
        self.error: str | None = None
        # A daemon, because a disk may never respond.
        self._thread = threading.Thread(target=self._run, name="conversations", daemon=True)

    def start(self, post: Callable[[TextualMessage], object]) -> None:
        """Start the thread. `post` is called from it."""
        self._post = post
        self._thread.start()

    def save(self, conversation: str, message: ChatMessage, title: str = "") -> None:
        """Queue a new or changed message. See `ConversationStore.save`."""
        key = "save", conversation, message.id
        grows = key in self._saved_keys and message.finish_reason is None
        self._saved_keys.add(key)
        delay = self._interval_s if grows else 0.0
        self._write_later(key, lambda store: store.save(conversation, message, title), delay)

    def activate_branch(self, conversation: str, message: str) -> None:
        key = "activate", conversation, message
        self._write_later(key, lambda store: store.activate_branch(conversation, message))

    def remove(self, conversation: str, *messages: str) -> None:
        key = "remove", conversation, *messages
        self._write_later(key, lambda store: store.remove(conversation, messages))

    def set_options(self, conversation: str, options: ChatOptions) -> None:
        key = "options", conversation
        self._write_later(key, lambda store: store.set_options(conversation, options))

    async def call(self, function: Callable[[ConversationStore], Result]) -> Result:
        """Run `function` after queued writes; return its result. Raises ConversationError."""
        future: Future[Result] = Future()
        with self._wake:
            if self._closing:
                raise ConversationError("conversations are closed; start akunu again")
            self._calls.append((future, function))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def close(self, timeout: float) -> bool:
        """Write everything; stop. Return False on a timeout or a failed write (`error`)."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive() and not self._pending

    def _write_later(
        self,
        key: tuple[str, ...],
        function: Callable[[ConversationStore], object],
        delay: float | None = None,
    ) -> None:
        """Queue a change, replacing one with this key; without `delay`, at the end."""
        with self._wake:
            if delay is None:
                self._pending.pop(key, None)
            self._pending[key] = function
            due = time.monotonic() + (delay or 0.0)
            self._next_write = due if self._next_write is None else min(self._next_write, due)
            self._wake.notify()

    # In the thread

    def _run(self) -> None:
        self._write()  # Opens the database, and reports a failure immediately.
        while self._wait():
            # Taken first, so that earlier changes are written before the call.
            call = self._calls.popleft() if self._calls else None
            self._write()
            if call is not None:
                self._run_call(*call)
        self._write()
        self._close()

    def _wait(self) -> bool:
        """Wait for a call or a due change. Return False when the thread should stop."""
        with self._wake:
            while not (self._calls or self._closing):
                timeout = None
                if self._next_write is not None:
                    timeout = max(self._next_write, self._retry_at) - time.monotonic()
                    if timeout <= 0:
                        break
                self._wake.wait(timeout)
            return bool(self._calls or not self._closing)

    def _write(self) -> None:
        with self._wake:
            self._next_write = None
            changes = list(self._pending.items())
        try:
            if self._store is None:
                self._store = ConversationStore.open(self._path)
                for warning in self._store.warnings:
                    self._post(StoreWarning(warning))
            for key, change in changes:
                change(self._store)
                with self._wake:
                    if self._pending[key] is change:
                        del self._pending[key]
        except Exception as error:  # noqa: BLE001 - a bug must not stop saving silently
            self._fail(describe(error))
        else:
            if self.error is not None:
                self.error = None
                self._post(SavingResumed())

    def _fail(self, error: str) -> None:
        self._close()
        self._retry_at = time.monotonic() + self._retry_s
        with self._wake:
            if self._pending:
                self._next_write = self._retry_at
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
