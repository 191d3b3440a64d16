"""An app for Textual that draws a frame only when the terminal has taken the last one.

Works around:
    Textual draws 60 frames a second into a queue, however slow the line to the terminal is. Over
    ssh at 10 kB/s, a key shows its effect after all the frames before it: 12 seconds later.
Upstream: no issue found, textual 8.2.8.
Remove when: tests/tui/test_long_chats.py passes with `App`.
"""

import asyncio
import contextlib
from typing import Any, TypeVar

from rich.console import RenderableType
from textual.app import App, ScreenStackError
from textual.messages import TerminalSupportsSynchronizedOutput
from textual.screen import Screen

from akunu_py.workarounds.textual_driver import SteadyDriver

Result = TypeVar("Result")
_GRACE_S = 0.03  # that the terminal has to take a frame, before the next one waits
_ANSWER_TIMEOUT_S = 5.0  # for the answers to pings
_PING = "\x1b[?2026$p"  # A terminal with synchronized output answers when it has come so far.


class PacedApp(App[Result]):
    """An app whose updates wait, unseen, while the terminal is behind; then one frame has all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._is_waiting = False  # updates are held back
        self._is_check_pending = False
        self._is_frame_lost = False
        self._unanswered_pings = 0
        self._answers_pings = True
        self._waits = 0  # how often updates were held back

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        self._is_frame_lost |= self._batch_count > 0
        super()._display(screen, renderable)
        if not isinstance(self._driver, SteadyDriver) or self._batch_count:
            return
        if self._sync_available and self._answers_pings:
            self._unanswered_pings += 1
            self._driver.write(_PING)
        if not self._is_check_pending:
            self._is_check_pending = True
            asyncio.get_running_loop().call_later(_GRACE_S, self._wait_if_behind)

    @property
    def _is_behind(self) -> bool:
        is_writing = isinstance(self._driver, SteadyDriver) and self._driver.is_behind
        return is_writing or self._unanswered_pings > 0

    def _wait_if_behind(self) -> None:
        self._is_check_pending = False
        if not self._is_behind or self._is_waiting or not isinstance(self._driver, SteadyDriver):
            return
        self._is_waiting = True
        self._waits += 1
        self._begin_batch()
        loop = asyncio.get_running_loop()

        def resume_soon() -> None:  # called in the writer's thread
            with contextlib.suppress(RuntimeError):  # The loop may be closed.
                loop.call_soon_threadsafe(self._resume)

        self._driver.on_flush = resume_soon
        loop.call_later(_ANSWER_TIMEOUT_S, self._forget_pings, self._waits)
        self._resume()  # the terminal may have caught up just now

    def on_terminal_supports_synchronized_output(
        self, _message: TerminalSupportsSynchronizedOutput
    ) -> None:
        """Count the answer to a ping; the first answer is to Textual's own question."""
        self._unanswered_pings = max(0, self._unanswered_pings - 1)
        self._resume()

    def _forget_pings(self, wait: int) -> None:
        """Send no more pings if one stays unanswered: an editor may have read the answer."""
        if self._is_waiting and self._waits == wait and self._unanswered_pings:
            self._unanswered_pings, self._answers_pings = 0, False
            self._resume()

    def _resume(self) -> None:
        """Draw what has changed meanwhile, unless the terminal is still behind."""
        if not self._is_waiting or self._is_behind:
            return
        self._is_waiting = False
        self._end_batch()
        with contextlib.suppress(ScreenStackError):  # the app has ended meanwhile
            if self._is_frame_lost:
                self._is_frame_lost = False
                self.screen.refresh()
            self.screen.check_idle()
