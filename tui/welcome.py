"""What an empty conversation shows: what this is, and the keys."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from akunu_py.models import catalogue
from akunu_py.tui.text import displayable

KEYS = (
    ("Enter", "send"),
    ("Ctrl+J", "new line"),
    ("Up", "the prompt before"),
    ("Esc", "stop the answer, keep what was said"),
    ("F2, Ctrl+T", "see the drafting"),
    ("Ctrl+N", "new conversation"),
    ("Ctrl+Q", "quit"),
)


class Welcome(Vertical):
    """The name of the model, what is known of it, and the keys."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def compose(self) -> ComposeResult:
        entry = catalogue.load_catalogue().get(self._model)
        title = f"{self._model} · {entry.title}" if entry else self._model
        yield Static(Content(displayable(title)), classes="title")
        if entry:
            yield Static(Content(displayable(entry.description)), classes="about")
        yield Static("Everything stays on this machine.", classes="about")
        width = max(len(key) for key, _ in KEYS) + 3
        lines = [Content.assemble((f"{key:<{width}}", "bold"), (what, "")) for key, what in KEYS]
        yield Static(Content("\n").join(lines), classes="keys")
