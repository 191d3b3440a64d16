"""The question whether a tool call may run, below the prompt box.

It never runs a call by accident: typed text goes to the prompt box, the question takes the focus
only while the box is empty, and it ignores Enter right after it appeared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, Literal

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.chats.tool_rounds import ToolUse
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.transcript.turn import describe_call, readable_arguments
from akunu_py.workarounds.textual_heights import SummedHeight

Consent = Literal["once", "always", "deny"]

_READING_S = 0.5  # An earlier Enter was meant for something else.


class ConsentPanel(SummedHeight):
    """Shows a call with its arguments, and the choices; hidden while no call waits."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "scroll_arguments(-1)", "Scroll up", show=False),
        Binding("pagedown", "scroll_arguments(1)", "Scroll down", show=False),
    ]

    @dataclass
    class Decided(Message):
        """Posted when the user chose."""

        consent: Consent

    def __init__(self) -> None:
        super().__init__(id="consent")
        self._call = ""  # the id of the shown call
        self._since = 0.0
        self._arguments = Static()
        self._choices = OptionList(compact=True)

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield self._arguments
        yield self._choices

    @property
    def is_asking(self) -> bool:
        return bool(self._call)

    def show(self, use: ToolUse, which: int, count: int) -> None:
        """Ask about a call, number `which` of `count`."""
        if self._call == use.call.id:
            return
        self._call, self._since = use.call.id, time.monotonic()
        place = f" ({which} of {count})" if count > 1 else ""
        title = f"Run this tool?{place} {describe_call(use)}"
        self.border_subtitle = Content("Tab choose · Enter confirm · Esc stop the answer")
        arguments = f"\n{readable_arguments(use.call.arguments)}"
        self._arguments.update(Content.assemble((title, "bold"), arguments))
        self._choices.clear_options()
        self._choices.add_options(
            [
                Option("Allow once", id="once"),
                Option("Always allow this tool in this chat", id="always"),
                Option("Deny", id="deny"),
            ]
        )
        self._choices.highlighted = 0
        self._show(True)

    def take_focus(self) -> None:
        self._choices.focus()

    def hide(self) -> None:
        self._call = ""
        self._show(False)

    def _show(self, shown: bool) -> None:
        self.display = shown
        for each in self.ancestors:
            each.set_class(shown, "-asking")

    def action_scroll_arguments(self, pages: int) -> None:
        scroll = self.query_one(VerticalScroll)
        scroll.scroll_relative(y=pages * max(1, scroll.size.height - 1), animate=False)

    def on_key(self, event: events.Key) -> None:
        if event.is_printable and event.character:
            event.stop()
            event.prevent_default()
            box = self.screen.query_one(PromptBox)
            box.focus()
            box.insert(event.character)

    @on(OptionList.OptionSelected)
    def _decide(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if not self.is_asking or time.monotonic() - self._since < _READING_S:
            return
        match event.option_id:
            case "once" | "always" | "deny" as consent:
                self.hide()
                self.post_message(self.Decided(consent))
