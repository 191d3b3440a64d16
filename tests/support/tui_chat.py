"""Drive the chat without a model: press keys, post the messages of a session, see the screen."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import groupby
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

from rich.cells import cell_len
from textual.message import Message as TextualMessage
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import Input, Markdown

from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.engine.events import TextDelta
from akunu_py.errors import ConversationError
from akunu_py.settings import Settings
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.screens.conversation_list import ChosenConversation
from akunu_py.tui.status import MessageLine, StatusLine
from akunu_py.tui.transcript.turn import AnswerView, Notice, PromptView
from akunu_py.tui.transcript.view import Transcript
from akunu_py.tui.workers.chat_client import AnswerFinished, ChatClient, ModelLoaded, PieceArrived
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import NO_TOKEN_LIMIT, FinishReason, GenerateOptions, Message, Stats

STATS = Stats(generated_tokens=11, target_passes=5, drafted=10, accepted=5, decode_s=0.5)
SPEEDUP = 1.32


class Chat:
    """A running app, with verbs for what users and sessions do, and views of the screen."""

    store: StoreThread  # of a chat that is saved

    def __init__(self, pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, ChatApp)
        self.pilot, self.app = pilot, pilot.app
        self.box = self.app.query_one(PromptBox)
        self.status = self.app.query_one(StatusLine)
        self.transcript = self.app.query_one(Transcript)
        self._request = 1

    # What the screen shows

    @property
    def screen(self) -> str:
        return "\n".join(strip.text for strip in self.strips())

    def strips(self) -> list[Strip]:
        return self.app.screen._compositor.render_strips()

    def phase(self) -> str:
        """A method, because mypy narrows attributes that it has compared."""
        return self.status.phase

    def text(self) -> str:
        """Return the text in the prompt box."""
        return self.box.text

    @property
    def status_line(self) -> str:
        return str(self.status.render())

    @property
    def prompts(self) -> list[str]:
        return [str(widget.render()) for widget in self.app.query(PromptView)]

    @property
    def notices(self) -> list[str]:
        return [str(widget.content) for widget in self.app.query(Notice)]

    @property
    def markdown(self) -> list[str]:
        return [widget.source for widget in self.app.query(Markdown)]

    @property
    def feet(self) -> list[str]:
        """The lines below the answers: how each ended, and its branch."""
        feet = (view.query_one(".foot") for view in self.app.query(AnswerView))
        return [str(foot.render()) if foot.display else "" for foot in feet]

    def drafts(self, mark: Literal["underline", "strike"]) -> str:
        """Return the marked drafts in the transcript: accepted (underlined) or rejected ones."""
        area = self.transcript.region
        rows = (strip.crop(0, area.right) for strip in self.strips()[area.y : area.bottom])
        return " ".join(
            "".join(text for text, style, _ in group)
            for row in rows
            for marked, group in groupby(row, lambda each: bool(getattr(each.style, mark, False)))
            if marked
        )

    @property
    def notifications(self) -> list[str]:
        """The current texts of the message lines."""
        lines = [line for each in self.app.screen_stack for line in each.query(MessageLine)]
        return [line.text for line in lines if line.text]

    @property
    def history(self) -> list[Message]:
        """The messages that the model is answering."""
        assert self.app.answering.active is not None
        system = self.app.settings.current.system
        return self.app.conversation.history(self.app.answering.active, system)

    @property
    def conversation(self) -> str:
        """The ID of the open conversation."""
        return self.app.conversation.tree.conversation

    # What users do

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def send(self, text: str) -> None:
        self.box.insert(text)
        await self.press("enter")

    async def click_on(self, text: str, which: int = 0, times: int = 1) -> None:
        """Click on the first letter of a text on the screen."""
        places = [
            (cell_len(line[: found.start()]), row)
            for row, line in enumerate(self.screen.splitlines())
            for found in re.finditer(re.escape(text), line)
        ]
        await self.pilot.click(offset=places[which], times=times)
        await self.pilot.pause()

    async def resize(self, width: int, height: int) -> None:
        await self.pilot.resize_terminal(width, height)  # and pause

    async def act(self, action: str) -> None:
        """Run an action of the app, such as `export('file')`."""
        await self.app.run_action(f"app.{action}")
        await self.pilot.pause()

    # What the session does

    async def post(self, *messages: TextualMessage) -> None:
        for message in messages:
            self.app.post_message(message)
        await self.pilot.pause()
        await self.until(lambda: all(view.is_drawn for view in self.app.query(AnswerView)))

    def request(self) -> int:
        """Return the number of the last request."""
        if self.app.answering.active is not None:
            self._request = self.app.answering.active.request
        return self._request

    async def piece(self, text: str, *drafted: tuple[int, int]) -> None:
        await self.post(PieceArrived(self.request(), TextDelta(text, drafted, stats=STATS)))

    async def finish(self, reason: FinishReason = "stop", stats: Stats = STATS) -> None:
        await self.post(AnswerFinished(self.request(), reason, stats))

    async def answer(self, text: str) -> None:
        """Generate a whole answer."""
        await self.piece(text)
        await self.finish()

    async def talk(self, *texts: str) -> None:
        """Send prompts and answer them, alternately."""
        for number, text in enumerate(texts):
            await (self.answer if number % 2 else self.send)(text)

    async def open(self, conversation: str) -> None:
        """Open a saved conversation."""
        await self.app.library.open(ChosenConversation(conversation))
        await self.pilot.pause()

    async def show(self, tree: ConversationTree) -> None:
        await self.app.library.show(tree)
        await self.rest()

    # Waiting for events

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until `holds` returns true, at most two minutes, and for what follows from it."""
        end = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < end, "the expected event did not happen"
            await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def until_shown(self, text: str) -> None:
        await self.until(lambda: text in self.screen)

    async def rest(self) -> None:
        """Wait until the picture no longer changes."""
        before: list[Strip] = []
        for _ in range(600):
            await self.pilot.pause(0.02)
            await self.pilot.pause()
            now = self.strips()
            if now == before and all(view.is_drawn for view in self.app.query(AnswerView)):
                return
            before = now
        raise AssertionError("the picture does not come to rest")


