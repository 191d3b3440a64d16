"""Files in a prompt: which are named, refused, sent and read back; and the list that offers them.

To accept new pictures: pytest tests/tui/test_files.py --snapshot-update, then look at them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import OptionList, Static

from akunu_py.errors import UsageError
from akunu_py.text import typeable
from akunu_py.tui.app import ChatApp
from akunu_py.tui.prompt.attachments import (
    Attachment,
    attach,
    join_files,
    mentions,
    read_attachment,
    split_files,
)
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.prompt.file_index import FileIndex, best_matches
from akunu_py.tui.prompt.suggestions import Suggester, SuggestionPopup
from tests.support.tui_chat import chat, until
from tests.support.tui_host import Compare, Host


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, text in {
        "notes.md": "# Notes\n",
        "src/prompt.py": "def prompt(): ...\n",
        "src/deep/other.py": "x = 1",
        "with space.txt": "spaced\n",
        ".hidden/secret": "s",
        "node_modules/lib.js": "js",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("explain @a.py and @b/c.py", ["a.py", "b/c.py"]),
        ('read @"with space.txt"!', ["with space.txt"]),
        ("mail me@example.com", []),
        ("(@a.py) [@b]\n@c @c", ["a.py)", "b]", "c"]),
        ("@ alone, @@ twice", []),
        ("@~/x @/etc/y @../z", ["~/x", "/etc/y", "../z"]),
    ],
)
def test_what_a_prompt_names(prompt: str, expected: list[str]) -> None:
    assert mentions(prompt) == expected


def test_files_that_exist_are_attached_once_and_other_words_stay(directory: Path) -> None:
    prompt = 'See @notes.md, @./notes.md and (@src/prompt.py). @property no, @"with space.txt"'
    files = attach(prompt, directory, 8192)
    assert [(file.name, file.size, file.text) for file in files] == [
        ("notes.md", 8, "# Notes\n"),
        ("src/prompt.py", 18, "def prompt(): ...\n"),
        ("with space.txt", 7, "spaced\n"),
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_bytes(b"PK\x03\0\0"), "binary file"),
        (lambda path: path.write_bytes("naïve".encode("latin-1")), "not UTF-8 text"),
        (lambda path: os.mkfifo(path), "a device or a pipe"),
        (lambda path: path.write_text("x" * 70_000), "does not fit.*70.0 kB, about 17,500 tokens"),
    ],
)
def test_what_is_refused(directory: Path, make: Callable[[Path], object], says: str) -> None:
    make(directory / "it")
    with pytest.raises(UsageError, match=says):
        attach("look at @it", directory, 8192)


def test_files_that_do_not_fit_together_are_refused(directory: Path) -> None:
    for name in "ab":
        (directory / name).write_text("x" * 40_000)
    assert len(attach("@a", directory, 8192)) == 1
    with pytest.raises(UsageError, match="b does not fit"):
        attach("@a @b", directory, 8192)
    assert len(attach("@a @b", directory, 0)) == 2, "an unknown context refuses nothing"


def test_a_file_without_permission_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match=r"cannot read notes\.md: Permission denied"):
        attach("@notes.md", directory, 8192)


def test_what_the_model_reads(directory: Path) -> None:
    (directory / "doc.md").write_text("```python\nx\n```\n")
    files = attach("What is @doc.md?", directory, 8192)
    assert join_files("What is it?", [read_attachment("doc.md", directory / "doc.md")]) == (
        "What is it?\n\nAttached file: doc.md (16 bytes)\n````md\n```python\nx\n```\n````"
    )
    assert files[0].text == "```python\nx\n```\n"
    assert join_files("no files", []) == "no files"


_text = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    ["```\n", "````py\nx\n````\n", "Attached file: a (1 bytes)\n```\nq\n```", "\n\n", ""]
)
_name = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8)


@given(prompt=_text, files=st.lists(st.tuples(_name, _text), max_size=3))
def test_split_is_the_inverse_of_join(prompt: str, files: list[tuple[str, str]]) -> None:
    prompt = typeable(prompt)
    if split_files(prompt)[1]:
        return  # somebody typed what an attachment looks like
    sent = [Attachment(name, len(text.encode()), typeable(text)) for name, text in files]
    said, found = split_files(join_files(prompt, sent))
    assert said == prompt
    assert [(file.name, file.size) for file in found] == [(file.name, file.size) for file in sent]
    for one, other in zip(sent, found, strict=True):
        assert other.text.removesuffix("\n") == one.text.removesuffix("\n")


def test_a_large_binary_is_called_that_and_the_list_offers_no_binary(directory: Path) -> None:
    (directory / "notes.bin").write_bytes(b"PK\x03\0" * 1_000_000)
    (directory / "notes.latin").write_bytes("Ärger".encode("latin-1"))
    (directory / "notes.utf8").write_text("x" * 1023 + "Ä" * 9)  # cut within a character
    with pytest.raises(UsageError, match="binary file"):
        read_attachment("notes.bin", directory / "notes.bin", 1000)
    suggester = Suggester(directory)
    suggester.index.refresh()
    found = suggester.suggest("@notes")
    assert found is not None
    assert {each.label for each in found.suggestions} == {"notes.md", "notes.utf8"}


async def test_a_file_that_is_none_is_told_before_it_is_sent_as_words(directory: Path) -> None:
    async with chat(directory=directory) as it:
        await it.send("ask @john about me@example.com.")
        await it.send("see @notes.md.")
        await until(it.pilot, lambda: len(it.prompts) == 2)
        await it.send("read @nofile.txt and @src/none")
        await until(it.pilot, lambda: it.notifications)
        assert it.notifications == [
            "File not found: nofile.txt, src/none. Press Enter again to send it as text."
        ]
        assert it.text() == "read @nofile.txt and @src/none"
        await it.press("enter")
        await until(it.pilot, lambda: len(it.prompts) == 3)


async def test_a_picture_is_refused_and_the_prompt_can_be_corrected(directory: Path) -> None:
    (directory / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(2000))
    async with chat(directory=directory) as it:
        await it.send("What is on @picture.png?")
        await until(it.pilot, lambda: it.notifications)
        said = "picture.png is a binary file (2.0 kB); attach a text file"
        assert (it.notifications, it.text()) == ([said], "What is on @picture.png?")
        assert not it.prompts


def test_the_index_leaves_out_what_is_hidden_or_made(directory: Path) -> None:
    index = FileIndex(directory)
    index.refresh()
    assert index.is_fresh
    assert sorted(index.paths) == [
        "notes.md",
        "src/deep/other.py",
        "src/prompt.py",
        "with space.txt",
    ]


def test_in_a_repository_git_lists_the_files(directory: Path) -> None:
    subprocess.run(["git", "init", "-q", str(directory)], check=True)
    (directory / ".gitignore").write_text("*.txt\nnode_modules\n")
    index = FileIndex(directory)
    index.refresh()
    assert "src/prompt.py" in index.paths
    assert not [path for path in index.paths if path.endswith((".txt", ".js"))]


def test_names_come_before_directories_and_letters_in_order_last() -> None:
    paths = ["p/r/o.txt", "prompt.md", "my_prompt.py", "prompts/a.py", "b.py"]
    assert [match.path for match in best_matches("pro", paths, 9)] == [
        "prompt.md", "my_prompt.py", "prompts/a.py", "p/r/o.txt",
    ]  # fmt: skip
    assert best_matches("pro", paths, 1)[0].places == (0, 1, 2)
    assert best_matches("zz", paths, 9) == []
    assert len(best_matches("", paths, 2)) == 2


def test_a_hostile_name_does_not_hang_the_ranking() -> None:
    assert len(best_matches("a" * 40 + "b", ["a" * 3000, "a" * 3000 + "b"], 5)) == 1


def test_paths_out_of_the_directory_are_completed_by_directory(directory: Path) -> None:
    completion = Suggester(directory / "src").suggest(f"see @{directory}/no")
    assert completion is not None
    inserts = [offer.insert for offer in completion.suggestions]
    assert inserts == [f"@{directory}/notes.md ", f"@{directory}/node_modules/"]
    assert Suggester(directory).suggest("@../") is not None


@pytest.mark.parametrize("before", ["hello", "a /new", "me@example.com ", "/usr/bin", "/new\nx"])
def test_where_nothing_is_suggested(directory: Path, before: str) -> None:
    assert Suggester(directory).suggest(before) is None


class Page(Screen[None]):
    """A prompt box with its list, under something to read."""

    CSS_PATH = ChatApp.CSS_PATH

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.popup = SuggestionPopup(directory, id="completion")
        self.box = PromptBox("Ask something", self.popup, directory, id="prompt")
        self.sent: list[str] = []

    def compose(self) -> ComposeResult:
        yield VerticalScroll(Static("something to read\n" * 40), id="transcript")
        yield self.popup
        yield self.box

    def on_mount(self) -> None:
        self.box.focus()

    def on_prompt_box_submitted(self, event: PromptBox.Submitted) -> None:
        self.sent.append(event.text)


def keys(text: str) -> list[str]:
    names = {"/": "slash", "@": "at", " ": "space", ".": "full_stop"}
    return [names.get(char, char) for char in text]


def offered(page: Page) -> list[str]:
    if not page.popup.is_open:
        return []
    return [str(option.prompt).split()[0] for option in page.query_one(OptionList).options]


async def typed(pilot: Pilot[None], page: Page, text: str) -> None:
    await pilot.press(*keys(text))
    await pilot.pause()
    while "@" in text and not page.popup._suggester.index.is_fresh:
        await pilot.pause(0.01)
    await pilot.pause(0.01)


async def test_a_file_is_completed_by_tab_and_by_enter(directory: Path) -> None:
    page = Page(directory)
    async with Host(page).run_test() as pilot:
        await typed(pilot, page, "see @prom")
        assert offered(page) == ["src/prompt.py"]
        await pilot.press("tab")
        assert (page.box.text, page.popup.is_open) == ("see @src/prompt.py ", False)
        await typed(pilot, page, "@space")
        await pilot.press("enter")
        assert page.box.text == 'see @src/prompt.py @"with space.txt" '
        assert page.sent == []


async def test_a_command_is_sent_by_one_enter_and_filled_in_by_tab(directory: Path) -> None:
    page = Page(directory)
    async with Host(page).run_test() as pilot:
        await pilot.press(*keys("/he"), "enter")
        await pilot.pause()
        assert (page.sent, page.box.text) == (["/help"], "")
        await pilot.press(*keys("/temp"), "tab")
        assert page.box.text == "/temperature "
        await pilot.press("enter")
        await pilot.pause()
        assert page.sent[-1] == "/temperature"


async def test_a_resized_list_keeps_its_highlighted_suggestion(directory: Path) -> None:
    page = Page(directory)
    async with Host(page).run_test() as pilot:
        await typed(pilot, page, "/t")
        await pilot.press("down", "down")
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert page.popup.highlighted == 2
        await typed(pilot, page, "h")
        assert page.popup.highlighted == 0


async def test_up_and_down_choose_and_escape_closes_until_more_is_typed(directory: Path) -> None:
    page = Page(directory)
    async with Host(page).run_test() as pilot:
        await pilot.press("slash")
        first = offered(page)[0]
        await pilot.press("down", "up", "up")
        assert page.popup.highlighted == len(offered(page)) - 1, "the list is a ring"
        await pilot.press("escape")
        assert (offered(page), page.box.text) == ([], "/")
        await pilot.press("n")
        assert offered(page)[0] == first == "/new"
        await pilot.press("left")
        assert offered(page) == []


async def test_what_was_pasted_or_recalled_opens_nothing(directory: Path) -> None:
    page = Page(directory)
    async with Host(page).run_test() as pilot:
        page.box.insert("/new")
        await pilot.press("enter")
        await pilot.press("up")
        assert page.box.text == "/new"
        assert not page.popup.is_open


@pytest.mark.long
async def test_a_directory_stays_open(directory: Path) -> None:
    page = Page(directory)
    async with Host(page).run_test() as pilot:
        await typed(pilot, page, f"@{directory}/sr")
        await pilot.press("tab")
        assert page.box.text == f"@{directory}/src/"
        assert len(offered(page)) == 2
        await pilot.press(*"pro", "tab")
        assert page.box.text == f"@{directory}/src/prompt.py "


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 6)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize(
    ("text", "theme"), [("see @", "light"), ("/", "dark")], ids=["files", "commands"]
)
def test_picture(
    snap_compare: Compare, directory: Path, size: tuple[int, int], text: str, theme: str
) -> None:
    page = Page(directory)

    async def typing(pilot: Pilot[None]) -> None:
        page.box.cursor_blink = False
        await typed(pilot, page, text)

    assert snap_compare(Host(page, theme), terminal_size=size, run_before=typing)
