"""The main screen of the chat: its widgets, notifications and key hints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.models import catalog
from akunu_py.text import displayable, human_size
from akunu_py.tui.open_conversation import ChatTurn, Conversation
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.suggestions import SuggestionPopup
from akunu_py.tui.screens.consent import ConsentPanel
from akunu_py.tui.status import MessageLine, StatusLine, Unmarked, format_tokens
from akunu_py.tui.transcript.drafting import PAYS, DraftingPanel, sparkline
from akunu_py.tui.transcript.turn import Notice
from akunu_py.tui.transcript.view import TEXT_WIDTH, Transcript, side_margin
from akunu_py.workarounds.textual_app import SummedHeight

_MAX_BARS = 20  # passes in the title row
_MIN_TITLE = 16  # columns
# Hints and their click actions. Narrow terminals drop hints from the end, except the last.
_ALWAYS = (
    ("Ctrl+O chats", "conversations"),
    ("F4 models", "models"),
    ("F2 drafting", "show_drafting"),
    ("Tab messages", "choose_message"),
    ("F1 keys", "help"),
)
IDLE_HINTS = (("Enter send", "send"), *_ALWAYS)
BUSY_HINTS = (("Esc stop", "stop"), *_ALWAYS)
EDITING_HINTS = (("Enter send on a new branch", "send"), ("Esc cancel", "stop"))
CHOOSING_HINTS = tuple(  # A click would move the focus away from the message.
    (hint, "")
    for hint in ("e edit", "r retry", "g continue", "c copy", "b code", "←→ branches", "Esc back")
)


class TitleRow(Unmarked, Widget, can_focus=False):
    """The title, the model, the context used, and drafting while the model answers."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"title--bars", "title--number"}

    title: reactive[str] = reactive("")
    model: reactive[str] = reactive("")
    context: reactive[int] = reactive(0)  # of the model, in tokens; 0 if unknown
    turn: reactive[ChatTurn | None] = reactive[ChatTurn | None](None, always_update=True)

    def render(self) -> Content:
        right = Content("   ").join(filter(None, [self._drafting(), self._facts()]))
        width = self.size.width
        if right.cell_length > width - _MIN_TITLE:
            right = self._drafting()
        room = max(0, width - right.cell_length - 2)
        title = Content(displayable(self.title)).truncate(room, ellipsis=True)
        return title.pad_right(max(0, width - title.cell_length - right.cell_length)) + right

    def _drafting(self) -> Content:
        """Return recent accepted tokens per pass as bars, and the factor, if they help."""
        turn = self.turn
        if not turn or turn.state != "answering" or max(turn.passes[-_MAX_BARS:], default=1) < 2:
            return Content("")
        factor = f" {turn.speedup:.1f}x" if (turn.speedup or 0.0) >= PAYS else ""
        bars = sparkline([tokens - 1 for tokens in turn.passes[-_MAX_BARS:]], _MAX_BARS)
        return Content.assemble((bars, ".title--bars"), (factor, ".title--number"))

    def _facts(self) -> Content:
        stats = self.turn.stats if self.turn else None
        used = stats.prompt_tokens + stats.generated_tokens if stats else 0
        of = f" of {format_tokens(self.context)} context" if self.context else " tokens of context"
        words = f" · {format_tokens(used)}{of}" if used else ""
        return Content(displayable(self.model) + words)


