"""The prompt box: a text area that sends, recalls and grows.

Owns keys while a prompt is written. Refuses control characters, pasted or typed.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import TextArea

from akunu_py.tui.text import typeable

# Terminals without a richer keyboard protocol send Ctrl+J as a line feed and cannot tell
# Shift+Enter from Enter; those that can, send it.
_ROOM_FOR_HINTS = 56  # columns
_NEWLINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter", "ctrl+enter")


class PromptBox(TextArea):
    """Where prompts are written. Enter sends, Ctrl+J breaks the line, Up recalls."""

    @dataclass
    class Submitted(Message):
        """A prompt to be sent; the box is empty again."""

        text: str

    @dataclass
    class Paged(Message):
        """Page Up (-1) or Page Down (1): the transcript scrolls, not the few lines here."""

        direction: int

    busy: reactive[bool] = reactive(False)

    def __init__(self, placeholder: str, id: str) -> None:
        super().__init__(
            id=id,
            placeholder=placeholder,
            show_line_numbers=False,
            highlight_cursor_line=False,
            soft_wrap=True,
        )
        self._sent: list[str] = []
        self._recalled: int | None = None  # index into _sent of what the box shows

    def put_back(self, prompt: str) -> None:
        """Returns a prompt that was not answered, before what was typed since."""
        text = f"{prompt}\n\n{self.text}" if self.text.strip() else prompt
        self._show(text)

    def watch_busy(self) -> None:
        """The keys that matter now, in the edge of the box."""
        keys = ["Esc stop" if self.busy else "Enter send", "F2 drafting", "Ctrl+Q quit"]
        if self.size.width < _ROOM_FOR_HINTS:
            del keys[1]
        self.border_subtitle = Content(" · ".join(keys))

    def on_resize(self) -> None:
        self.watch_busy()

    # Textual calls the base class's handlers after these two, unless they prevent it.

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self._send()
        elif event.key in _NEWLINE_KEYS:
            event.stop()
            event.prevent_default()
            self.insert("\n")
            self.scroll_cursor_visible()

    async def _on_paste(self, event: events.Paste) -> None:
        event.text = typeable(event.text)

    def action_cursor_up(self, select: bool = False) -> None:
        browsing = self._recalled is not None and self.text == self._sent[self._recalled]
        if not select and self._sent and (not self.text or browsing):
            newest = len(self._sent)
            self._recall(max(0, (self._recalled if browsing else newest) or 0) - 1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        browsing = self._recalled is not None and self.text == self._sent[self._recalled]
        if not select and browsing and self._recalled is not None:
            self._recall(self._recalled + 1)
        else:
            super().action_cursor_down(select)

    def action_cursor_page_up(self) -> None:
        self.post_message(self.Paged(-1))

    def action_cursor_page_down(self) -> None:
        self.post_message(self.Paged(1))

    def _send(self) -> None:
        text = self.text.strip()
        if not text:
            return
        if not self._sent or self._sent[-1] != text:
            self._sent.append(text)
        self._recalled = None
        self.clear()
        self.post_message(self.Submitted(text))

    def _recall(self, index: int) -> None:
        """Shows the prompt at `index`; before the first stays there, after the last is empty."""
        index = max(0, index)
        if index >= len(self._sent):
            self._recalled = None
            self.clear()
        else:
            self._recalled = index
            self._show(self._sent[index])

    def _show(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)
