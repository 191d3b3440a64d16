"""The model that answers, the answer under way, and the queue of prompts that wait for theirs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from textual.message import Message

from akunu_py.errors import AkunuError
from akunu_py.models import store
from akunu_py.tui.conversation import Conversation, Turn
from akunu_py.tui.downloads import DownloadEnded, DownloadMoved, Downloads
from akunu_py.tui.prompt.files import split
from akunu_py.tui.session_thread import (
    Failed,
    Finished,
    Loaded,
    PieceArrived,
    Prefilling,
    SessionMessage,
    SessionThread,
)
from akunu_py.tui.settings import SettingsController
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
    active: Turn | None = None  # is being answered
    _queue: deque[Turn] = field(default_factory=deque)  # answered after `active`
    _requests: int = 0

    def start(self, post: Callable[[Message], object]) -> None:
        """Begins to load the model, or to fetch it. `post` is called from another thread."""
        if self._session is not None:
            self._session.start(post, load=not self._is_missing)
        if self._is_missing:
            self._fetch()

    @property
    def is_busy(self) -> bool:
        """Whether a turn is being answered, or waits for the model."""
        return self.active is not None or bool(self._queue)

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
        if turn := self.active:
            self.active = None
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

    async def use_model(self, name: str | None) -> None:
        """Has that model answer from here on; an answer under way is finished first. None changes
        nothing."""
        if name is None:
            return
        try:
            model = await asyncio.to_thread(store.resolve, name)
        except AkunuError as error:
            is_coming = name in self._downloads.all
            self._view.warn(f"{name} is still being fetched" if is_coming else str(error))
            return
        if model.name == self.model and self.context_length:
            self._view.inform(f"{model.name} is in use.")
            return
        self.model = model.name
        self._is_missing = False
        self.context_length = 0
        if self.active is None:
            self._view.status.phase = "loading"
        if self._session is not None:
            self._session.switch(model.name)
        if not self._conversation.turns:
            await self._view.show_conversation()
        self._view.show_state()

    # Messages of the session thread

    async def receive(self, message: SessionMessage) -> None:
        match message:
            case Loaded():
                await self._on_loaded(message)
            case Prefilling():
                self._on_prefilling(message)
            case PieceArrived():
                self._on_piece_arrived(message)
            case Finished():
                self._on_finished(message)
            case Failed():
                if message.request is None or self._turn_of(message.request):
                    await self._fail(message.error)

    async def _on_loaded(self, message: Loaded) -> None:
        self.context_length = message.context_length
        self._view.status.phase = "reading" if self.active else "ready"
        self._view.status.gauges = message.gauges
        if message.no_draft and self._settings.options.draft != "off":
            why = f"{message.model} runs without drafting: {message.no_draft}"
            await self._view.add_notice(why)
        if message.note:
            await self._view.add_notice(message.note)
        self._answer_next()

    def _on_prefilling(self, message: Prefilling) -> None:
        if self._turn_of(message.request) and message.total:
            self._view.status.phase = "reading"
            self._view.status.progress = message.done / message.total

    def _on_piece_arrived(self, message: PieceArrived) -> None:
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

    def _on_finished(self, message: Finished) -> None:
        turn = self._turn_of(message.request)
        if turn is None:
            return
        turn.state, turn.finish, turn.stats = "done", message.reason, message.stats
        self.active = None
        self._view.status.stats = message.stats
        self._view.status.gauges = message.gauges
        self._show_phase("stopped" if message.reason == "cancelled" else "ready")
        self._view.panel.show(turn, message.gauges.speedup)
        self._show_end(turn)
        self._answer_next()

    # Messages of the downloads

    def on_download_moved(self, message: DownloadMoved) -> None:
        download = self._downloads.all.get(message.name)
        if download is not None and self._waits_for(message.name):
            self._view.status.phase = "fetching"
            self._view.status.progress = download.progress.share
            self._view.show_download(download.progress.describe())

    async def on_download_ended(self, message: DownloadEnded, *, is_listed: bool) -> None:
        """is_listed: the list of models is open, and shows it."""
        if self._waits_for(message.name):
            self._view.show_download("")
            if message.model:
                await self.use_model(message.model)
            else:
                why = message.error or f"{message.name} was not fetched; fetch it to chat with it"
                await self._fail(f"{why}. A prompt does so; F4 has other models")
        elif is_listed:
            pass
        elif message.error:
            self._view.warn(message.error)
        elif message.model:
            self._view.inform(f"{message.model} is here: /model {message.model}")

    def _waits_for(self, model: str) -> bool:
        """Whether that model answers as soon as it is fetched."""
        return self._is_missing and model == self.model

    async def _fail(self, error: str) -> None:
        """Shows an error in the transcript; prompts without an answer go back to the box."""
        unanswered = list(self._queue)
        self._queue.clear()
        if turn := self.active:
            self.active = None
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
        return self.active if self.active and self.active.request == request else None

    def _answer_next(self) -> None:
        """Requests the next answer of the queue, unless the model is busy."""
        if self._is_missing and self._queue:
            self._fetch()
        elif self.active is None and self._queue and self._view.status.phase != "loading":
            turn = self.active = self._queue.popleft()
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
        self._view.status.phase = phase if self.context_length else "loading"

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
