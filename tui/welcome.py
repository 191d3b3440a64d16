"""What an empty conversation shows: the model, a better one if there is one, and the keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from akunu_py.models import catalogue
from akunu_py.models.speed import describe_speed
from akunu_py.text import displayable, human_size
from akunu_py.tui.models import ModelRow
from akunu_py.tui.slash_commands import keys_of_actions

_WRITING = (("Enter", "send"), ("Ctrl+J", "new line"), ("@", "attach a file"), ("/", "commands"))
_ACTIONS = (
    ("stop", "stop the answer, keep what was said"),
    ("show_drafting", "see the drafting"),
    ("conversations", "earlier chats"),
    ("models", "models"),
    ("command_palette", "everything else"),
    ("help", "all keys"),
    ("quit", "quit"),
)


class Welcome(Vertical):
    """The model, what the catalogue knows of it, and the keys.

    better: finds a better model, None where there is none; called in another thread, so that
    nothing waits for it.
    """

    def __init__(self, model: str, better: Callable[[], ModelRow | None] | None = None) -> None:
        super().__init__()
        self._model = model
        self._better = better

    def compose(self) -> ComposeResult:
        entry = catalogue.load_catalogue().get(self._model)
        title = f"{self._model} · {entry.title}" if entry else self._model
        yield Static(Content(displayable(title)), classes="title")
        if entry:
            yield Static(Content(displayable(entry.description)), classes="about")
        yield Static("Everything stays on this machine.", classes="about")
        yield Static(classes="download")
        yield Static(classes="offer")
        yield Static(self._keys(), classes="keys")

    def on_mount(self) -> None:
        self.query_one(".offer").display = self.query_one(".download").display = False
        if self._better is not None:
            self.run_worker(self._offer(self._better), exit_on_error=False)

    def show_download(self, words: str) -> None:
        """Shows the progress of the model that is fetched first; "" where it is here."""
        line = self.query_one(".download", Static)
        line.update(Content(displayable(f"It is being fetched; prompts wait for it.\n{words}")))
        line.display = bool(words)

    async def _offer(self, better: Callable[[], ModelRow | None]) -> None:
        row = await asyncio.to_thread(better)
        if row is not None:
            offer = self.query_one(".offer", Static)
            offer.update(Content(describe_offer(row)))
            offer.display = True

    def _keys(self) -> Content:
        """The first keys to know, as the app binds them."""
        bound = keys_of_actions(self.app)
        rows = [
            *_WRITING,
            *((bound[action], words) for action, words in _ACTIONS if action in bound),
        ]
        width = max(len(key) for key, _ in rows) + 3
        lines = [Content.assemble((f"{key:<{width}}", "bold"), (what, "")) for key, what in rows]
        return Content("\n").join(lines)


def describe_offer(row: ModelRow) -> str:
    """The offer of a better model."""
    if row.is_stored:
        return f"{row.name} is here too, and knows more: /model {row.name}"
    facts = [f"{human_size(row.size)} to fetch"]
    if row.tokens_per_s:
        facts.append(describe_speed(row.tokens_per_s))
    return f"{row.name} knows more and suits this machine: {', '.join(facts)}. F4 has it"
