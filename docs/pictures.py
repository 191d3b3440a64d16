"""Makes the pictures of the chat for the README: `python docs/pictures.py [DIRECTORY]`.

Real ones: the app runs without a terminal on the starter, keys are pressed, a model answers. The
numbers in them are those of the machine that made them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from textual.pilot import Pilot

from akunu_py.models.store import model_store
from akunu_py.settings import Settings
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.status import StatusLine
from akunu_py.tui.workers.chat_client import ChatClient
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import DEFAULT_MODEL, GenerateOptions

SIZE = (92, 28)
QUESTIONS = (
    "Write a Python function that reverses a list, and explain it in one sentence.",
    "Write the same function for a string.",
)
_TIMEOUT_S = 300.0


async def take(directory: Path, data: Path) -> list[Path]:
    """Chats with the starter and saves the same conversation in both views; gives the paths.

    data: where the chat is stored.
    """
    os.environ["COLORTERM"] = "truecolor"  # as the theme needs
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.loop import StepLoop

    model = model_store.get(DEFAULT_MODEL)
    session = ChatClient(
        model.name, lambda name: StepLoop(Engine.load(model.path, name=name), slots=1)
    )
    options = GenerateOptions(max_tokens=220)
    store = StoreThread(data / "conversations.db")
    app = ChatApp(ChatConfig(model.name, options, session, store, Settings(theme="dark")))
    async with app.run_test(size=SIZE) as pilot:
        app.query_one(PromptBox).cursor_blink = False
        for question in QUESTIONS:
            await _ask(pilot, question)
        chat = _save(app, directory, "chat.svg")
        await pilot.press("f2")
        await pilot.pause(0.5)
        drafting = _save(app, directory, "drafting.svg")
    session.close(_TIMEOUT_S)
    return [chat, drafting]


async def _ask(pilot: Pilot[None], prompt: str) -> None:
    """Sends a prompt and waits for the end of its answer."""
    status = pilot.app.query_one(StatusLine)
    pilot.app.query_one(PromptBox).insert(prompt)
    await pilot.press("enter")
    end = time.monotonic() + _TIMEOUT_S
    await pilot.pause(0.5)
    while status.phase != "ready":
        if status.phase == "failed" or time.monotonic() > end:
            raise RuntimeError(f"no answer to {prompt!r}: {status.phase}")
        await pilot.pause(0.1)
    await pilot.pause(0.5)


def _save(app: ChatApp, directory: Path, name: str) -> Path:
    return Path(app.save_screenshot(name, path=str(directory)))


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data:
        for picture in asyncio.run(take(target, Path(data))):
            print(picture)
