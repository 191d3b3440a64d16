"""The model picker and its downloads. What pulling would do is done by a function of the test.

To accept new pictures: pytest tests/tui/test_models.py --snapshot-update, then look at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.message import Message
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from akunu_py.errors import FetchError
from akunu_py.models import catalog
from akunu_py.models.catalog import Machine
from akunu_py.models.load.fit import CacheGrowth
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from akunu_py.models.store.progress import Progress
from akunu_py.tui.screens.main import describe_offer
from akunu_py.tui.screens.model_picker import ModelsScreen, better_model
from akunu_py.tui.workers.downloads import DownloadEnded, Downloads, DownloadUpdate
from tests.support.tui_chat import at_rest, until
from tests.support.tui_host import Compare, Host, Pulled, sizes_and_themes

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


@pytest.fixture(autouse=True)
def few_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(catalog, "load_catalog", lambda: ENTRIES)
    monkeypatch.setattr(
        "akunu_py.tui.screens.model_picker.probe_machine", lambda: (GB // 50, MACHINE)
    )
    monkeypatch.setattr("akunu_py.tui.screens.model_picker.free_space", lambda: 310 * GB)
    stored = [
        StoredModel("starter", tmp_path, GB // 10, 8192, license="Apache-2.0"),
        StoredModel("torn", tmp_path, GB, damaged="model.safetensors is missing"),
    ]
    monkeypatch.setattr(model_store, "list_models", lambda: stored)


@pytest.fixture
def pulled() -> Iterator[Pulled]:
    pulled = Pulled()
    yield pulled
    pulled.proceed.set()


def screen(pulled: Pulled) -> tuple[Host, ModelsScreen]:
    downloads = Downloads(lambda message: host.post_message(message), pulled)
    shown = ModelsScreen("starter", downloads, MEMORY)
    host = Host(shown)
    return host, shown


def lines(shown: ModelsScreen) -> list[str]:
    return [str(option.prompt).rstrip() for option in shown.query_one(OptionList).options]


def about(shown: ModelsScreen) -> str:
    return str(shown.query_one("#description", Static).render())


async def test_models_here_come_first_then_those_that_fit(pulled: Pulled) -> None:
    host, shown = screen(pulled)
    async with host.run_test(size=(90, 24)):
        names = [line.split()[0] if line[0] != "●" else line.split()[1] for line in lines(shown)]
        assert names == ["On", "starter", "torn", "To", "good-4b", "coder-7b", "big-30b"]
        text = "\n".join(lines(shown))
        for words in ("in use", "damaged", "✓ fits", "✗ too large", "needs 2.5 GB"):
            assert words in text


async def test_enter_uses_a_model_that_is_here_and_escape_none(pulled: Pulled) -> None:
    host, _ = screen(pulled)
    async with host.run_test() as pilot:
        await pilot.press("enter")
    assert host.results == ["starter"]
    host, _ = screen(pulled)
    async with host.run_test() as pilot:
        await pilot.press("escape")
    assert host.results == [None]


async def test_words_find_a_model_and_none_finds_none(pulled: Pulled) -> None:
    host, shown = screen(pulled)
    async with host.run_test() as pilot:
        await pilot.press(*"code")
        assert [line.split()[0] for line in lines(shown)] == ["To", "coder-7b"]
        await pilot.press(*"xyz", "enter", "down", "ctrl+x")
        assert lines(shown) == ["No matching model."]
        assert (host.results, pulled.asked) == ([], [])


async def test_fetching_shows_progress_and_goes_on_behind_the_chat(pulled: Pulled) -> None:
    pulled.steps = [Progress("download", GB, 2 * GB, 10**7, 185)]
    host, shown = screen(pulled)
    async with host.run_test(size=(90, 24)) as pilot:
        await pilot.press(*"good", "enter")
        assert about(shown) == (
            "Download 2.0 GB? 310 GB free; about 3 min at 100 Mbit/s. "
            "Press Enter again to download."
        )
        await pilot.press("down", "x", "backspace")
        await pilot.press("enter")
        assert (pulled.asked, list(shown._downloads.running)) == ([], []), "the question was left"
        await pilot.press("enter")
        await until(pilot, lambda: "45%" in "\n".join(lines(shown)))
        assert about(shown) == "download: 1.0 GB of 2.0 GB · 10.0 MB/s · 3:05 left"
        await pilot.press("enter")
        assert pulled.asked == ["good-4b"], "not twice at once"
        await pilot.press("escape")
        assert list(shown._downloads.running) == ["good-4b"]
        pulled.proceed.set()
        await until(pilot, lambda: not shown._downloads.running)


async def test_a_repository_of_the_hub_can_be_named(pulled: Pulled) -> None:
    host, shown = screen(pulled)
    async with host.run_test(size=(90, 24)) as pilot:
        await pilot.press(*"ab", "slash", *"cd", "enter")
        assert "size is unknown" in about(shown)
        await pilot.press("enter")
        await until(pilot, lambda: pulled.asked == ["ab/cd"])


async def test_a_click_fetches_nothing_before_the_second_one(pulled: Pulled) -> None:
    host, shown = screen(pulled)
    async with host.run_test(size=(90, 24)) as pilot:
        at = [line.split()[0] for line in lines(shown)].index("good-4b")
        await pilot.click(OptionList, offset=(5, at))
        assert (about(shown)[:16], shown._downloads.running) == ("Download 2.0 GB?", {})
        await pilot.click(OptionList, offset=(5, at + 1))
        assert (about(shown)[:16], shown._downloads.running) == ("Download 4.0 GB?", {})
        await pilot.click(OptionList, offset=(5, at + 1))
        await until(pilot, lambda: pulled.asked == ["coder-7b"])


async def test_a_model_that_is_too_large_is_fetched_at_the_second_enter(pulled: Pulled) -> None:
    host, shown = screen(pulled)
    async with host.run_test() as pilot:
        await pilot.press(*"big", "enter")
        assert "too much for this machine" in about(shown)
        assert pulled.asked == []
        await pilot.press("enter")
        await until(pilot, lambda: pulled.asked == ["big-30b"])


async def test_a_download_can_be_stopped(pulled: Pulled) -> None:
    host, shown = screen(pulled)
    async with host.run_test() as pilot:
        await pilot.press(*"good", "enter", "enter")
        await until(pilot, lambda: pulled.asked == ["good-4b"])
        await pilot.press("ctrl+x")
        await until(pilot, lambda: not shown._downloads.running)
        await until(pilot, lambda: about(shown) == "Good at most things.")


async def test_a_download_that_fails_says_why(pulled: Pulled) -> None:
    why = "the hub does not answer; check " + "the network, then " * 9 + "try again"
    pulled.error = FetchError(why)
    pulled.steps = [Progress("waiting: no connection to the hub")]
    host, shown = screen(pulled)
    async with host.run_test(size=(90, 24)) as pilot:
        await pilot.press(*"good", "enter", "enter")
        await until(pilot, lambda: "waiting: no connection to" in "\n".join(lines(shown)))
        pulled.proceed.set()
        await until(pilot, lambda: about(shown) == f"{why}. Press Enter to try again.")
        assert ["✗ failed" in line for line in lines(shown)] == [False, True]
        description = shown.query_one("#description")
        await until(pilot, lambda: description.size.height > 2)  # all of it is seen
        assert description.region.bottom <= shown.query_one("#dialog").region.bottom - 1
    again = ModelsScreen("starter", shown._downloads, MEMORY)
    async with Host(again).run_test(size=(90, 24)) as pilot:
        await until(pilot, lambda: "✗ failed" in "\n".join(lines(again)))  # it is still told


def test_progress_never_goes_backwards() -> None:
    phases = ("look up", "download", "waiting: slow", "download", "check", "unpack", "import")
    steps = [Progress(phase, done, 100) for phase in phases for done in (0, 72, 70, 58, 100)]
    posted: list[float] = []
    pulled = Pulled(*steps)

    def note(message: Message) -> None:
        if isinstance(message, DownloadUpdate):
            posted.append(downloads.running["x"].fraction)

    downloads = Downloads(note, pulled)
    pulled.proceed.set()
    downloads.start("x")
    downloads.close(10)
    assert posted == sorted(posted)
    assert 0.9 <= posted[-1] <= 1


def test_downloads_tell_what_happened_and_close(pulled: Pulled) -> None:
    posted: list[Message] = []
    downloads = Downloads(posted.append, pulled)
    pulled.steps = [Progress("look up"), Progress("download", 1, 2)]
    assert downloads.start("a/b")
    assert not downloads.start("a/b")
    pulled.proceed.set()
    thread = next((each.thread for each in downloads.running.values()), None)
    if thread is not None:
        thread.join(10)
    assert [note.name for note in posted if isinstance(note, DownloadUpdate)] == ["a/b", "a/b"]
    (ended,) = [note for note in posted if isinstance(note, DownloadEnded)]
    assert (ended.model, ended.error) == ("b", "")
    pulled.proceed.clear()
    assert downloads.start("c")
    assert downloads.close(10)
    assert not downloads.running


def test_a_bug_in_pulling_ends_the_download() -> None:
    posted: list[Message] = []

    def broken(*anything: object) -> StoredModel:
        raise ZeroDivisionError("oops")

    downloads = Downloads(posted.append, broken)
    downloads.start("x")
    downloads.close(10)
    (ended,) = posted
    assert isinstance(ended, DownloadEnded)
    assert ended.error == "cannot download x: ZeroDivisionError: oops"


def test_a_better_model_for_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    better = better_model("starter")
    assert better is not None
    assert better.name == "good-4b", "neither a coder nor what does not fit, whatever is free now"
    assert "2.0 GB download, about 40 tokens/s (estimate)" in describe_offer(better)
    assert "/model good-4b" in describe_offer(replace(better, is_stored=True))
    assert better_model("good-4b") is None
    assert better_model("a folder of mine") is None
    monkeypatch.setattr(
        "akunu_py.tui.screens.model_picker.probe_machine",
        lambda: (MEMORY, replace(MACHINE, bandwidth=10e9)),
    )
    assert better_model("starter") is None, "it would fit, but be slower than one reads"


@sizes_and_themes("light", "terminal-dark")
def test_picture(snap_compare: Compare, pulled: Pulled, size: tuple[int, int], theme: str) -> None:
    host, shown = screen(pulled)
    host.theme = theme
    pulled.steps = [Progress("download", 6 * GB // 5, 2 * GB, 10**7, 80)]

    async def fetching(pilot: Pilot[None]) -> None:
        shown._downloads.start("good-4b")
        await pilot.press("down", "down")
        await until(pilot, lambda: "54%" in "\n".join(lines(shown)))
        await at_rest(pilot)

    assert snap_compare(host, terminal_size=size, run_before=fetching)
