"""The question whether a tool call may run, above the prompt box.

It never runs a call by accident: typed text goes to the prompt box, the question takes the focus
only while the box is empty, and Enter does nothing until no key was pressed for a moment.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.chats.tree import ToolUse
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.transcript.turn import describe_call, readable_arguments
from akunu_py.workarounds.textual_app import SummedHeight

Consent = Literal["once", "always", "deny"]

_QUIET_S = 0.7  # An earlier Enter was meant for something else.
_LOW = 16  # rows; lower screens have no title
_READ = {"read": "Read on (Page Down); not all of it fits"}
_CHOICES = {"once": "Allow once", "always": "Always allow this tool in this chat", "deny": "Deny"}


class ConsentPanel(SummedHeight):
    """Shows a call with its arguments, and the choices; hidden while no call waits."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "scroll(-1)", "Scroll up", show=False, priority=True),
        Binding("pagedown", "scroll(1)", "Scroll down", show=False, priority=True),
    ]

    @dataclass
    class Decided(Message):
        consent: Consent

    def __init__(self) -> None:
        super().__init__(id="consent")
        self._call = ""  # the id of the shown call
        self._quiet_since = math.inf  # time of the last key or of the first frame
        self._accepts_enter = False
        self._arguments = Static()
        self._text = VerticalScroll(self._arguments, can_focus=False)
        self._choices = OptionList(compact=True)

    def compose(self) -> ComposeResult:
        yield self._text
        yield self._choices

    @property
    def is_asking(self) -> bool:
        return bool(self._call)

    def show(self, use: ToolUse, which: int, count: int) -> None:
        """Ask about a call, number `which` of `count`."""
        if self._call == use.call.id:
            return
        self._call, self._quiet_since, self._accepts_enter = use.call.id, math.inf, False
        place = f" ({which} of {count})" if count > 1 else ""
        size = f"  {len(use.call.arguments):,} characters\n"
        text = readable_arguments(use.call.arguments)
        heading = (f"{describe_call(use)}{place}", "bold")
        self.border_title = "Run this tool?"
        self.border_subtitle = "Tab choose · Enter confirm · Esc stop the answer"
        self._arguments.update(Content.assemble(heading, size, text))
        self._text.scroll_home(animate=False)
        self._offer(_CHOICES)
        self._show(True)
        self.fit()

    def take_focus(self) -> None:
        self._choices.focus()

    def hide(self) -> None:
        self._call = ""
        self._show(False)

    def _show(self, shown: bool) -> None:
        if self.display is shown:
            return
        self.display = shown
        for each in self.ancestors:
            each.set_class(shown, "-asking", update=False)
        # Only these two have styles for -asking, and the transcript may have hundreds of blocks.
        self.app.stylesheet.update_nodes(self.screen.query("#prompt, #transcript"))

    def fit(self) -> None:
        """Use the free rows of the screen; propose reading where the arguments need more."""
        if self.is_asking:
            self.call_after_refresh(self._grow)

    def _grow(self) -> None:
        below = self.ancestors[0]
        assert isinstance(below, Widget)
        others = below.outer_size.height - self._text.outer_size.height
        kept = 0 if self.app.size.height < _LOW else 3  # the title, and the end of the answer
        self._text.styles.max_height = max(1, self.app.size.height - others - kept)
        self.call_after_refresh(self._propose_reading)

    def _propose_reading(self) -> None:
        is_cut = self._text.max_scroll_y > 0
        if is_cut is not (self._choices.option_count > len(_CHOICES)):
            self._offer(_READ | _CHOICES if is_cut else _CHOICES)
            self.fit()  # The list has another height now.
        if self._quiet_since == math.inf:
            self._quiet_since = time.monotonic()

    def _offer(self, choices: Mapping[str, str]) -> None:
        self._choices.clear_options()
        self._choices.add_options(Option(words, id=name) for name, words in choices.items())
        self._choices.highlighted = 0

    def action_scroll(self, pages: int) -> None:
        self._text.scroll_relative(y=pages * max(1, self._text.size.height - 1), animate=False)

    def on_key(self, event: events.Key) -> None:
        if not self._is_quiet(event.time) and event.key == "enter":
            event.stop()
        elif event.is_printable and event.character:
            event.stop()
            event.prevent_default()
            box = self.screen.query_one(PromptBox)
            box.focus()
            box.insert(event.character)

    def _is_quiet(self, now: float) -> bool:
        """Return whether the call was shown long enough; else restart the wait at `now`."""
        self._accepts_enter = self._accepts_enter or now - self._quiet_since >= _QUIET_S
        if self._quiet_since != math.inf:  # not before the first frame
            self._quiet_since = now
        return self._accepts_enter

    @on(OptionList.OptionSelected)
    def _decide(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if not self.is_asking or not self._is_quiet(event.time):
            return
        match event.option_id:
            case "once" | "always" | "deny" as consent:
                self.hide()
                self.post_message(self.Decided(consent))
            case "read":
                self.action_scroll(1)
