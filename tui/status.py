"""The status line (activity, duration, last answer's speed) and the message line."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

from textual.app import App
from textual.content import Content
from textual.filter import LineFilter
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.errors import AkunuError
from akunu_py.text import displayable
from akunu_py.types import Stats

Phase = Literal[
    "missing",
    "downloading",
    "loading",
    "ready",
    "prefill",
    "answering",
    "calling",
    "asking",
    "stopped",
    "failed",
]

_MARKS: dict[Phase, str] = {
    "missing": "○",
    "ready": "●",
    "asking": "?",
    "stopped": "■",
    "failed": "×",
}
_SPINNER = "◐◓◑◒"  # marks of a running activity, animated
_WORDS: dict[Phase, str] = {
    "missing": "no model yet",
    "loading": "loading the model",
    "asking": "a tool call waits for your decision",
}
_STEP_S = 0.25
_MAX_TITLE = 24  # maximum columns for another chat's title
_SEPARATOR = " · "


class Unmarked:
    """A mixin for widgets in which found text is not marked."""

    def get_line_filters(self: Any) -> Sequence[LineFilter]:
        return App.get_line_filters(self.app)


class StatusLine(Unmarked, Widget):
    """The activity with its duration, and the speed of the last answer."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"status--{name}" for name in (*get_args(Phase), "number", "unit")
    }
    clock: ClassVar[Callable[[], float]] = time.monotonic

    phase: reactive[Phase] = reactive[Phase]("loading")
    progress: reactive[float] = reactive(0.0)
    stats: reactive[Stats | None] = reactive[Stats | None](None)
    background_title: reactive[str] = reactive("")  # title of another conversation being answered
    tool: reactive[str] = reactive("")  # the tool that runs, "" for none
    server: reactive[str] = reactive("")  # address of the answering server, "" for this process

    def on_mount(self) -> None:
        self.restart_timer()
        self._timer = self.set_interval(_STEP_S, self.refresh)

    def restart_timer(self) -> None:
        self._since = StatusLine.clock()
        self.progress = 0.0

    @property
    def is_busy(self) -> bool:
        return self.phase not in _MARKS

    def watch_phase(self, before: Phase, now: Phase) -> None:
        if self.is_mounted:
            if before in _MARKS:
                self.restart_timer()
            (self._timer.resume if self.is_busy else self._timer.pause)()

    def render(self) -> Content:
        shown = Content("")
        separator = Content.styled(_SEPARATOR, ".status--unit")
        for part in [self._activity(), *self._numbers()]:
            longer = Content.assemble(shown, separator, part) if shown else part
            if longer.cell_length <= self.size.width or not shown:
                shown = longer
        return shown.truncate(self.size.width, ellipsis=True)

    def _activity(self) -> Content:
        words = _WORDS.get(self.phase, self.phase)
        if self.phase == "prefill":
            words = "processing the prompt" + (f" {self.progress:.0%}" if self.progress else "")
        elif self.phase == "downloading":  # Loading follows, so 100% is never shown.
            words = f"downloading the model {min(self.progress, 0.99):.0%}"
        elif self.phase == "calling":
            words = f"running {displayable(self.tool)}" if self.tool else "starting the tools"
        elif self.phase == "ready" and self.server:
            words = "ready: akunu serve answers"
        elif self.phase == "answering" and self.background_title:
            title = Content(displayable(self.background_title)).truncate(_MAX_TITLE, ellipsis=True)
            words = f"answering another chat: {title.plain}"
        return Content.styled(f"{self._mark()} {words}", f".status--{self.phase}")

    def _mark(self) -> str:
        if not self.is_busy:
            return _MARKS[self.phase]
        moves = self.app.animation_level != "none"
        return _SPINNER[int(self._seconds() / _STEP_S) % len(_SPINNER) if moves else 0]

    def _seconds(self) -> float:
        return StatusLine.clock() - self._since

    def _numbers(self) -> Iterator[Content]:
        if self.is_busy and (seconds := int(self._seconds())):
            minutes, rest = divmod(seconds, 60)
            yield _number(f"{minutes}:{rest:02}", "") if minutes else _number(f"{rest}", " s")
        if self.stats and (speed := self.stats.tokens_per_s):
            yield _number(f"{speed:.0f}" if speed >= 9.95 else f"{speed:.1f}", " tokens/s")


def _number(number: str, unit: str) -> Content:
    return Content.assemble((number, ".status--number"), (unit, ".status--unit"))


def format_tokens(count: int) -> str:
    """Format a number of tokens: 870, 1.2k, 8k for 8,192."""
    if count < 1000:
        return str(count)
    if count % 1024 == 0:
        return f"{count // 1024}k"
    return f"{count / 1000:.1f}k" if count < 99_950 else f"{count / 1000:.0f}k"


_SHORTEST_S, _LONGEST_S = 4.0, 15.0
_CHARACTERS_A_SECOND = 15  # reading speed of a busy user
_ERROR_FACTOR = 2  # errors stay this many times longer


class MessageLine(Unmarked, Static, can_focus=False):
    """A line above the prompt for messages; hidden while empty."""

    DEFAULT_CSS = """
    MessageLine { display: none; height: auto; max-height: 4; color: $text-success; }
    MessageLine.-error { color: $text-error; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._timer: Timer | None = None

    def show(self, text: str, *, is_error: bool = False) -> None:
        """Show `text` long enough to be read, replacing the previous message."""
        self.text = text
        self.display = bool(text)
        self.set_class(is_error, "-error")
        self.update(Content(displayable(text)))
        if self._timer is not None:
            self._timer.stop()
        seconds = min(max(_SHORTEST_S, len(text) / _CHARACTERS_A_SECOND), _LONGEST_S)
        if text:
            self._timer = self.set_timer(seconds * (_ERROR_FACTOR if is_error else 1), self.clear)

    def clear(self) -> None:
        self.show("")


@contextmanager
def report_errors(show: Callable[[str], object]) -> Iterator[None]:
    """Pass the text of an `AkunuError` to `show` instead of raising it."""
    try:
        yield
    except AkunuError as error:
        show(str(error))
