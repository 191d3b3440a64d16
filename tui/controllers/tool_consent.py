"""Tools of MCP servers: which are offered, and the user's consent to each call."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from textual.message import Message

from akunu_py.chats.tree import ConversationTree, Outcome, ToolUse, stopped
from akunu_py.mcp.output import limit_for, shorten
from akunu_py.text import collapse
from akunu_py.tui.open_conversation import ChatTurn, Conversation
from akunu_py.tui.screens.consent import Consent
from akunu_py.tui.screens.main import ChatView
from akunu_py.tui.workers.tool_servers import (
    OfferedTools,
    ToolCalled,
    ToolServerFailed,
    ToolServerMessage,
    ToolServers,
    ToolsListed,
)
from akunu_py.types import ToolCall

_START_S = 30.0  # Prompts wait this long for servers that start.


@dataclass(eq=False)
class ToolController:
    """Offers tools, asks before each call, runs calls one by one, stores results."""

    _servers: ToolServers
    _view: ChatView
    _conversation: Conversation  # the open one
    _noted: Mapping[str, str]  # errors of servers that the last run noted
    offered: OfferedTools = field(default_factory=OfferedTools)
    # Turns whose calls run or have just ended, with their conversations:
    turns: dict[ChatTurn, ConversationTree] = field(default_factory=dict)
    context_length: int = 0  # of the model, 0 if unknown
    _allowed: set[tuple[str, str, str]] = field(default_factory=set)  # conversation, server, tool
    _is_overdue: bool = False  # Servers take long to start.

    def __post_init__(self) -> None:
        self.offered.servers = self._servers.names

    def start(self, post: Callable[[Message], object]) -> None:
        if self.offered.servers:
            self._servers.start(post)
            asyncio.get_running_loop().call_later(_START_S, post, ToolServersOverdue())

    @property
    def is_starting(self) -> bool:
        """Whether prompts should wait for servers to start."""
        offered = self.offered
        started = len(offered.listed) + len(offered.failed)
        return not self._is_overdue and started < len(offered.servers)

    # Calls

    async def begin(
        self, turn: ChatTurn, tree: ConversationTree, calls: Sequence[ToolCall]
    ) -> None:
        """Show the calls at the end of an answer; run them one by one, each with consent."""
        servers = {each.name: each.server for each in self.offered.all_tools()}
        turn.begin_round(ToolUse(call, servers.get(call.name, "")) for call in calls)
        turn.state = "calling"
        self.turns[turn] = tree
        await self._view.transcript.renew(turn)
        self._advance(turn)

    def decide(self, consent: Consent) -> None:
        if self.asked is None:
            return
        turn, use = self.asked
        if consent == "deny":
            self._set(turn, use.call.id, "denied")
        else:
            if consent == "always":
                self._allowed.add(self._permission(turn, use))
            self._run(turn, use)
        self._advance(turn)

    def cancel(self, turn: ChatTurn) -> None:
        for use in turn.rounds[-1].uses:
            if use.outcome == "running":
                self._servers.cancel(use.call.id)
        turn.rounds[-1] = stopped(turn.rounds[-1])
        del self.turns[turn]
        self._sync(turn)
        self.show_asked()

    async def receive(self, message: ToolServerMessage) -> None:
        if isinstance(message, ToolCalled):
            for turn in self.turns:
                if any(use.call.id == message.call for use in turn.rounds[-1].uses):
                    text = shorten(message.output.text, limit_for(self.context_length))
                    outcome: Outcome = "failed" if message.output.is_error else "done"
                    self._set(turn, message.call, outcome, text)
                    self._advance(turn)
            return
        was_starting = self.is_starting
        if isinstance(message, ToolServersOverdue):
            self._is_overdue = True
        elif isinstance(message, ToolsListed):
            self.offered.listed[message.server] = message.tools
            noun = "tool" if len(message.tools) == 1 else "tools"
            listed = f"{message.server}: {len(message.tools)} {noun}. /tools lists them."
            self._view.inform(listed)
        elif isinstance(message, ToolServerFailed):
            self.offered.failed[message.server] = message.error
            text = f"The tools of {message.server} are not available: {message.error}"
            if self._noted.get(message.server) == message.error:
                self._view.show_error(text)
            else:
                await self._view.add_notice(text, "error")
        notice = self.offered.explain_room(self.context_length)
        if notice and was_starting and not self.is_starting:
            await self._view.add_notice(notice)

    def _advance(self, turn: ChatTurn) -> None:
        for use in turn.rounds[-1].uses:
            if use.has_ended:
                continue
            if use.outcome == "waiting" and not self.offered.find(use.server, use.call.name):
                names = ", ".join(each.name for each in self.offered.for_model()) or "none"
                text = f"There is no tool {use.call.name!r}. Tools: {names}"
                self._set(turn, use.call.id, "failed", shorten(text, limit_for(0)))
                continue
            if use.outcome == "waiting" and self._permission(turn, use) in self._allowed:
                self._run(turn, use)
            break
        if turn not in self._conversation and self._waiting(turn):
            self._view.inform(
                f"{collapse(self.turns[turn].title)}: a tool call waits for your decision. "
                "Ctrl+O opens the chat."
            )
        self.show_asked()

    def _run(self, turn: ChatTurn, use: ToolUse) -> None:
        tool = self.offered.find(use.server, use.call.name)
        if tool is None:
            return  # `_advance` tells the model.
        self._set(turn, use.call.id, "running")
        self._servers.call(use.call.id, use.server, tool.listed.name, use.call.arguments)

    def _set(self, turn: ChatTurn, call: str, outcome: Outcome, result: str = "") -> None:
        last = turn.rounds[-1]
        uses = (
            replace(use, outcome=outcome, result=result) if use.call.id == call else use
            for use in last.uses
        )
        turn.rounds[-1] = replace(last, uses=tuple(uses))
        self._sync(turn)

    def _sync(self, turn: ChatTurn) -> None:
        if answer := self._view.transcript.answer(turn):
            answer.sync_rounds()

    def _permission(self, turn: ChatTurn, use: ToolUse) -> tuple[str, str, str]:
        return self.turns[turn].conversation, use.server, use.call.name

    # The question

    @property
    def asked(self) -> tuple[ChatTurn, ToolUse] | None:
        """The call in the open conversation that waits for a decision, and its turn."""
        turns = (turn for turn in self.turns if turn in self._conversation)
        return next(((turn, use) for turn in turns if (use := self._waiting(turn))), None)

    def is_waiting(self, turn: ChatTurn) -> bool:
        return turn in self.turns and self._waiting(turn) is not None

    def show_asked(self) -> None:
        """Show the question about the next call of the open conversation, or hide it."""
        if self.asked is None:
            self._view.consent.hide()
        else:
            turn, use = self.asked
            uses = turn.rounds[-1].uses
            self._view.message.clear()  # The question needs the room.
            self._view.consent.show(use, uses.index(use) + 1, len(uses))
        here = [turn.rounds[-1].uses for turn in self.turns if turn in self._conversation]
        running = [use.call.name for uses in here for use in uses if use.outcome == "running"]
        self._view.status.tool = running[0] if running else ""

    def _waiting(self, turn: ChatTurn) -> ToolUse | None:
        use = next((use for use in turn.rounds[-1].uses if not use.has_ended), None)
        return use if use is not None and use.outcome == "waiting" else None


class ToolServersOverdue(ToolServerMessage):
    """Servers have had their time to start; prompts do not wait for them any more."""
