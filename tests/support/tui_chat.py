"""The chat without a model, for tests: keys go in, and what a session would post is posted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rich.cells import cell_len
from textual.message import Message as TextualMessage
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import Markdown

from akunu_py.decoding.events import Gauges
from akunu_py.settings import Settings
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.status import MessageLine, StatusLine
from akunu_py.tui.transcript.drafting import DraftedSection, DraftedText
from akunu_py.tui.transcript.turn import AnswerView, Notice, PromptView
from akunu_py.tui.transcript.view import Transcript
from akunu_py.tui.workers.chat_client import AnswerFinished, ModelLoaded, PieceArrived
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.tui.workers.tool_servers import ToolServers
from akunu_py.types import GenerateOptions, Message, Stats

STATS = Stats(generated_tokens=11, target_passes=5, drafted=10, accepted=5, decode_s=0.5)
GAUGES = Gauges(540_000_000, 1.32)


class Chat:
    """An app under test, with the parts that tests look at."""

    def __init__(self, pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, ChatApp)
        self.pilot, self.app = pilot, pilot.app
        self.box = self.app.query_one(PromptBox)
        self.status = self.app.query_one(StatusLine)
        self.transcript = self.app.query_one(Transcript)

    def phase(self) -> str:
        """A method, because a type checker believes that an attribute stays what it was."""
        return self.status.phase

    def text(self) -> str:
        """What is in the box."""
        return self.box.text

    @property
    def prompts(self) -> list[str]:
        return [str(widget.render()) for widget in self.app.query(PromptView)]

    @property
    def notices(self) -> list[str]:
        return [str(widget.content) for widget in self.app.query(Notice)]

    @property
    def markdown(self) -> list[str]:
        return [widget.source for widget in self.app.query(Markdown)]

    def screen_text(self) -> str:
        """What is on the screen."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    async def click_on(self, text: str, which: int = 0) -> None:
        """Clicks on the first letter of a text on the screen, or of another place of it."""
        lines = self.screen_text().splitlines()
        places = [
            (cell_len(line[: found.start()]), row)
            for row, line in enumerate(lines)
            for found in re.finditer(re.escape(text), line)
        ]
        await self.pilot.click(offset=places[which])
        await self.pilot.pause()

    @property
    def feet(self) -> list[str]:
        """What stands below the answers: how they ended, and which of several each is."""
        feet = (view.query_one(".foot") for view in self.app.query(AnswerView))
        return [str(foot.render()) if foot.display else "" for foot in feet]

    @property
    def drafted(self) -> list[str]:
        """The texts of the drafting view, an answer each."""
        return [
            "\n".join(str(stretch.render()) for stretch in view.query(DraftedSection))
            for view in self.app.query(DraftedText)
        ]

    @property
    def notifications(self) -> list[str]:
        """What the message lines say now."""
        lines = [line for each in self.app.screen_stack for line in each.query(MessageLine)]
        return [line.text for line in lines if line.text]

    @property
    def history(self) -> list[Message]:
        """What the model is given to answer now."""
        assert self.app.answering.active is not None
        system = self.app.settings.current.system
        return self.app.conversation.history(self.app.answering.active, system)

    async def post(self, *messages: TextualMessage) -> None:
        for message in messages:
            self.app.post_message(message)
        for _ in range(2):  # A handler waits for Textual's parser threads, then moves the focus.
            passed = asyncio.Event()
            if self.app.call_later(passed.set):
                await passed.wait()
        await self.pilot.pause()
        while not all(view.is_drawn for view in self.app.query(AnswerView)):
            await self.pilot.pause()

    async def send(self, text: str) -> None:
        self.box.insert(text)
        await self.press("enter")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def act(self, action: str) -> None:
        """Runs an action of the app, `export('file')` for one."""
        await self.app.run_action(f"app.{action}")
        await self.pilot.pause()

    async def piece(self, text: str, *drafted: tuple[int, int], turn: int = 1) -> None:
        """`turn`: the number of the request."""
        await self.post(PieceArrived(turn, text, drafted, STATS))

    async def answer(self, text: str, turn: int = 1) -> None:
        """A whole answer."""
        await self.piece(text, turn=turn)
        await self.post(AnswerFinished(turn, "stop", STATS))


@contextlib.asynccontextmanager
async def chat(
    *,
    loaded: bool = True,
    size: tuple[int, int] = (80, 24),
    store: StoreThread | None = None,
    directory: Path | None = None,
    settings: Settings | None = None,
    tools: ToolServers | None = None,
) -> AsyncIterator[Chat]:
    config = ChatConfig(
        "starter",
        GenerateOptions(),
        settings or Settings(),
        store=store,
        directory=directory or Path.cwd(),
        tools=tools,
    )
    async with ChatApp(config).run_test(size=size) as pilot:
        chat = Chat(pilot)
        if loaded:
            await chat.post(ModelLoaded("starter", 8192))
        yield chat


async def at_rest(pilot: Pilot[None]) -> None:
    """Waits until the picture no longer changes: what is drawn late, or moves, takes a few rounds
    of the event loop."""
    before: list[Strip] = []
    for _ in range(600):
        await pilot.pause(0.02)
        await pilot.pause()
        now = pilot.app.screen._compositor.render_strips()
        if now == before and all(view.is_drawn for view in pilot.app.query(AnswerView)):
            return
        before = now
    raise AssertionError("the picture does not come to rest")


async def until(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    """Waits until it `holds`."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come"
        await pilot.pause(0.01)
