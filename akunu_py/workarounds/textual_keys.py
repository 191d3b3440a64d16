"""An app for Textual that handles input strictly in the order in which it arrives.

Works around:
    Textual passes each key to the focused widget at once, and a key without a handler there bubbles
    through the queues of its parents to the app, which runs its binding. Later keys overtake it: of
    a burst `a b Backspace c`, Backspace deletes the `c`. Keys behind one that opens a dialog or
    moves the focus reach the wrong widget.
Upstream: no issue found, textual 8.2.8.
Remove when: tests/tui/test_writing.py passes with `App`.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from textual import events
from textual.app import App
from textual.message_pump import MessagePump
from textual.widget import Widget

Result = TypeVar("Result")
_CHECK_S = 0.1  # A widget that is removed may drop its messages.


class OrderedInputApp(App[Result]):
    """An app that forwards a key after everything that the previous keys caused.

    Characters typed into one widget need no waiting: its own queue keeps their order.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._waiting: deque[events.Event] = deque()
        self._settling: asyncio.Task[None] | None = None  # waits for the last key's effects
        self._typed_into: Widget | None = None  # whose queue may have characters

    @property
    def has_pending_input(self) -> bool:
        """Whether input waits, or a key that is no character is being handled."""
        return bool(self._waiting) or self._settling is not None

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent | events.Paste) and not event.is_forwarded:
            self._waiting.append(event)
            await self._forward_input()
        else:
            await super().on_event(event)

    async def _forward_input(self) -> None:
        while self._waiting and self._settling is None:
            event, target = self._waiting[0], self.focused or self.screen
            is_character = isinstance(event, events.Key) and target.check_consume_key(
                event.key, event.character
            )
            typed_into, self._typed_into = self._typed_into, None
            if typed_into is not None and not (is_character and typed_into is target):
                self._settling = asyncio.create_task(self._settle(typed_into))
                return
            del self._waiting[0]
            await super().on_event(event)
            if is_character:
                self._typed_into = target
            elif isinstance(event, events.Key | events.Paste):
                self._settling = asyncio.create_task(self._settle(target))

    async def _settle(self, target: Widget) -> None:
        """Wait until `target`, its parents and the app have handled the last event.

        They have when a callback has passed through the same queues behind the event. It passes
        twice, because handlers post messages that bubble in their turn, and once more through the
        app, where those may have changed the focus.
        """
        path = [each for each in target.ancestors_with_self if isinstance(each, Widget)]
        screen = self.screen
        await _pass_through([*path, self, *path, self, self])
        while self.screen is not screen:  # A new screen chooses its focus in its own queue.
            screen = self.screen
            await _pass_through([screen, self, self])
        self._settling = None
        self.call_next(self._forward_input)


async def _pass_through(pumps: Sequence[MessagePump]) -> None:
    """Wait until each of the queues is empty of what it has now, one after the other."""
    for pump in pumps:
        passed = asyncio.Event()
        waits = pump.call_later(passed.set)
        while waits and not passed.is_set():
            await asyncio.wait([asyncio.ensure_future(passed.wait())], timeout=_CHECK_S)
            waits = pump.is_running
