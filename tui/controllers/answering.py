"""The running answer, the queue of prompts, and the model that answers.

Answers continue in the background when the user opens another conversation.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from textual.message import Message as TextualMessage

from akunu_py.arguments import json_constraint
from akunu_py.chats.tree import ChatMessage
from akunu_py.engine.answer import ChatJob
from akunu_py.errors import AkunuError
from akunu_py.models.store import model_store
from akunu_py.text import collapse
from akunu_py.tui.controllers.tool_consent import ToolController
from akunu_py.tui.open_conversation import ChatTurn, Conversation, TurnState
from akunu_py.tui.screens.consent import Consent
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.screens.settings_form import SettingsController
from akunu_py.tui.status import Phase, report_errors
from akunu_py.tui.workers.chat_client import (
    AnswerFailed,
    AnswerFinished,
    AnswerMessage,
    ChatClient,
    ModelLoaded,
    PieceArrived,
    PrefillUpdate,
)
from akunu_py.tui.workers.downloads import DownloadEnded, Downloads, DownloadUpdate
from akunu_py.tui.workers.tool_servers import ToolServerMessage
from akunu_py.types import Constraint, FinishReason

_BELL_AFTER_S = 15.0  # Longer answers ring the bell.


@dataclass(eq=False)
class AnswerController:
    """Requests answers one by one, shows and saves them; ignores abandoned requests."""

    model: str  # for the next answer
    _conversation: Conversation
    _view: ChatView
    _settings: SettingsController
    _session: ChatClient
    _downloads: Downloads
    _tools: ToolController
    _is_missing: bool = False  # The model must be downloaded first.
    context_length: int = 0  # tokens; 0 until the model is loaded
    active: ChatTurn | None = None  # the turn being answered
    _queue: deque[ChatTurn] = field(default_factory=deque)  # answered after `active`
    background: dict[str, Conversation] = field(default_factory=dict)  # answered in the background
    unread: set[str] = field(default_factory=set)  # conversations answered in the background
    _is_loading: bool = True
    _requests: int = 0
    _constraint: Constraint | None = None  # on the next answer
    on_end: Sequence[Callable[[Conversation, ChatTurn], None]] = ()

    def start(self, post: Callable[[TextualMessage], object]) -> None:
        """Start loading the model if it is installed. Another thread calls `post`."""
        self._session.start(post, load=not self._is_missing)
        self._show_phase()

    @property
    def needs_download(self) -> bool:
        """Whether the model is neither installed nor being downloaded."""
        return self._is_missing and self.model not in self._downloads.running

    @property
    def is_busy(self) -> bool:
        """Whether the open conversation has a running or queued turn."""
        return any(turn in self._conversation for turn in self.pending())

    def refuse_while_busy(self) -> bool:
        """Show why an action must wait; return False if the open conversation is not busy."""
        if self.is_busy:
            self._view.show_error("The model is still answering. Esc stops it.")
        return self.is_busy

    @property
    def has_queued_prompt(self) -> bool:
        return any(turn in self._conversation for turn in self._queue)

    def side_job(self, conversation: Conversation, prompt: str) -> ChatJob:
        """Return a job that follows a conversation's turns but does not become one.

        Its prompt shares a cached prefix with the prompt of the next turn.
        """
        job = self.job_for(conversation, ChatTurn(ChatMessage("user", prompt)))
        return replace(job, options=replace(job.options, side_request=True))

    def job_for(self, conversation: Conversation, turn: ChatTurn) -> ChatJob:
        messages = conversation.history(turn, self._settings.current.system)
        options = conversation.tree.options.apply(self._settings.options)
        sampling = replace(options.sampling, constraint=turn.constraint)
        name = conversation.tree.conversation
        may_store = options.may_store and not conversation.is_private
        options = replace(options, sampling=sampling, conversation=name, may_store=may_store)
        if not turn.summarizes:
            return ChatJob(messages, options, self._tools.offered.for_model())
        limit, budget = self.context_length // 5, self.context_length // 10
        return ChatJob(messages, replace(options, max_tokens=limit, thinking_budget=budget))

    async def unqueue_last(self) -> None:
        """Return the last queued prompt to the box; a queued continuation ends instead."""
        queued = [turn for turn in self._queue if turn in self._conversation]
        if queued:
            await self._put_back(self._end_or_remove(queued[-1:], "done", "cancelled"))
            self._view.show_state()

    def progress(self) -> dict[str, str]:
        progress: dict[str, str] = {}
        for turn in self.pending():
            name = self._conversation_of(turn).tree.conversation
            asks = self._tools.is_waiting(turn)
            progress.setdefault(name, "? waits for you" if asks else _describe_progress(turn))
        return progress

    # Conversations in the background

    async def move_to_background(self) -> None:
        """Keep pending answers running in the background; stop those of a private chat."""
        if self._conversation.is_private:
            await self.interrupt()
        elif self.is_busy:
            self.background[self._conversation.tree.conversation] = self._conversation.detach()

    def reopen(self, conversation: str) -> bool:
        """Reopen a background conversation. Return False if there is none."""
        self.unread.discard(conversation)
        reopened = self.background.pop(conversation, None)
        if reopened is not None:
            self._conversation.restore(reopened)
        return reopened is not None

    def set_title(self, conversation: str, title: str) -> None:
        for each in (self._conversation, *self.background.values()):
            if each.tree.conversation == conversation:
                each.tree.title = title

    async def close(self, conversation: str) -> None:
        """Stop the answers of a deleted conversation."""
        self.unread.discard(conversation)
        if deleted := self.background.get(conversation):
            for turn in self.pending():
                if turn in deleted:
                    self._stop_work(turn)
                    self._end_turn(turn, "done", "cancelled")
            self._show_phase()
            await self._answer_next()
            del self.background[conversation]

    def _stop_work(self, turn: ChatTurn) -> None:
        if turn is self.active:
            self._session.stop(turn.request)
        if turn in self._tools.turns:
            self._tools.cancel(turn)

    async def submit(self, turn: ChatTurn) -> None:
        if self._constraint is not None and not turn.summarizes:
            turn.constraint, self._constraint = self._constraint, None
        await self._view.transcript.show_branch()
        await self._view.transcript.action_follow()
        self._queue.append(turn)
        await self._answer_next()

    async def resume(self, turn: ChatTurn) -> None:
        """Queue a turn whose answer is to be continued."""
        turn.state, turn.constraint = "queued", None
        self._queue.append(turn)
        await self._answer_next()

    def use_json(self, schema: str = "") -> None:
        """Constrain the next answer to JSON or a schema (JSON text or a file path)."""
        if schema.lower() == "off":
            self._constraint = None
            self._view.inform("The next answer is unconstrained.")
            return
        with report_errors(self._view.show_error):
            self._constraint = json_constraint(schema, "/json") if schema else Constraint("json")
            matching = " matching the schema" if schema else ""
            self._view.inform(f"The next answer will be JSON{matching}. /json off cancels.")

    async def interrupt(self, discard: ChatTurn | None = None) -> None:
        """Stop the pending answers on the screen; keep the text of the running one.

        Unanswered prompts return to the prompt box, except that of `discard`.
        """
        turns = [turn for turn in self.pending() if turn in self._conversation]
        for turn in turns:
            self._stop_work(turn)
        unanswered = self._end_or_remove(turns, "done", "cancelled")
        if turns:
            self._show_phase("ready" if turns[-1] in unanswered else "stopped")
        await self._put_back(unanswered, discard)
        await self._answer_next()

    async def use_model(self, name: str | None) -> None:
        """Use another model after the running answer; None changes nothing."""
        if name is None:
            return
        try:
            model = await asyncio.to_thread(model_store.resolve, name)
        except AkunuError as error:
            is_loading = name in self._downloads.running
            self._view.show_error(f"{name} is still downloading" if is_loading else str(error))
            return
        if model.name == self.model and self.context_length:
            self._view.inform(f"{model.name} is already in use.")
        else:
            await self._load(model.name)

    async def _load(self, name: str) -> None:
        """Load a stored model, or load it again, after the running answer."""
        self.model = name
        self._is_missing = False
        self.context_length = self._tools.context_length = 0
        self._is_loading = True
        self._show_phase()
        self._session.switch(name)
        if not self._conversation.turns:
            await self._view.show_conversation()
        await self._answer_next()

    # Messages of the session thread

    async def receive(self, message: AnswerMessage) -> None:
        match message:
            case ModelLoaded():
                await self._on_loaded(message)
            case PrefillUpdate(request, done, total) if turn := self._turn_of(request):
                if turn in self._conversation and total:
                    self._view.status.progress = done / total
            case PieceArrived(request) if turn := self._turn_of(request):
                self._on_piece_arrived(turn, message)
            case AnswerFinished(request) if turn := self._turn_of(request):
                await self._on_finished(turn, message)
            case AnswerFailed(request, error) if request is None or self._turn_of(request):
                await self._fail(error)

    async def _on_loaded(self, message: ModelLoaded) -> None:
        status = self._view.status
        self.context_length = message.context_length
        self._tools.context_length = message.context_length
        self._view.prompt.use_model(message.context_length)
        self._is_loading = False
        self._show_phase()
        is_off = self._settings.options.draft == "off"
        self._view.panel.off = "drafting is off (--draft off)" if is_off else message.no_draft or ""
        if message.server != status.server:
            status.server = message.server
            await self._view.add_notice(
                f"{message.model} runs in akunu serve at {message.server}; none is loaded here."
                if message.server
                else f"{message.model} is loaded here; no server answers from now on."
            )
        if message.no_draft and self._settings.options.draft != "off":
            await self._view.add_notice(f"{message.model} cannot draft: {message.no_draft}")
        if message.note:
            await self._view.add_notice(message.note)
        if self._tools.offered.servers and not message.shows_tools:
            await self._view.add_notice(
                f"The chat template of {message.model} does not support tools. "
                "They are described in the system prompt, and it may call them badly."
            )
        await self._answer_next()

    def _on_piece_arrived(self, turn: ChatTurn, message: PieceArrived) -> None:
        turn.state = "answering"
        turn.thinking += message.thinking
        turn.calling = message.calling
        turn.add(message.delta)
        self._conversation_of(turn).save(turn)
        if answer := self._view.transcript.answer(turn):
            answer.sync()
        self._show_phase()
        self._show_stats(turn)

    async def _on_finished(self, turn: ChatTurn, message: AnswerFinished) -> None:
        turn.stats = message.stats
        if message.calls and message.reason == "stop":
            await self._call_tools(turn, message)
            return
        self._end_turn(turn, "done", message.reason)
        self._show_phase("stopped" if message.reason == "cancelled" else "ready")
        self._show_stats(turn)
        if turn not in self._conversation:
            tree = self._conversation_of(turn).tree
            self.unread.add(tree.conversation)
            self._view.inform(f"Answered: {tree.title}. Ctrl+O opens it.")
        seconds = message.stats.prefill_s + message.stats.decode_s
        if self._settings.current.bell and seconds >= _BELL_AFTER_S:
            self._view.ring_bell(is_seen=turn in self._conversation)
        await self._answer_next()

    async def _call_tools(self, turn: ChatTurn, message: AnswerFinished) -> None:
        self._show_stats(turn)
        self.active = None
        await self._tools.begin(turn, self._conversation_of(turn).tree, message.calls)
        if self._tools.is_waiting(turn) and self._settings.current.bell:
            self._view.ring_bell(is_seen=turn in self._conversation)
        await self._continue_with_results()

    async def decide(self, consent: Consent) -> None:
        self._tools.decide(consent)
        await self._continue_with_results()

    async def receive_from_tools(self, message: ToolServerMessage) -> None:
        await self._tools.receive(message)
        await self._continue_with_results()

    async def _continue_with_results(self) -> None:
        """Save the calls; before other prompts, continue answers whose calls all ended."""
        for turn in list(self._tools.turns):
            self._conversation_of(turn).save(turn)
            if all(use.has_ended for use in turn.rounds[-1].uses):
                del self._tools.turns[turn]
                turn.state = "queued"
                self._queue.appendleft(turn)
        self._show_phase()
        await self._answer_next()

    # Messages of the downloads

    def on_download_update(self, message: DownloadUpdate) -> None:
        download = self._downloads.running.get(message.name)
        if download is not None and self._waits_for(message.name):
            self._show_phase()
            self._view.status.progress = download.fraction
            if welcome := self._view.welcome:
                welcome.show_download(download.progress.describe())

    async def on_download_ended(self, message: DownloadEnded, *, is_listed: bool) -> None:
        """Use the model, or report the result unless the open list of models shows it."""
        if self._waits_for(message.name):
            if welcome := self._view.welcome:
                welcome.show_download("")
            if message.model:
                await self.use_model(message.model)
            else:
                why = message.error or f"{message.name} was not downloaded"
                await self._fail(f"{why}. Send a prompt to try again, or press F4 for other models")
                if welcome := self._view.welcome:
                    welcome.offer_download()
        elif message.error and not is_listed:
            self._view.show_error(message.error)
        elif message.model and not is_listed:
            self._view.inform(f"{message.model} downloaded: /model {message.model}")
        elif message.drafter:
            self._view.inform(f"{message.drafter} drafts for {message.name}.")
            if message.name == self.model:
                await self._load(self.model)

    def _waits_for(self, model: str) -> bool:
        """Whether `model` is used as soon as it is downloaded."""
        return self._is_missing and model == self.model

    async def _fail(self, error: str) -> None:
        """Show an error; unanswered prompts on the screen return to the prompt box."""
        # The next request of a turn that calls tools tries again.
        turns = [turn for turn in self.pending() if turn not in self._tools.turns]
        unanswered = self._end_or_remove(turns, "failed", None)
        self._is_loading = False
        self._view.status.phase = "failed"
        await self._put_back(unanswered)
        await self._view.add_notice(error, "error")
        self._view.show_state()

    def pending(self) -> list[ChatTurn]:
        """Return the running turns, those that call tools, and the queued ones, in order."""
        running = [self.active] if self.active else []
        return [*running, *self._tools.turns, *self._queue]

    def _next_turn(self) -> ChatTurn | None:
        """Return the next queued turn of a conversation without tool calls to finish."""
        calling = [tree.conversation for tree in self._tools.turns.values()]
        names = ((turn, self._conversation_of(turn).tree.conversation) for turn in self._queue)
        return next((turn for turn, name in names if name not in calling), None)

    def _turn_of(self, request: int) -> ChatTurn | None:
        return self.active if self.active and self.active.request == request else None

    def _conversation_of(self, turn: ChatTurn) -> Conversation:
        found = (each for each in self.background.values() if turn in each)
        return next(found, self._conversation)

    def _remove_pending(self, turn: ChatTurn) -> None:
        if turn is self.active:
            self.active = None
        elif turn in self._queue:
            self._queue.remove(turn)

    def _end_or_remove(
        self, turns: Sequence[ChatTurn], state: TurnState, reason: FinishReason | None
    ) -> list[ChatTurn]:
        """End answers of turns; return those on screen without output, no longer pending."""
        unanswered = []
        for turn in turns:
            if turn in self._conversation and not turn.has_output:
                self._remove_pending(turn)
                unanswered.append(turn)
            else:
                self._end_turn(turn, state, reason)
        return unanswered

    def _end_turn(self, turn: ChatTurn, state: TurnState, reason: FinishReason | None) -> None:
        self._remove_pending(turn)
        turn.state, turn.finish_reason, turn.calling = state, reason, None
        self._conversation_of(turn).save(turn)
        if answer := self._view.transcript.answer(turn):
            answer.show_state()
        for on_end in self.on_end:
            on_end(self._conversation_of(turn), turn)

    async def _answer_next(self) -> None:
        if self._is_missing and self._queue:
            self.download_missing()
        elif (
            self.active is None
            and not self._is_loading
            and not self._tools.is_starting
            and (turn := self._next_turn())
        ):
            self._queue.remove(turn)
            self.active = turn
            turn.state, turn.finish_reason, turn.model = "prefill", None, self.model
            turn.speedup = None
            self._requests += 1
            turn.request = self._requests
            # The request also retries a failed load.
            self._view.status.restart_timer()
            self._show_phase()
            self._show_stats(turn)
            if answer := self._view.transcript.answer(turn):
                answer.show_state()
            job = self.job_for(self._conversation_of(turn), turn)
            self._session.request(turn.request, job)
        elif self.active is None and self._queue:
            self._show_phase()
        self._view.show_state()

    def download_missing(self) -> None:
        """Download the model, which prompts then wait for."""
        if self._downloads.start(self.model):
            self._view.status.progress = 0.0
        self._show_phase()

    def show_status(self) -> None:
        turns = self._conversation.turns
        self._show_stats(turns[-1] if turns else None)
        self._tools.show_asked()
        if self._view.status.phase != "failed":
            self._show_phase()

    def _show_phase(self, idle: Phase = "ready") -> None:
        """Show what the model or a tool does, or why there is no model; otherwise `idle`."""
        here, phase, background_title = self._conversation, idle, ""
        if self._is_missing:
            phase = "missing" if self.needs_download else "downloading"
        elif not self.context_length and (not self.active or self.active.model == self.model):
            phase = "loading" if self._is_loading or self.active else "failed"
        elif self.active is not None:
            phase = "prefill" if self.active.state == "prefill" else "answering"
            if self.active not in here:
                background_title = collapse(self._conversation_of(self.active).tree.title)
        elif idle == "ready" and any(turn in here for turn in self._tools.turns):
            phase = "asking" if self._tools.asked else "calling"
        elif idle == "ready" and self._queue and self._tools.is_starting:
            phase = "calling"
        self._view.status.background_title = background_title
        self._view.status.phase = phase

    def _show_stats(self, turn: ChatTurn | None) -> None:
        if turn is None or turn in self._conversation:
            self._view.status.stats = turn.stats if turn else None
            self._view.panel.turn = self._view.title_row.turn = turn
            self._view.title_row.context = self.context_length

    async def _put_back(self, turns: Sequence[ChatTurn], discard: ChatTurn | None = None) -> None:
        """Remove unanswered turns, and return their prompts to the prompt box."""
        texts: list[str] = []
        for turn in reversed(turns):  # later turns first
            removed = self._conversation.remove(turn)
            if removed.role == "user":
                self._constraint = turn.constraint or self._constraint
            if removed.role == "user" and turn is not discard and not turn.summarizes:
                texts.insert(0, self._view.prompt.prompt_of(turn.prompt.text))
        if turns:
            await self._view.transcript.show_branch()
        if self._view.transcript.is_empty:
            await self._view.show_welcome()
        if texts and not self._view.prompt.text.strip():
            self._view.prompt.write_sent(texts.pop())
        for text in reversed(texts):
            self._view.prompt.put_back(text)


def _describe_progress(turn: ChatTurn) -> str:
    if turn.state == "queued":
        return "queued"
    if turn.state == "calling":
        return "▶ running a tool"
    if turn.state == "prefill" or turn.stats is None:
        return "▶ processing"
    return f"▶ {turn.stats.generated_tokens:,} tokens"
