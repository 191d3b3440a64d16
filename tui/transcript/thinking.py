"""What a reasoning model thought before its answer: one line, which opens on demand."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from akunu_py.text import displayable
from akunu_py.tui.conversation import Turn

_TAIL = 1500  # characters shown of thinking that goes on: all of it would be wrapped for each token


class ThinkingView(Vertical):
    """The thinking of a turn, folded unless `open`; not shown at all where there is none."""

    def __init__(self, turn: Turn, *, open: bool) -> None:
        super().__init__()
        self._turn = turn
        self._open = open
        self._is_whole = False  # what is shown is all there will be
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
        """Opens or folds it."""
        self._open = open
        self._is_whole = False
        self.sync()

    def sync(self) -> None:
        """Draws what the turn has got since."""
        if self._is_whole:
            return
        thinking = self._turn.thinking.strip()
        self.display = bool(thinking)
        self._body.display = self._open
        if not thinking:
            return
        under_way = self._turn.state == "answering" and not self._turn.answer
        self._is_whole = bool(self._turn.answer)
        words = len(thinking.split())
        mark, key = ("▾", "F3 folds") if self._open else ("▸", "F3 opens")
        head = "thinking…" if under_way else "thought"
        self._head.update(Content(f"{mark} {head}  {words:,} words  {key}"))
        if self._open:
            self._body.update(Content(displayable(thinking[-_TAIL:] if under_way else thinking)))
