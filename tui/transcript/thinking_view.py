"""The view of a reasoning model's thinking before its answer."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from akunu_py.text import displayable
from akunu_py.tui.open_conversation import ChatTurn

_THINKING_TAIL = 1500  # characters shown while thinking grows; each token wraps them again


class ThinkingView(Vertical):
    """The reasoning before an answer: one line, or all of it while `open`. Hidden if empty."""

    def __init__(self, turn: ChatTurn, *, open: bool) -> None:
        super().__init__()
        self._turn = turn
        self._open = open
        self._is_complete = False  # all of the reasoning is drawn
        self._head = Static(classes="head")
        self._body = Static(classes="body")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._body

    def on_mount(self) -> None:
        self.sync()

    def on_click(self, event: events.Click) -> None:
        if event.widget is self._head:
            self.show(not self._open)

    def show(self, open: bool) -> None:
        """Open or fold the thinking."""
        self._open = open
        self._is_complete = False
        self.sync()

    def sync(self) -> None:
        """Draw new text of the turn."""
        if self._is_complete:
            return
        thinking = self._turn.thinking.strip()
        self.display = bool(thinking)
        self._body.display = self._open
        if not thinking:
            return
        is_growing = self._turn.state == "answering" and not self._turn.answer
        self._is_complete = bool(self._turn.answer)
        words = len(thinking.split())
        mark, key = ("▾", "F3 folds") if self._open else ("▸", "F3 opens")
        head = "thinking…" if is_growing else "thought"
        self._head.update(Content(f"{mark} {head}  {words:,} words  {key}"))
        if self._open:
            shown = thinking[-_THINKING_TAIL:] if is_growing else thinking
            self._body.update(Content(displayable(shown)))