def silent_client() -> Any:
    """Return a client that requests nothing: tests post the messages of the model."""
    client = Mock(spec=ChatClient)
    client.count_tokens.return_value = None
    return client


def broken_store() -> Any:
    """Return a store that saves nothing and can read nothing."""
    store = Mock(spec=StoreThread)
    store.call.side_effect = ConversationError("the disk is gone")
    return store


@contextlib.asynccontextmanager
async def chat(
    *, loaded: bool = True, size: tuple[int, int] = (80, 24),
    store: StoreThread | Path | None = None, copy_program: list[str] | None = None, **config: Any,
) -> AsyncIterator[Chat]:  # fmt: skip
    """Start the chat. `store`: a path is opened here, and closed at the end."""
    thread = StoreThread(store) if isinstance(store, Path) else store or broken_store()
    config["copy_program"] = lambda: copy_program
    app = ChatApp(ChatConfig("starter", GenerateOptions(), silent_client(), thread, **config))
    async with app.run_test(size=size) as pilot:
        chat = Chat(pilot)
        chat.store = thread
        if loaded:
            await chat.post(ModelLoaded("starter", 8192))
        yield chat
    if isinstance(store, Path):
        assert await asyncio.to_thread(thread.close, 60)


def tree_of(*pairs: tuple[str, str]) -> ConversationTree:
    """Return a conversation of prompts (IDs p0, p1, ...) and their answers (r0, r1, ...)."""
    tree, parent = ConversationTree(), None
    for number, (prompt, answer) in enumerate(pairs):
        tree.add(ChatMessage("user", prompt, parent, id=f"p{number}"))
        parent = f"r{number}"
        tree.add(ChatMessage("assistant", answer, f"p{number}", finish_reason="stop", id=parent))
    return tree


Compare = Callable[..., bool]  # the fixture `snap_compare`


def has_picture(
    compare: Compare, script: Callable[[Chat], Awaitable[None]], size: tuple[int, int] = (80, 24),
    **config: Any,
) -> bool:  # fmt: skip
    """Compare the screen after `script` with the stored picture. config: fields of `ChatConfig`."""

    async def run(pilot: Pilot[None]) -> None:
        it = Chat(pilot)
        it.box.cursor_blink = False
        await script(it)
        for field in it.app.screen.query(Input):
            field.cursor_blink = False
        await it.rest()

    look = Settings(theme="dark", reduced_motion=True)
    config = {"settings": look, "store": broken_store()} | config
    app = ChatApp(ChatConfig("starter", GenerateOptions(NO_TOKEN_LIMIT), silent_client(), **config))
    return compare(app, terminal_size=size, run_before=run)
