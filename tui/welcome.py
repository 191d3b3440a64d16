"""What an empty conversation shows: the model, a better one if there is one, and the keys."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from akunu_py.models import catalog
from akunu_py.models.catalog import describe_speed
from akunu_py.text import displayable, human_size
from akunu_py.tui.models import ModelRow
from akunu_py.tui.slash_commands import keys_of_actions

_WRITING = (("Enter", "send"), ("Ctrl+J", "new line"), ("@", "attach a file"), ("/", "commands"))
_ACTIONS = (
    ("stop", "stop the answer"),
    ("conversations", "earlier chats"),
    ("models", "models"),
    ("show_drafting", "see how it guesses ahead"),
    ("command_palette", "everything else"),
    ("help", "all keys"),
)
_PARTS = ("key", "meaning")
_ROOM_FOR_TWO = 64  # columns, for two rows of keys side by side


class Welcome(Vertical):
    """The model, what the catalog knows of it, and the keys.

    better: finds a better model, None where there is none; called in another thread, so that
    nothing waits for it.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"welcome--key", "welcome--meaning"}

    def __init__(self, model: str, better: Callable[[], ModelRow | None] | None = None) -> None:
        super().__init__()
        self._model = model
        self._better = better
        # They may be told something before they are mounted.
        self._download = Static(classes="download")
        self._offered = Static(classes="offer")
        self._last = Static(classes="last")
        for line in (self._download, self._offered, self._last):
            line.display = False

    def compose(self) -> ComposeResult:
        entry = catalog.load_catalog().get(self._model)
        title = f"{self._model} · {entry.title}" if entry else self._model
        yield Static(Content(f"akunu · {displayable(title)}"), classes="title")
        about = f"{entry.description} " if entry else ""
        yield Static(
            Content(f"{displayable(about)}Everything stays on this machine."), classes="about"
        )
        yield from (self._download, self._offered, self._last)
        yield Static(classes="keys")

    def on_mount(self) -> None:
        if self._better is not None:
            self.run_worker(self._offer(self._better), exit_on_error=False)

    def show_download(self, words: str) -> None:
        """Shows the progress of the model that is fetched first; "" where it is here."""
        self._download.update(
            Content(displayable(f"It is being fetched; prompts wait for it.\n{words}"))
        )
        self._download.display = bool(words)

    async def _offer(self, better: Callable[[], ModelRow | None]) -> None:
        row = await asyncio.to_thread(better)
        if row is not None:
            self._offered.update(Content(describe_offer(row)))
            self._offered.display = True

    @property
    def offers_last(self) -> bool:
        return bool(self._last.display)

    def show_last(self, title: str) -> None:
        """Offers to continue the last chat."""
        self._last.update(
            Content.assemble(("Enter", "bold"), " continues the last chat: ", displayable(title))
        )
        self._last.display = True

    def on_resize(self) -> None:
        self.query_one(".keys", Static).update(self._keys())

    def _keys(self) -> Content:
        """The first keys to know, as the app binds them."""
        bound = keys_of_actions(self.app)
        rows = [
            *_WRITING,
            *((bound[action], words) for action, words in _ACTIONS if action in bound),
        ]
        width = max(len(key) for key, _ in rows) + 3
        key, meaning = (self.get_visual_style(f"welcome--{each}", partial=True) for each in _PARTS)
        cells = [
            Content.assemble((f"{name:<{width}}", key), (words, meaning)) for name, words in rows
        ]
        if self.size.width < _ROOM_FOR_TWO:
            return Content("\n").join(cells)
        half = (len(cells) + 1) // 2
        left = max(cell.cell_length for cell in cells[:half]) + 4
        lines = [
            Content.assemble(first.pad_right(left - first.cell_length), second)
            for first, second in itertools.zip_longest(
                cells[:half], cells[half:], fillvalue=Content("")
            )
        ]
        return Content("\n").join(lines)


def describe_offer(row: ModelRow) -> str:
    """The offer of a better model."""
    if row.is_stored:
        return f"{row.name} is here too, and knows more: /model {row.name}"
    facts = [f"{human_size(row.size)} to fetch"]
    if row.tokens_per_s:
        facts.append(describe_speed(row.tokens_per_s))
    return f"{row.name} knows more and suits this machine: {', '.join(facts)}. F4 has it"
