"""The one line in which the program speaks to the user: above the prompt, or in the dialog that is
open. One message at a time, red where something was refused."""

from __future__ import annotations

from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from akunu_py.text import displayable

_SHORTEST_S, _LONGEST_S = 4.0, 15.0
_CHARACTERS_A_SECOND = 15  # read while doing something else
_REFUSAL = 2  # times longer


class MessageLine(Static, can_focus=False):
    """Takes no room while it is empty."""

    DEFAULT_CSS = """
    MessageLine { display: none; height: auto; max-height: 4; color: $text-success; }
    MessageLine.-refusal { color: $text-error; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._timer: Timer | None = None

    def show(self, text: str, *, refusal: bool = False) -> None:
        """Shows `text` in the place of what was there, for as long as it takes to read it."""
        self.text = text
        self.display = bool(text)
        self.set_class(refusal, "-refusal")
        self.update(Content(displayable(text)))
        if self._timer is not None:
            self._timer.stop()
        seconds = min(max(_SHORTEST_S, len(text) / _CHARACTERS_A_SECOND), _LONGEST_S)
        if text:
            self._timer = self.set_timer(seconds * (_REFUSAL if refusal else 1), self.clear)

    def clear(self) -> None:
        """Empties it."""
        self.show("")
