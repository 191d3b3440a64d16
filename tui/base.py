"""What all parts of the chat share: its state, its widgets, and small words to the person.

The app is made of parts by concern, each a class over this one: `answering`, `editing`, `copying`,
`switching` (models and settings) and `keeping`. `app` puts them together and binds the keys.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from textual.app import App

from akunu_py.settings import Settings
from akunu_py.tui.conversation import Conversation, Turn
from akunu_py.tui.library.store_thread import Keeper
from akunu_py.tui.models.downloads import Downloads
from akunu_py.tui.models.rows import better_model
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.session.worker import SessionThread
from akunu_py.tui.status import StatusLine
from akunu_py.tui.terminal.themes import Background
from akunu_py.tui.transcript.drafting import DraftingPanel
from akunu_py.tui.transcript.turn import Notice
from akunu_py.tui.transcript.view import Transcript
from akunu_py.tui.transcript.welcome import Welcome
from akunu_py.types import GenerateOptions

_IDLE = ("Enter send", "Tab messages", "F2 drafting", "F1 keys", "Ctrl+Q quit")
_BUSY = ("Esc stop", "Tab messages", "F2 drafting", "F1 keys", "Ctrl+Q quit")
_EDITING = ("Enter send on a new branch", "Esc leave it as it was")
_CHOOSING = ("e edit", "r again", "g go on", "c copy", "b code", "←→ branches", "Esc back")


@dataclass
class Setup:
    """What the chat runs with. Without a `session` nobody answers, and without a `keeper` nothing
    is kept: for pictures and tests. folder: where @names are looked for. absent: the model is not
    here, and is fetched first."""

    model: str
    options: GenerateOptions
    settings: Settings = field(default_factory=Settings)
    session: SessionThread | None = None
    keeper: Keeper | None = None
    folder: Path = field(default_factory=Path.cwd)
    background: Background | None = None
    absent: bool = False


class ChatBase(App[None]):
    """The state of the chat. `_model`: the one that answers from here on, once it is here if it is
    `_absent`; `_waiting`: turns whose answers come after that of `_active`; `_edited`: the turn
    whose prompt is in the box, in the place of `_draft`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup
        self._model = setup.model
        self._absent = setup.absent
        self._downloads = Downloads(self.post_message)
        self._options = setup.options
        self._settings = setup.settings
        self._session = setup.session
        self._keeper = setup.keeper
        self._conversation = Conversation()
        self._waiting: deque[Turn] = deque()
        self._active: Turn | None = None
        self._edited: Turn | None = None
        self._draft = ""
        self._context_length = 0  # tokens; 0 until the model is loaded
        self._requests = 0

    # Widgets of the main screen; queries look at the one on top, which may be another.

    @property
    def _transcript(self) -> Transcript:
        return self.screen_stack[0].query_one(Transcript)

    @property
    def _prompt(self) -> PromptBox:
        return self.screen_stack[0].query_one(PromptBox)

    @property
    def _status(self) -> StatusLine:
        return self.screen_stack[0].query_one(StatusLine)

    @property
    def _panel(self) -> DraftingPanel:
        return self.screen_stack[0].query_one(DraftingPanel)

    @property
    def _is_busy(self) -> bool:
        return self._active is not None or bool(self._waiting)

    def _chosen_turn(self) -> Turn | None:
        """The turn of the chosen message, else the last one."""
        if chosen := self._transcript.chosen:
            return chosen[0]
        return self._conversation.turns[-1] if self._conversation.turns else None

    def _show_hints(self) -> None:
        """Says which keys matter now, and whom one talks to."""
        box = self._prompt
        if self.screen_stack[0].focused is self._transcript:
            box.hints = _CHOOSING
        elif self._edited is not None:
            box.hints = _EDITING
        else:
            box.hints = _BUSY if self._is_busy else _IDLE
        persona = self._settings.persona
        title = f"{self._model} · {persona}" if persona else self._model
        box.border_title = "editing an earlier prompt" if self._edited else _plain(title)

    def _fetch(self) -> None:
        """Begins to bring the model here that is to answer; what is asked meanwhile waits."""
        if self._downloads.start(self._model):
            self._status.progress = 0.0
        self._status.phase = "fetching"

    def _welcome(self) -> Welcome:
        """What an empty chat shows."""
        better = partial(better_model, self._model) if self._session is not None else None
        return Welcome(self._model, better)

    def _say(self, text: str) -> None:
        """A word that goes away by itself."""
        self.notify(text, timeout=4, markup=False)

    def _warn(self, text: str) -> None:
        """Something that did not work; nothing was lost."""
        self.notify(text, severity="warning", timeout=8, markup=False)

    async def _note(self, text: str, kind: str = "notice") -> None:
        """Something that stays in the transcript."""
        await self._transcript.add(Notice(text, kind))


def _plain(title: str) -> str:
    return title.replace("[", r"\[")
