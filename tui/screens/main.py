"""The main screen of the chat: its widgets, and the notifications and hints around them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from akunu_py.models import catalog
from akunu_py.models.catalog import describe_speed
from akunu_py.text import collapse, displayable, human_size
from akunu_py.tui.open_conversation import Conversation
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.slash_commands import keys_of_actions
from akunu_py.tui.prompt.suggestions import SuggestionPopup
from akunu_py.tui.screens.dialog import QuestionScreen
from akunu_py.tui.screens.models import ModelRow, better_model
from akunu_py.tui.status import MessageLine, StatusLine
from akunu_py.tui.transcript.drafting import DraftingPanel
from akunu_py.tui.transcript.turn import Notice
from akunu_py.tui.transcript.view import Transcript

# The first and the last stay however narrow it is; then the one before the last goes. Each with the
# action that a click on it runs.
_ALWAYS = (
    ("Ctrl+O chats", "conversations"),
    ("F4 models", "models"),
    ("F2 drafting", "show_drafting"),
    ("Tab copy", "choose_message"),
    ("F1 keys", "help"),
)
_IDLE = (("Enter send", "send"), *_ALWAYS)
_BUSY = (("Esc stop", "stop"), *_ALWAYS)
_EDITING = (("Enter send on a new branch", "send"), ("Esc leave it as it was", "stop"))
_CHOOSING = tuple(  # a click would take the focus from the message
    (hint, "")
    for hint in (
        "e edit", "r again", "g go on", "c copy", "b code", "←→ branches", "Esc back",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatState:
    """What is shown around the prompt. model: answers from here on. told: the persona, or that
    there is a system prompt; "" for neither."""

    model: str
    told: str
    busy: bool
    editing: bool
    queued: bool


class ChatView:
    """What the controllers draw on: four widgets, and how the program speaks to the user.

    notify: `App.notify`. state: called after the controllers are made. offer_better: an empty chat
    looks for a better model that fits here.
    """

    def __init__(
        self,
        notify: Callable[..., None],
        state: Callable[[], ChatState],
        conversation: Conversation,
        model: str,
        directory: Path,
        *,
        offer_better: bool,
    ) -> None:
        self._notify = notify
        self._state = state
        self._conversation = conversation
        self._offer_better = offer_better
        self.explained = False  # what drafting is
        self._question: QuestionScreen | None = None
        self.refusals = 0  # so far
        self._popup = SuggestionPopup(directory, id="completion")
        self.transcript = Transcript(conversation, self._welcome(model), id="transcript")
        self.panel = DraftingPanel(id="drafting")
        self.message = MessageLine()
        self.prompt = PromptBox("Ask something", self._popup, directory, id="prompt")
        self.status = StatusLine(id="status")

    def compose(self) -> ComposeResult:
        yield self.transcript
        yield self.transcript.more_below
        yield self.panel
        yield self.message
        yield self._popup
        yield self.prompt
        yield self.status

    @property
    def is_choosing(self) -> bool:
        """Whether the keys are about the chosen message."""
        return self.transcript.screen.focused is self.transcript

    def inform(self, text: str) -> None:
        """Shows a message, which goes away by itself."""
        self._notify(text, markup=False)

    def refuse(self, text: str) -> None:
        """Says why something was not done; nothing was lost."""
        self.refusals += 1
        self._notify(text, severity="error", markup=False)

    def ring(self, *, is_seen: bool) -> None:
        """Rings the terminal's bell, unless what it is about is seen."""
        app = self.prompt.app
        if not (is_seen and app.app_focus):
            app.bell()

    def ask(
        self,
        question: str,
        choices: Mapping[str, str],
        answered: Callable[[str | None], Awaitable[None]],
    ) -> None:
        """Asks, and calls `answered` with what was chosen; with None for nothing."""
        self._question = QuestionScreen(question, choices)
        self.prompt.app.push_screen(self._question, answered)

    def withdraw_question(self) -> None:
        """The question that is open, if there is one, is none any more."""
        if self._question is not None and self._question.is_current:
            self._question.dismiss(None)
        self._question = None

    async def add_notice(self, text: str, kind: str = "notice") -> None:
        """Adds a notice or an "error" to the transcript, where it stays."""
        await self.transcript.add(Notice(text, kind))

    async def show_conversation(self, message: str | None = None) -> None:
        """Shows the conversation from scratch, at a message or its end."""
        await self.transcript.reload(message)
        if not self._conversation.turns:
            await self.show_welcome()

    async def show_welcome(self) -> None:
        await self.transcript.add(self._welcome(self._state().model))

    async def hide_welcome(self) -> None:
        await self.transcript.query(Welcome).remove()

    def offer_last(self, title: str) -> None:
        """Offers to continue the last chat, in an empty one."""
        for welcome in self.transcript.query(Welcome):
            welcome.show_last(title)
        self.show_what_enter_does()

    def show_what_enter_does(self) -> None:
        """It continues the last chat where there is nothing to send."""
        for welcome in self.transcript.query(Welcome):
            welcome.set_class(bool(self.prompt.text), "-typed")

    @property
    def offers_last(self) -> bool:
        return any(welcome.offers_last for welcome in self.transcript.query(Welcome))

    def show_download(self, progress: str) -> None:
        """Shows how far the missing model is, in an empty chat; "" for one that is not fetched."""
        for welcome in self.transcript.query(Welcome):
            welcome.show_download(progress)

    def show_state(self) -> None:
        """Shows around the prompt which keys matter now, and which model is talked to."""
        state = self._state()
        if self.is_choosing:
            self.prompt.hints = _CHOOSING
        elif state.editing:
            self.prompt.hints = _EDITING
        else:
            self.prompt.hints = _BUSY if state.busy else _IDLE
        title = f"{state.model} · {state.told}" if state.told else state.model
        self.prompt.heading = "editing an earlier prompt" if state.editing else title
        self.prompt.has_queued = state.queued
        self.prompt.app.title = collapse(self._conversation.tree.title) or "akunu"

    def toggle_drafting(self) -> None:
        self.transcript.drafting = self.panel.display = not self.transcript.drafting
        # Once it was seen, the numbers are more use.
        self.panel.explains = self.panel.display and not self.explained
        self.explained = True

    def toggle_thinking(self) -> None:
        self.transcript.thinking = not self.transcript.thinking

    def _welcome(self, model: str) -> Welcome:
        return Welcome(model, partial(better_model, model) if self._offer_better else None)


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
