"""The queue of prompts and the answer under way: one at a time, further prompts wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from textual.message import Message

from akunu_py.tui.controllers.settings import SettingsController
from akunu_py.tui.conversation import Conversation, Turn
from akunu_py.tui.models.downloads import Downloads
from akunu_py.tui.prompt.files import split
from akunu_py.tui.session_thread import (
    Failed,
    Finished,
    Loaded,
    PieceArrived,
    Prefilling,
    SessionThread,
)
from akunu_py.tui.status import Phase
from akunu_py.tui.view import ChatView


@dataclass(eq=False)
class AnswerController:
    """Sends the turns of the conversation to the session thread, one after the other, and shows
    and saves what comes back. Messages about requests that were given up are ignored."""

    model: str  # answers from here on
    _conversation: Conversation
    _view: ChatView
    _settings: SettingsController
    _session: SessionThread | None  # None: nobody answers
    _downloads: Downloads
    _is_missing: bool = False  # the model is fetched first
    context_length: int = 0  # tokens; 0 until the model is loaded
    _active: Turn | None = None
    _queue: deque[Turn] = field(default_factory=deque)  # answered after `_active`
    _requests: int = 0

    def start(self, post: Callable[[Message], object]) -> None:
        """Begins to load the model, or to fetch it. `post` is called from another thread."""
        if self._session is not None:
            self._session.start(post, load=not self._is_missing)
        if self._is_missing:
            self._fetch()

    @property
    def active(self) -> Turn | None:
        """The turn that is being answered."""
        return self._active

    @property
    def is_busy(self) -> bool:
        """Whether a turn is being answered, or waits for the model."""
        return self._active is not None or bool(self._queue)

    @property
    def is_loaded(self) -> bool:
        return self.context_length > 0

    def waits_for(self, model: str) -> bool:
        """Whether that model answers as soon as it is fetched."""
        return self._is_missing and model == self.model

    async def submit(self, turn: Turn) -> None:
        """Shows a new turn, and has it answered when the ones before are."""
        await self._view.transcript.show_branch()
        await self._view.transcript.action_follow()
        self._queue.append(turn)
        self._answer_next()

    def resume(self, turn: Turn) -> None:
        """Has the answer of a turn continued."""
        turn.state = "waiting"
        self._queue.append(turn)
        self._answer_next()

    async def interrupt(self, discard: Turn | None = None) -> None:
        """Ends the answer under way, keeping what there is of it, and empties the queue. Prompts
        that got no answer go back to the box, that of `discard` excepted."""
        unanswered = list(self._queue)
        self._queue.clear()
        if turn := self._active:
            self._active = None
            if self._session is not None:
                self._session.stop(turn.request)
            if turn.answer or turn.thinking:
                turn.state, turn.finish = "done", "cancelled"
                self._show_end(turn)
                self._show_phase("stopped")
            else:
                unanswered.insert(0, turn)
                self._show_phase("ready")
        await self._take_back(unanswered, discard)
        self._view.show_state()

    async def switch_model(self, model: str) -> None:
        """Has `model` answer from here on; an answer under way is finished first."""
        self.model = model
        self._is_missing = False
        self.context_length = 0
        if self._active is None:
            self._view.status.phase = "loading"
        if self._session is not None:
            self._session.switch(model)
        if not self._conversation.turns:
            await self._view.show_conversation()
        self._view.show_state()

    # Messages of the session thread

    async def on_loaded(self, message: Loaded) -> None:
        self.context_length = message.context_length
        self._view.status.phase = "reading" if self._active else "ready"
        self._view.status.gauges = message.gauges
        if message.no_draft and self._settings.options.draft != "off":
            why = f"{message.model} runs without drafting: {message.no_draft}"
            await self._view.add_notice(why)
        if message.note:
            await self._view.add_notice(message.note)
        self._answer_next()

    def on_prefilling(self, message: Prefilling) -> None:
        if self._turn_of(message.request) and message.total:
            self._view.status.phase = "reading"
            self._view.status.progress = message.done / message.total

    def on_piece_arrived(self, message: PieceArrived) -> None:
        turn = self._turn_of(message.request)
        if turn is None:
            return
        turn.state = "answering"
        turn.stats = message.stats
        turn.thinking += message.thinking
        turn.add(message.text, message.drafted, message.rejected)
        turn.passes += message.passes
        self._conversation.save(turn)
        if answer := self._view.transcript.answer(turn):
            answer.sync()
        self._view.status.phase = "answering"
        self._view.status.stats = message.stats
        self._view.status.gauges = message.gauges
        self._view.panel.show(turn, message.gauges.speedup)

    def on_finished(self, message: Finished) -> None:
        turn = self._turn_of(message.request)
        if turn is None:
            return
        turn.state, turn.finish, turn.stats = "done", message.reason, message.stats
        self._active = None
        self._view.status.stats = message.stats
        self._view.status.gauges = message.gauges
        self._show_phase("stopped" if message.reason == "cancelled" else "ready")
        self._view.panel.show(turn, message.gauges.speedup)
        self._show_end(turn)
        self._answer_next()

    async def on_failed(self, message: Failed) -> None:
        if message.request is None or self._turn_of(message.request):
            await self.fail(message.error)

    async def fail(self, error: str) -> None:
        """Shows an error in the transcript; prompts without an answer go back to the box."""
        unanswered = list(self._queue)
        self._queue.clear()
        if turn := self._active:
            self._active = None
            turn.state = "failed"
            if turn.answer or turn.thinking:
                self._show_end(turn)
            else:
                unanswered.insert(0, turn)
        self._view.status.phase = "failed"
        await self._take_back(unanswered)
        await self._view.add_notice(error, "error")
        self._view.show_state()

    def _turn_of(self, request: int) -> Turn | None:
        """The active turn, if that is the request for its answer."""
        return self._active if self._active and self._active.request == request else None

    def _answer_next(self) -> None:
        """Requests the next answer of the queue, unless the model is busy."""
        if self._is_missing and self._queue:
            self._fetch()
        elif self._active is None and self._queue and self._view.status.phase != "loading":
            turn = self._active = self._queue.popleft()
            turn.state, turn.finish, turn.model = "reading", None, self.model
            self._requests += 1
            turn.request = self._requests
            self._view.status.progress = 0.0
            # A load that failed is tried again with the request.
            self._show_phase("reading")
            self._view.status.stats = None
            self._view.panel.show(None, None)
            if answer := self._view.transcript.answer(turn):
                answer.show_state()
            if self._session is not None:
                messages = self._conversation.history(turn, self._settings.current.system)
                self._session.request(turn.request, messages, self._settings.options)
        self._view.show_state()

    def _fetch(self) -> None:
        if self._downloads.start(self.model):
            self._view.status.progress = 0.0
        self._view.status.phase = "fetching"

    def _show_phase(self, phase: Phase) -> None:
        """Another model may be loading meanwhile."""
        self._view.status.phase = phase if self.is_loaded else "loading"

    def _show_end(self, turn: Turn) -> None:
        self._conversation.save(turn)
        if answer := self._view.transcript.answer(turn):
            answer.show_state()

    async def _take_back(self, turns: Sequence[Turn], discard: Turn | None = None) -> None:
        """Removes unanswered turns from the conversation, and puts their prompts into the box."""
        texts: list[str] = []
        for turn in reversed(turns):  # those that follow first
            removed = self._conversation.remove(turn)
            if removed.role == "user" and turn is not discard:
                texts.insert(0, split(turn.prompt.text)[0])
        if turns:
            await self._view.transcript.show_branch()
        if texts:
            self._view.prompt.put_back("\n\n".join(texts))
        if self._view.transcript.is_empty:
            await self._view.show_welcome()
