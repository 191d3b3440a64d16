"""The chat: keys and messages in, conversation and screen changed.

Owns which turn is being answered and which ones wait. The session is in a thread of its own
(`worker`); this side only asks, listens and stops. Messages about turns that were given up on are
ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Markdown

from akunu_py.tui.conversation import Conversation, Turn
from akunu_py.tui.messages import Failed, Finished, Loaded, PieceArrived, Prefilling
from akunu_py.tui.prompt import PromptBox
from akunu_py.tui.status import StatusLine
from akunu_py.tui.transcript import Legend, Notice, Transcript
from akunu_py.tui.welcome import Welcome
from akunu_py.tui.worker import SessionThread
from akunu_py.types import GenerateOptions

_COMMANDS = {"/new": "new_conversation", "/quit": "quit"}


class ChatApp(App[None]):
    """A conversation with one model. Without a `session` nobody answers (for pictures)."""

    CSS_PATH = "chat.tcss"
    TITLE = "akunu"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "stop", "Stop the answer"),
        ("f2,ctrl+t", "toggle_drafting", "See the drafting"),
        ("ctrl+n", "new_conversation", "New conversation"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal")]  # noqa: RUF012 - declared so there
    VERTICAL_BREAKPOINTS = [(0, "-low"), (16, "-high")]  # noqa: RUF012

    drafting: reactive[bool] = reactive(False, init=False)

    def __init__(
        self, model: str, options: GenerateOptions, session: SessionThread | None = None
    ) -> None:
        super().__init__()
        self._model = model
        self._options = options
        self._session = session
        self._loaded = False
        self._conversation = Conversation()
        self._waiting: deque[Turn] = deque()
        self._active: Turn | None = None
        self._turns = 0

    def compose(self) -> ComposeResult:
        yield Transcript(Welcome(self._model), id="transcript")
        yield Legend(id="legend")
        yield PromptBox("Ask something", id="prompt")
        yield StatusLine(self._model, id="status")

    def on_mount(self) -> None:
        self._transcript = self.query_one(Transcript)
        self._prompt = self.query_one(PromptBox)
        self._status = self.query_one(StatusLine)
        self._prompt.focus()
        if self._session is not None:
            self._session.start(self.post_message)
        # A kill must leave the terminal as it was. Not SIGHUP: the terminal has gone then, and to
        # write the farewell to it would block for ever; the default ends us at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)

    # What the person does

    async def on_prompt_box_submitted(self, event: PromptBox.Submitted) -> None:
        if event.text in _COMMANDS:
            await self.run_action(_COMMANDS[event.text])
            return
        await self._transcript.query(Welcome).remove()
        self._turns += 1
        turn = Turn(self._turns, event.text)
        self._conversation.turns.append(turn)
        self._waiting.append(turn)
        await self._transcript.add_turn(turn, drafting=self.drafting)
        self._ask_next()

    async def action_stop(self) -> None:
        """Ends the answer and keeps it. Prompts that were not answered go back to the box."""
        unanswered = list(self._waiting)
        self._waiting.clear()
        if turn := self._active:
            self._let_go(turn)
            if turn.answer:
                turn.state, turn.finish = "done", "cancelled"
                await self._transcript.answer(turn).end()
                self._status.phase = "stopped"
            else:
                unanswered.insert(0, turn)
        await self._give_back(unanswered)
        self._prompt.busy = self._is_busy

    async def action_new_conversation(self) -> None:
        await self.action_stop()
        self._conversation = Conversation()
        self._status.stats = None
        if self._status.phase == "stopped":
            self._status.phase = "ready"
        await self._transcript.clear()
        await self._transcript.add(Welcome(self._model))

    def action_toggle_drafting(self) -> None:
        self.drafting = not self.drafting

    async def watch_drafting(self, drafting: bool) -> None:
        self.query_one(Legend).display = drafting
        await self._transcript.show_drafting(drafting)

    def action_help_quit(self) -> None:
        """Ctrl+C with nothing selected."""
        busy = "Esc stops the answer. " if self._active else ""
        self.notify(f"{busy}Ctrl+Q quits. Ctrl+C copies what is selected.", timeout=4)

    def on_prompt_box_paged(self, event: PromptBox.Paged) -> None:
        self._transcript.page(event.direction)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        # A model's link may lead anywhere, and over ssh a browser would open on this screen.
        self.copy_to_clipboard(event.href)
        self.notify(event.href, title="Link copied", markup=False)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        yield SystemCommand("New conversation", "Ctrl+N", self.action_new_conversation)
        yield SystemCommand("See the drafting", "F2", self.action_toggle_drafting)

    # What the session thread tells

    async def on_loaded(self, message: Loaded) -> None:
        self._loaded = True
        self._status.phase = "reading" if self._active else "ready"
        if message.no_draft and self._options.draft != "off":
            text = f"{message.model} runs without drafting: {message.no_draft}"
            await self._transcript.add(Notice(text, "notice"))
        self._ask_next()

    def on_prefilling(self, message: Prefilling) -> None:
        if self._is_active(message.turn) and message.total:
            self._status.phase = "reading"
            self._status.progress = message.done / message.total

    def on_piece_arrived(self, message: PieceArrived) -> None:
        turn = self._active
        if turn is None or not self._is_active(message.turn):
            return
        turn.state = "answering"
        turn.stats = message.stats
        turn.add(message.text, message.drafted)
        self._transcript.answer(turn).sync()
        self._status.phase = "answering"
        self._status.stats = message.stats

    async def on_finished(self, message: Finished) -> None:
        turn = self._active
        if turn is None or not self._is_active(message.turn):
            return
        turn.state, turn.finish, turn.stats = "done", message.reason, message.stats
        self._active = None
        self._status.stats = message.stats
        self._status.phase = "stopped" if message.reason == "cancelled" else "ready"
        await self._transcript.answer(turn).end()
        self._prompt.busy = self._is_busy
        self._ask_next()

    async def on_failed(self, message: Failed) -> None:
        """The error stays in the transcript; what was not answered goes back to the box."""
        if message.turn is not None and not self._is_active(message.turn):
            return
        unanswered = list(self._waiting)
        self._waiting.clear()
        if turn := self._active:
            self._active = None
            turn.state = "failed"
            if not turn.answer:
                unanswered.insert(0, turn)
        self._status.phase = "failed"
        await self._transcript.add(Notice(message.error, "error"))
        await self._give_back(unanswered)
        self._prompt.busy = self._is_busy

    # In between

    @property
    def _is_busy(self) -> bool:
        return self._active is not None or bool(self._waiting)

    def _is_active(self, number: int) -> bool:
        return self._active is not None and self._active.number == number

    def _ask_next(self) -> None:
        """Sends the next prompt that waits, unless the model is busy."""
        loading = self._status.phase == "loading"
        if self._active is None and self._waiting and not loading:
            turn = self._active = self._waiting.popleft()
            turn.state = "reading"
            self._status.progress = 0.0
            self._status.phase = "reading" if self._loaded else "loading"
            self._status.stats = None
            if self._session is not None:
                messages = self._conversation.history(turn)
                self._session.ask(turn.number, messages, self._options)
        self._prompt.busy = self._is_busy

    def _let_go(self, turn: Turn) -> None:
        """Stops listening to the answer at once, and tells the thread to stop making it."""
        self._active = None
        if self._session is not None:
            self._session.stop(turn.number)
        if self._loaded:
            self._status.phase = "ready"

    async def _give_back(self, turns: list[Turn]) -> None:
        """Takes turns out of the conversation and puts their prompts into the box."""
        for turn in turns:
            self._conversation.turns.remove(turn)
            await self._transcript.remove_turn(turn)
        if turns:
            self._prompt.put_back("\n\n".join(turn.prompt for turn in turns))
        if self._transcript.is_empty:
            await self._transcript.add(Welcome(self._model))
