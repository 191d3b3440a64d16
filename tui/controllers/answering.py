"""The model that answers, the answer under way, and the queue of prompts that wait for theirs.

A conversation that leaves the screen while it is answered is set aside, and its answers go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from textual.message import Message

from akunu_py.arguments import json_constraint
from akunu_py.errors import AkunuError, UsageError
from akunu_py.models.store import store
from akunu_py.text import collapse
from akunu_py.tui.open_conversation import ChatTurn, Conversation, TurnState
from akunu_py.tui.prompt.attachments import split
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.screens.settings import SettingsController
from akunu_py.tui.status import Phase
from akunu_py.tui.workers.downloads import DownloadEnded, DownloadMoved, Downloads
from akunu_py.tui.workers.session_thread import (
    AnswerFailed,
    Finished,
    Loaded,
    PieceArrived,
    Prefilling,
    SessionMessage,
    SessionThread,
)
from akunu_py.types import Constraint, FinishReason

_LONG_S = 15.0  # an answer that takes longer may be waited for elsewhere


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
    active: ChatTurn | None = None  # is being answered
    _queue: deque[ChatTurn] = field(default_factory=deque)  # answered after `active`
    _aside: dict[str, Conversation] = field(default_factory=dict)  # answered behind the screen
    unread: set[str] = field(default_factory=set)  # conversations that were answered there
    _is_loading: bool = True
    _requests: int = 0
    _next: Constraint | None = None  # what the next answer must match

    def start(self, post: Callable[[Message], object]) -> None:
        """Begins to load the model, or to fetch it. `post` is called from another thread."""
        if self._session is not None:
            self._session.start(post, load=not self._is_missing)
        if self._is_missing:
            self._fetch()

    @property
    def is_busy(self) -> bool:
        """Whether a turn of the conversation on the screen is being answered, or waits for it."""
        return any(turn in self._conversation for turn in self._pending())

    @property
    def has_queued(self) -> bool:
        """Whether a prompt on the screen waits its turn."""
        return any(turn in self._conversation for turn in self._queue)

    async def take_back_last(self) -> None:
        """Takes the last prompt that waits on the screen back into the box."""
        waiting = [turn for turn in self._queue if turn in self._conversation]
        if waiting:
            self._drop(waiting[-1])
            await self._take_back(waiting[-1:])
            self._view.show_state()

    @property
    def behind(self) -> Conversation | None:
        """The conversation behind the screen that is being answered now."""
        if self.active is None or self.active in self._conversation:
            return None
        return self._conversation_of(self.active)

    def progress(self) -> dict[str, str]:
        """How far the answers are that are under way, by conversation, in words."""
        shown: dict[str, str] = {}
        for turn in self._pending():
            name = self._conversation_of(turn).tree.conversation
            shown.setdefault(name, _progress_of(turn))
        return shown

    # Conversations that leave the screen and come back

    def set_aside(self) -> None:
        """Before the conversation leaves the screen: what is answered in it goes on."""
        if self.is_busy:
            self._aside[self._conversation.tree.conversation] = self._conversation.set_aside()

    def is_aside(self, conversation: str) -> bool:
        return conversation in self._aside

    def bring_back(self, conversation: str) -> bool:
        """Makes that conversation the one on the screen, if it was set aside."""
        self.unread.discard(conversation)
        aside = self._aside.pop(conversation, None)
        if aside is not None:
            self._conversation.bring_back(aside)
        return aside is not None

    def renamed(self, conversation: str, title: str) -> None:
        """A saved conversation has another title."""
        for each in (self._conversation, *self._aside.values()):
            if each.tree.conversation == conversation:
                each.tree.title = title

    async def stop_behind(self) -> None:
        """Ends all answers behind the screen, keeping what there is of them."""
        await self._stop([turn for turn in self._pending() if turn not in self._conversation])

    async def forget(self, conversation: str) -> None:
        """That conversation was deleted: nothing in it is to be answered any more."""
        self.unread.discard(conversation)
        if aside := self._aside.get(conversation):
            await self._stop([turn for turn in self._pending() if turn in aside])
            del self._aside[conversation]

    async def _stop(self, turns: Sequence[ChatTurn]) -> None:
        """Ends the answers of `turns`; prompts without one stay as they are."""
        for turn in turns:
            if turn is self.active and self._session is not None:
                self._session.stop(turn.request)
            self._leave(turn, "done", "cancelled")
        self._show_phase("ready")
        await self._answer_next()

    def is_writing(self, code: str) -> bool:
        """Whether the answer that is under way ends with `code`."""
        answer = self.active.answer.rstrip() if self.active else ""
        return bool(code.strip()) and answer.endswith(code.rstrip())

    async def submit(self, turn: ChatTurn) -> None:
        """Shows a new turn, and has it answered when the ones before are."""
        await self._view.transcript.show_branch()
        await self._view.transcript.action_follow()
        if self._next is not None:
            turn.constraint, self._next = self._next, None
        self._queue.append(turn)
        await self._answer_next()

    async def resume(self, turn: ChatTurn) -> None:
        """Has the answer of a turn continued."""
        turn.state, turn.constraint = "waiting", None
        self._queue.append(turn)
        await self._answer_next()

    def use_json(self, schema: str = "") -> None:
        """Has the next answer in JSON: any, or what fits a schema (JSON, or the path of a file)."""
        if schema.lower() == "off":
            self._next = None
            self._view.inform("The next answer is free.")
            return
        try:
            self._next = json_constraint(schema, "/json") if schema else Constraint("json")
        except UsageError as error:
            self._view.refuse(str(error))
            return
        fitting = " that fits the schema" if schema else ""
        self._view.inform(f"The next answer is JSON{fitting}; /json off takes that back.")

    async def interrupt(self, discard: ChatTurn | None = None) -> None:
        """Ends the answer under way on the screen, keeping what there is of it, and takes what
        waits there from the queue. Prompts that got no answer go back to the box, that of `discard`
        excepted."""
        unanswered = []
        for turn in [turn for turn in self._pending() if turn in self._conversation]:
            if turn is self.active and self._session is not None:
                self._session.stop(turn.request)
            if turn is self.active and (turn.answer or turn.thinking):
                self._leave(turn, "done", "cancelled")
                self._show_phase("stopped")
            else:
                self._drop(turn)
                unanswered.append(turn)
                self._show_phase("ready")
        await self._take_back(unanswered, discard)
        await self._answer_next()

    async def use_model(self, name: str | None) -> None:
        """Has that model answer from here on; an answer under way is finished first. None changes
        nothing."""
        if name is None:
            return
        try:
            model = await asyncio.to_thread(store.resolve, name)
        except AkunuError as error:
            is_coming = name in self._downloads.all
            self._view.refuse(f"{name} is still being fetched" if is_coming else str(error))
            return
        if model.name == self.model and self.context_length:
            self._view.inform(f"{model.name} is in use.")
            return
        self.model = model.name
        self._is_missing = False
        self.context_length = 0
        self._is_loading = True
        if self.active is None:
            self._view.status.phase = "loading"
        if self._session is not None:
            self._session.switch(model.name)
        if not self._conversation.turns:
            await self._view.show_conversation()
        await self._answer_next()

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
                await self._on_finished(message)
            case AnswerFailed():
                if message.request is None or self._turn_of(message.request):
                    await self._fail(message.error)

    async def _on_loaded(self, message: Loaded) -> None:
        self.context_length = self._view.status.context = message.context_length
        self._is_loading = False
        self._show_phase("reading" if self.active else "ready")
        self._view.status.gauges = message.gauges
        before, self._view.status.server = self._view.status.server, message.server
        if message.server != before:
            await self._view.add_notice(_where(message))
        if message.no_draft and self._settings.options.draft != "off":
            why = f"{message.model} runs without drafting: {message.no_draft}"
            await self._view.add_notice(why)
        if message.note:
            await self._view.add_notice(message.note)
        await self._answer_next()

    def _on_prefilling(self, message: Prefilling) -> None:
        turn = self._turn_of(message.request)
        if turn is not None and turn in self._conversation and message.total:
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
        turn.speedup = message.gauges.speedup
        self._conversation_of(turn).save(turn)
        if answer := self._view.transcript.answer(turn):
            answer.sync()
        self._view.status.gauges = message.gauges
        self._show_phase("answering")
        self._show_numbers(turn)

    async def _on_finished(self, message: Finished) -> None:
        turn = self._turn_of(message.request)
        if turn is None:
            return
        turn.stats, turn.speedup = message.stats, message.gauges.speedup
        self._leave(turn, "done", message.reason)
        self._view.status.gauges = message.gauges
        self._show_phase("stopped" if message.reason == "cancelled" else "ready")
        self._show_numbers(turn)
        if turn not in self._conversation:
            tree = self._conversation_of(turn).tree
            self.unread.add(tree.conversation)
            self._view.inform(f"Answered: {tree.title}. Ctrl+O opens it.")
        if (
            self._settings.current.bell
            and message.stats.prefill_s + message.stats.decode_s >= _LONG_S
        ):
            self._view.ring(is_seen=turn in self._conversation)
        self._view.withdraw_question()
        await self._answer_next()

    # Messages of the downloads

    def on_download_moved(self, message: DownloadMoved) -> None:
        download = self._downloads.all.get(message.name)
        if download is not None and self._waits_for(message.name):
            self._view.status.phase = "fetching"
            self._view.status.progress = download.share
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
            self._view.refuse(message.error)
        elif message.model:
            self._view.inform(f"{message.model} is here: /model {message.model}")

    def _waits_for(self, model: str) -> bool:
        """Whether that model answers as soon as it is fetched."""
        return self._is_missing and model == self.model

    async def _fail(self, error: str) -> None:
        """Shows an error in the transcript; prompts on the screen that got no answer go back to the
        box, those behind it stay where they are."""
        unanswered = []
        for turn in self._pending():
            if turn in self._conversation and not (turn.answer or turn.thinking):
                self._drop(turn)
                unanswered.append(turn)
            else:
                self._leave(turn, "failed", None)
        self._is_loading = False
        self._view.status.phase = "failed"
        await self._take_back(unanswered)
        await self._view.add_notice(error, "error")
        self._view.show_state()

    def _pending(self) -> list[ChatTurn]:
        """All turns that are to be answered, in order."""
        return [self.active, *self._queue] if self.active else list(self._queue)

    def _turn_of(self, request: int) -> ChatTurn | None:
        """The active turn, if that is the request for its answer."""
        return self.active if self.active and self.active.request == request else None

    def _conversation_of(self, turn: ChatTurn) -> Conversation:
        there = (each for each in self._aside.values() if turn in each)
        return next(there, self._conversation)

    def _drop(self, turn: ChatTurn) -> None:
        """It is not to be answered any more."""
        if turn is self.active:
            self.active = None
        else:
            self._queue.remove(turn)

    def _leave(self, turn: ChatTurn, state: TurnState, finish: FinishReason | None) -> None:
        """Its answer ended so, and is saved as it is."""
        self._drop(turn)
        turn.state, turn.finish = state, finish
        self._conversation_of(turn).save(turn)
        if answer := self._view.transcript.answer(turn):
            answer.show_state()

    async def _answer_next(self) -> None:
        """Requests the next answer of the queue, unless the model is busy."""
        if self._is_missing and self._queue:
            self._fetch()
        elif self.active is None and self._queue and not self._is_loading:
            turn = self.active = self._queue.popleft()
            turn.state, turn.finish, turn.model = "reading", None, self.model
            self._requests += 1
            turn.request = self._requests
            # A load that failed is tried again with the request.
            self._view.status.begin()
            self._show_phase("reading")
            self._show_numbers(turn)
            if answer := self._view.transcript.answer(turn):
                answer.show_state()
            if self._session is not None:
                system = self._settings.current.system
                conversation = self._conversation_of(turn)
                messages = conversation.history(turn, system)
                options = self._settings.options
                options = replace(
                    options,
                    sampling=replace(options.sampling, constraint=turn.constraint),
                    conversation=conversation.tree.conversation,
                )
                self._session.request(turn.request, messages, options)
        self._view.show_state()

    def _fetch(self) -> None:
        if self._downloads.start(self.model):
            self._view.status.progress = 0.0
        self._view.status.phase = "fetching"

    def show_status(self) -> None:
        """Shows the state anew, after another conversation came to the screen."""
        turns = self._conversation.turns
        self._show_numbers(turns[-1] if turns else None)
        if self._view.status.phase in ("stopped", "ready", "reading", "answering"):
            state = self.active.state if self.active else "done"
            self._show_phase(
                "reading" if state == "reading" else "answering" if self.active else "ready"
            )

    def _show_phase(self, phase: Phase) -> None:
        """Another model may be loading meanwhile, and another conversation be answered."""
        behind = self.behind
        self._view.status.behind = collapse(behind.tree.title) if behind else ""
        self._view.status.phase = phase if self.context_length else "loading"

    def _show_numbers(self, turn: ChatTurn | None) -> None:
        """Shows the numbers of an answer, if it is one on the screen; None shows none."""
        if turn is None or turn in self._conversation:
            self._view.status.stats = turn.stats if turn else None
            self._view.panel.show(turn)

    async def _take_back(self, turns: Sequence[ChatTurn], discard: ChatTurn | None = None) -> None:
        """Removes unanswered turns from the conversation, and puts their prompts into the box."""
        texts: list[str] = []
        for turn in reversed(turns):  # those that follow first
            removed = self._conversation.remove(turn)
            if removed.role == "user" and turn is not discard:
                texts.insert(0, split(turn.prompt.text)[0])
        if turns:
            await self._view.transcript.show_branch()
        if self._view.transcript.is_empty:
            await self._view.show_welcome()
        if texts and not self._view.prompt.text.strip():
            self._view.prompt.recall(texts.pop(0))
        if texts:
            many = "A prompt was" if len(texts) == 1 else f"{len(texts)} prompts were"
            self._view.inform(f"{many} not sent; Ctrl+R finds what you wrote.")


def _progress_of(turn: ChatTurn) -> str:
    if turn.state == "waiting":
        return "waits"
    if turn.state == "reading" or turn.stats is None:
        return "▶ reading"
    return f"▶ {turn.stats.generated_tokens:,} tokens"


def _where(loaded: Loaded) -> str:
    """Whose model answers, where that is not as it was."""
    if loaded.server:
        return f"{loaded.model} is that of akunu serve at {loaded.server}; none is loaded here."
    return f"{loaded.model} is loaded here; no server answers from here on."
