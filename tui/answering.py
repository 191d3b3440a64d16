"""Asking the model and hearing its answer: one at a time, further prompts wait.

Owns which turn is being answered and which ones wait. The session is in a thread of its own
(`worker`); this side only asks, listens and stops. Messages about requests that were given up on
are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from akunu_py.errors import UsageError
from akunu_py.tui.base import ChatBase
from akunu_py.tui.conversation import Turn
from akunu_py.tui.prompt import slash
from akunu_py.tui.prompt.attachments import attach, join, mentions, split
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.session.messages import Failed, Finished, Loaded, PieceArrived, Prefilling
from akunu_py.tui.status import Phase
from akunu_py.tui.transcript.welcome import Welcome


class Answering(ChatBase):
    """Prompts in, answers out."""

    # What the person does

    async def on_prompt_box_submitted(self, event: PromptBox.Submitted) -> None:
        call = slash.parse(event.text)
        if isinstance(call, slash.Mistake):
            self._prompt.put_back(event.text)
            self._warn(call.text)
        elif call is not None:
            await slash.dispatch(self, call)
        else:
            await self._send(event.text)

    async def _send(self, text: str) -> None:
        """Asks, with the files that the prompt names; in the place of the prompt that is edited."""
        if mentions(text):
            folder, room = self._setup.folder, self._context_length
            try:
                files = await asyncio.to_thread(attach, text, folder, room)
            except UsageError as error:
                self._prompt.put_back(text)
                self._warn(str(error))
                return
            text = join(text, files)
        await self._transcript.query(Welcome).remove()
        edited = self._edited
        self._leave_editing()
        if edited is not None:
            await self._interrupt(forget=edited)
        if edited in self._conversation.turns:
            await self._ask(self._conversation.edit(edited, text))
        else:
            await self._ask(self._conversation.ask(text))

    async def _ask(self, turn: Turn) -> None:
        """Shows and keeps a new turn, and has it answered when its time comes."""
        if self._keeper is not None:
            tree = self._conversation.tree
            self._keeper.save(tree.conversation, turn.prompt, tree.title)
        self._keep(turn)
        await self._transcript.read_branch()
        await self._transcript.action_follow()
        self._waiting.append(turn)
        self._ask_next()

    async def action_stop(self) -> None:
        """Ends the answer and keeps it. Prompts that were not answered go back to the box."""
        if self._is_busy:
            await self._interrupt()
        else:
            self._leave_editing()
        self._prompt.focus()
        self._show_hints()

    def _leave_editing(self) -> None:
        """Puts what was in the box before an earlier prompt was edited back there."""
        if self._edited is not None:
            self._edited = None
            self._prompt.write(self._draft)

    async def _interrupt(self, forget: Turn | None = None) -> None:
        """Ends everything that is under way. The prompt of `forget` is not wanted any more."""
        unanswered = list(self._waiting)
        self._waiting.clear()
        if turn := self._active:
            self._active = None
            if self._session is not None:
                self._session.stop(turn.request)
            if turn.answer or turn.thinking:
                turn.state, turn.finish = "done", "cancelled"
                self._show_end(turn)
                self._rest("stopped")
            else:
                unanswered.insert(0, turn)
                self._rest("ready")
        await self._give_back(unanswered, forget)
        self._show_hints()

    # What the session thread tells

    async def on_loaded(self, message: Loaded) -> None:
        self._context_length = message.context_length
        self._status.phase = "reading" if self._active else "ready"
        self._status.gauges = message.gauges
        if message.no_draft and self._options.draft != "off":
            await self._note(f"{message.model} runs without drafting: {message.no_draft}")
        if message.note:
            await self._note(message.note)
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
        turn.thinking += message.thinking
        turn.add(message.text, message.drafted, message.rejected)
        turn.passes += message.passes
        self._keep(turn)
        if view := self._transcript.answer(turn):
            view.sync()
        self._status.phase = "answering"
        self._status.stats = message.stats
        self._status.gauges = message.gauges
        self._panel.show(turn, message.gauges.speedup)

    def on_finished(self, message: Finished) -> None:
        turn = self._active
        if turn is None or not self._is_active(message.turn):
            return
        turn.state, turn.finish, turn.stats = "done", message.reason, message.stats
        self._active = None
        self._status.stats = message.stats
        self._status.gauges = message.gauges
        self._rest("stopped" if message.reason == "cancelled" else "ready")
        self._panel.show(turn, message.gauges.speedup)
        self._show_end(turn)
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
            if turn.answer or turn.thinking:
                self._show_end(turn)
            else:
                unanswered.insert(0, turn)
        self._status.phase = "failed"
        await self._give_back(unanswered)
        await self._note(message.error, "error")
        self._show_hints()

    # In between

    def _is_active(self, request: int) -> bool:
        return self._active is not None and self._active.request == request

    def _ask_next(self) -> None:
        """Sends the next prompt that waits, unless the model is busy."""
        if self._absent and self._waiting:
            self._fetch()
        elif self._active is None and self._waiting and self._status.phase != "loading":
            turn = self._active = self._waiting.popleft()
            turn.state, turn.finish, turn.model = "reading", None, self._model
            self._requests += 1
            turn.request = self._requests
            self._status.progress = 0.0
            # A load that failed is tried again with the request.
            self._status.phase = "reading" if self._context_length else "loading"
            self._status.stats = None
            self._panel.show(None, None)
            if view := self._transcript.answer(turn):
                view.show_state()
            if self._session is not None:
                messages = self._conversation.history(turn, self._settings.system)
                self._session.ask(turn.request, messages, self._options)
        self._show_hints()

    def _rest(self, phase: Phase) -> None:
        """What the line says between answers; another model may be under way."""
        self._status.phase = phase if self._context_length else "loading"

    def _keep(self, turn: Turn) -> None:
        """Hands the answer as it is now to the keeper."""
        self._conversation.tree.replace(turn.reply)
        if self._keeper is not None:
            self._keeper.save(self._conversation.tree.conversation, turn.reply)

    def _show_end(self, turn: Turn) -> None:
        self._keep(turn)
        if view := self._transcript.answer(turn):
            view.show_state()

    async def _give_back(self, turns: Sequence[Turn], forget: Turn | None = None) -> None:
        """Takes unanswered turns out of the conversation, and puts their prompts into the box."""
        tree = self._conversation.tree
        texts: list[str] = []
        for turn in reversed(turns):  # those that follow first
            removed = self._conversation.drop(turn)
            if self._keeper is not None:
                self._keeper.remove(tree.conversation, removed.id)
            if removed.role == "user" and turn is not forget:
                texts.insert(0, split(turn.prompt.text)[0])
        if turns:
            await self._transcript.read_branch()
        if texts:
            self._prompt.put_back("\n\n".join(texts))
        if self._transcript.is_empty:
            await self._transcript.add(self._welcome())
