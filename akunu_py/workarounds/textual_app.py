"""Base classes of a Textual app: slow lines, keys in order, heights, the first theme.

Works around:
    1. Textual draws 60 frames a second into a queue, however slow the line to the terminal is. Over
       ssh at 10 kB/s, a key shows its effect after all the frames before it: 12 seconds later.
    2. Textual passes each key to the focused widget at once, and a key without a handler there
       bubbles through the queues of its parents to the app, which runs its binding. Later keys
       overtake it: of a burst `a b Backspace c`, Backspace deletes the `c`. Keys behind one that
       opens a dialog or moves the focus reach the wrong widget.
    3. Textual ignores a `max-height` in `vh` or `%` when it sums up the parts of a container with
       `height: auto`. The container is then higher than the screen, with empty rows at its end.
    4. Textual parses all style sheets again when an app sets its theme, even before it starts, and
       applies them to each widget a second time: a fifth of the time to the first frame.
Upstream: no issue found, textual 8.2.8.
Remove when: in tests/tui/, these pass with `App`: test_long_chats.py (1) and test_writing.py (2);
    and these with `Vertical`: test_answering.py and test_tools.py (3); and an app that sets its
    theme in `__init__` does not call `refresh_css` when it starts (4).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from rich.console import RenderableType
from textual import events
from textual.app import App, ScreenStackError
from textual.containers import Vertical
from textual.geometry import Size
from textual.message_pump import MessagePump
from textual.messages import TerminalSupportsSynchronizedOutput
from textual.screen import Screen
from textual.widget import Widget

from akunu_py.workarounds.textual_driver import SteadyDriver

Result = TypeVar("Result")
_GRACE_S = 0.03  # that the terminal has to take a frame, before the next one waits
_ANSWER_TIMEOUT_S = 5.0  # for the answers to pings
_CHECK_S = 0.1  # A widget that is removed may drop its messages.


class PacedApp(App[Result]):
    """An app whose updates wait, unseen, while the terminal is behind; then one frame has all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._timeout: asyncio.TimerHandle | None = None  # while updates are held back
        self._is_check_pending = False
        self._is_frame_lost = False
        self._answers_pings = True

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        self._is_frame_lost |= self._batch_count > 0
        super()._display(screen, renderable)
        if not isinstance(self._driver, SteadyDriver) or self._batch_count:
            return
        if self._sync_available and self._answers_pings:
            self._driver.ping()
        if not self._is_check_pending:
            self._is_check_pending = True
            asyncio.get_running_loop().call_later(_GRACE_S, self._wait_if_behind)

    @property
    def _is_behind(self) -> bool:
        return isinstance(self._driver, SteadyDriver) and self._driver.is_behind

    def _wait_if_behind(self) -> None:
        self._is_check_pending = False
        if not self._is_behind or self._timeout or not isinstance(self._driver, SteadyDriver):
            return
        self._begin_batch()
        loop = asyncio.get_running_loop()

        def resume_soon() -> None:  # called in the writer's thread
            with contextlib.suppress(RuntimeError):  # The loop may be closed.
                loop.call_soon_threadsafe(self._resume)

        self._driver.output.on_flush = resume_soon
        self._timeout = loop.call_later(_ANSWER_TIMEOUT_S, self._forget_pings)
        self._resume()  # the terminal may have caught up just now

    def on_terminal_supports_synchronized_output(
        self, _message: TerminalSupportsSynchronizedOutput
    ) -> None:
        """Count the answer to a ping; the first answer is to Textual's own question."""
        if isinstance(self._driver, SteadyDriver):
            self._driver.unanswered_pings = max(0, self._driver.unanswered_pings - 1)
        self._resume()

    def _forget_pings(self) -> None:
        """Send no more pings if one stays unanswered."""
        if isinstance(self._driver, SteadyDriver) and self._driver.unanswered_pings:
            self._driver.unanswered_pings, self._answers_pings = 0, False
            self._resume()

    def _resume(self) -> None:
        """Draw what has changed meanwhile, unless the terminal is still behind."""
        if not self._timeout or self._is_behind:
            return
        self._timeout.cancel()
        self._timeout = None
        self._end_batch()
        with contextlib.suppress(ScreenStackError):  # the app has ended meanwhile
            if self._is_frame_lost:
                self._is_frame_lost = False
                self.screen.refresh()
            self.screen.check_idle()


class OrderedInputApp(App[Result]):
    """An app that forwards a key after everything that the previous keys caused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._waiting: deque[events.Event] = deque()
        self._settling: asyncio.Task[None] | None = None  # waits for the last key's effects
        self._typed_into: Widget | None = None  # its queue keeps the order of characters

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
        """Wait until a callback has passed through all parents' queues, behind the last event.

        It passes twice, because handlers post messages that bubble, and once more through the app,
        where those may have changed the focus.
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(passed.wait(), _CHECK_S)
            waits = pump.is_running


class ThemedApp(App[Result]):
    """An app that has its theme before its style sheets are parsed."""

    def start_with_theme(self, name: str) -> None:
        """Set the theme in `__init__`, with the effects of Textual's watcher."""
        self.set_reactive(App.theme, name)
        theme = self.current_theme
        modes = {"-dark-mode": theme.dark, "-light-mode": not theme.dark}
        self.update_classes({f"-theme-{name}": True} | modes, update=False)
        self._refresh_truecolor_filter(self.ansi_theme)
        self.stylesheet.set_variables(self.get_css_variables())


class SummedHeight(Vertical):
    """A vertical container for parts without a height in `fr`."""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.arrange(Size(width, container.height)).total_region.height