class ChatView:
    """The widgets that controllers draw on, and all messages to the user."""

    def __init__(
        self,
        notify: Callable[..., None],  # `App.notify`
        show_state: Callable[[], None],
        make_welcome: Callable[[], Welcome],  # for an empty chat
        conversation: Conversation,
        directory: Path,
    ) -> None:
        self._notify = notify
        self.show_state = show_state
        self._make_welcome = make_welcome
        self._conversation = conversation
        self.error_count = 0
        self._popup = SuggestionPopup(directory, id="completion")
        self.title_row = TitleRow()
        self.transcript = Transcript(conversation, id="transcript")
        self.panel = DraftingPanel(id="drafting")
        self.message = MessageLine()
        self.consent = ConsentPanel()
        self.prompt = PromptBox("Ask something", self._popup, directory, id="prompt")
        self.status = StatusLine(id="status")
        below = (self.panel, self.message, self.consent, self._popup, self.prompt, self.status)
        self._below = SummedHeight(*below, id="below")

    def compose(self) -> ComposeResult:
        yield self.title_row
        yield self.transcript
        yield self.transcript.more_below
        yield self._below

    def align(self, width: int) -> None:
        """Align what is above and below the transcript with its text, on a wide screen."""
        left = side_margin(width)
        # Padding: a margin would narrow the transcript, too.
        self.title_row.styles.padding = (0, left + 4, 0, left + 4)
        # The border of the prompt box continues that of the prompts.
        right = width - TEXT_WIDTH - 3 - left
        self._below.styles.padding = (0, right, 0, left + 1) if left else 0
        self.consent.fit()

    @property
    def is_choosing(self) -> bool:
        """Whether keys act on the selected message."""
        return self.transcript.screen.focused is self.transcript

    def inform(self, text: str) -> None:
        self._notify(text, markup=False)

    def show_error(self, text: str) -> None:
        """Show why an action was refused."""
        self.error_count += 1
        self._notify(text, severity="error", markup=False)

    def ring_bell(self, *, is_seen: bool) -> None:
        """Ring the terminal's bell, unless the answer is visible in a focused terminal."""
        app = self.prompt.app
        if not (is_seen and app.app_focus):
            app.bell()

    async def add_notice(self, text: str, kind: str = "notice") -> None:
        await self.transcript.add(Notice(text, kind))

    async def show_conversation(self, message: str | None = None) -> None:
        await self.transcript.reload(message)
        if not self._conversation.turns:
            await self.show_welcome()

    async def show_welcome(self) -> None:
        await self.transcript.add(self._make_welcome())

    @property
    def welcome(self) -> Welcome | None:
        """The start page, while the open chat is empty."""
        return next(iter(self.transcript.query(Welcome)), None)

    def toggle_drafting(self) -> None:
        self.panel.shown = self.transcript.drafting = self.panel.next_shown
        self.panel.display = self.panel.shown != "hidden"

    def toggle_thinking(self) -> None:
        self.transcript.thinking = not self.transcript.thinking


# The last one repeats words, so that drafting makes it several times faster.
_QUESTIONS = (
    "Why is the sky blue? Explain it in three sentences.",
    "Write a Python function that tells whether a number is prime.",
    "Write a JSON array of ten fruits, each with the keys name, color, price and unit.",
)


class Welcome(Vertical):
    """The start page: the model, its description or download, offers, and questions."""

    def __init__(self, model: str, privacy: str) -> None:
        super().__init__()
        self._model = model
        self._privacy = privacy  # where prompts go
        # Created here because they may be updated before they are mounted.
        self._download, self._last = lines = [Static(classes=name) for name in ("download", "last")]
        for line in lines:
            line.display = False

    def compose(self) -> ComposeResult:
        entry = catalog.load_catalog().get(self._model)
        title = f"{self._model} · {entry.title}" if entry else self._model
        yield Static(Content(f"akunu · {displayable(title)}"), classes="title")
        about = f"{entry.description} " if entry else ""
        about = displayable(f"{about}{self._privacy}")
        yield Static(Content(about), classes="about")
        yield from (self._download, self._last)
        yield Static("Try one of these (Tab):", classes="try")
        for question in _QUESTIONS:
            yield Static(Content(question), classes="question")

    def question_after(self, text: str) -> str | None:
        """Return the next question to try; None if `text` is neither empty nor one of them."""
        questions = ("", *_QUESTIONS)
        return questions[questions.index(text) % len(_QUESTIONS) + 1] if text in questions else None

    def offer_download(self) -> None:
        """Offer to download the model, which is not on this machine."""
        entry = catalog.load_catalog().get(self._model)
        size = f" ({human_size(entry.download_bytes)})" if entry else ""
        text = f" downloads {displayable(self._model)}{size}; prompts wait for it. F4 shows others."
        self._download.update(Content.assemble(("Enter", "bold"), text))
        self._download.display = True
        self.add_class("-offers-download")

    def show_download(self, words: str) -> None:
        """Show the progress of the model's download; "" hides it."""
        self.remove_class("-offers-download")
        text = f"The model is being downloaded; prompts wait for it.\n{words}"
        self._download.update(Content(displayable(text)))
        self._download.display = bool(words)

    @property
    def offers_last_chat(self) -> bool:
        return bool(self._last.display)

    def show_last_chat(self, title: str) -> None:
        offer = (" continues the last chat: ", displayable(title))
        self._last.update(Content.assemble(("Enter", "bold"), *offer))
        self._last.display = True


def describe_privacy(server: str, tool_servers: Sequence[str] = ()) -> str:
    """Say where prompts go (to an address or nowhere), and that tools can send data."""
    if server and urlsplit(server).hostname not in ("localhost", "127.0.0.1", "::1"):
        where = f"Prompts and attached files go to {server}."
    elif not tool_servers:
        return "Everything stays on this machine."
    else:
        where = "Prompts stay on this machine."
    names = ", ".join(tool_servers)
    return f"{where} Tools run only if you allow each call ({names})." if names else where
