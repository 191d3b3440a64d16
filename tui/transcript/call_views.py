"""Views of the tool calls in an answer: each call with its arguments and its folded result."""

from __future__ import annotations

import json

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from akunu_py.chats.tool_rounds import Outcome, ToolUse
from akunu_py.text import displayable, on_one_line
from akunu_py.tui.open_conversation import ChatTurn
from akunu_py.tui.transcript.markdown import AnswerMarkdown
from akunu_py.tui.transcript.thinking_view import ThinkingView

_MARKS: dict[Outcome, str] = {
    "waiting": "? waits for your decision",
    "running": "… running",
    "done": "✓",
    "failed": "× failed",
    "denied": "– denied",
    "stopped": "■ stopped",
}
_MAX_HEAD = 300  # characters of the arguments in the first line


def describe_call(use: ToolUse) -> str:
    """Return the server and the tool of a call."""
    return on_one_line(f"{use.server} · {use.call.name}" if use.server else use.call.name)


def readable_arguments(arguments: str) -> str:
    """Return the arguments of a call on one line each if they are JSON, else unchanged."""
    try:
        text = json.dumps(json.loads(arguments or "{}"), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = arguments
    return displayable(text)


class ToolUseView(Vertical):
    """A call: one line, or its arguments and its result while open."""

    def __init__(self, use: ToolUse) -> None:
        super().__init__()
        self._use = use
        self._is_open = False
        self._head = Static(classes="head")
        self._body = Static(classes="body")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._body

    def on_mount(self) -> None:
        self.show(self._use)

    def on_click(self, event: events.Click) -> None:
        clicked, _ = self.screen.get_widget_at(*event.screen_offset)
        if clicked is self._head:
            self.toggle()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def toggle(self) -> None:
        """Open or fold the call."""
        self._is_open = not self._is_open
        self.show(self._use)

    def show(self, use: ToolUse) -> None:
        """Draw the state of the call."""
        self._use = use
        mark = "▾" if self._is_open else "▸"
        arguments = on_one_line(use.call.arguments[:_MAX_HEAD])
        size = f"  {len(use.result):,} characters" if use.outcome == "done" else ""
        head = f"{mark} {describe_call(use)}  {_MARKS[use.outcome]}{size}  {arguments}"
        self._head.update(Content(head))
        self._body.display = self._is_open
        if self._is_open:
            arguments = readable_arguments(use.call.arguments)
            result = displayable(use.shown_result) if use.has_ended else ""
            self._body.update(Content("\n\n".join(filter(None, (arguments, result)))))


class RoundsView(Vertical):
    """The parts of an answer that ended with tool calls, with these calls."""

    def __init__(self, turn: ChatTurn, *, thinking: bool) -> None:
        super().__init__()
        self._turn = turn
        self._thinking = thinking

    def compose(self) -> ComposeResult:
        for each in self._turn.rounds:
            part = ChatTurn(self._turn.prompt, each.text or " ", each.thinking, state="done")
            yield ThinkingView(part, open=self._thinking)
            if each.text.strip():
                yield AnswerMarkdown(displayable(each.text))
            for use in each.uses:
                yield ToolUseView(use)

    def sync(self) -> None:
        """Draw the states of the calls."""
        uses = [use for each in self._turn.rounds for use in each.uses]
        for view, use in zip(self.query(ToolUseView), uses, strict=False):
            view.show(use)

    def toggle(self) -> None:
        """Open all calls, or fold them if all are open."""
        views = list(self.query(ToolUseView))
        unfold = not all(view.is_open for view in views)
        for view in views:
            if view.is_open is not unfold:
                view.toggle()
