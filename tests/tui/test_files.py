"""Files in a prompt: mentioned, refused, sent and parsed; suggestions for files and commands."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.events import Paste

from akunu_py.errors import UsageError
from akunu_py.text import typeable
from akunu_py.tui.prompt.attachments import Attachment, attach, join_files, mentions, split_files
from akunu_py.tui.prompt.file_index import FileIndex, best_matches
from akunu_py.tui.prompt.suggestions import SuggestionPopup, suggest
from tests.support.tui_chat import Chat, chat


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


@pytest.mark.parametrize(("prompt", "expected"), [
    ("explain @a.py and @b/c.py", ["a.py", "b/c.py"]),
    ('read @"with space.txt"!', ["with space.txt"]), ("mail me@example.com", []),
    ("(@a.py) [@b]\n@c @c", ["a.py)", "b]", "c"]), ("@ alone, @@ twice", []),
    ("@~/x @/etc/y @../z", ["~/x", "/etc/y", "../z"]),
])  # fmt: skip
def test_mentions_of_files(prompt: str, expected: list[str]) -> None:
    assert mentions(prompt) == expected


def test_existing_files_are_attached_once_and_directories_listed(directory: Path) -> None:
    prompt = 'See @notes.md, @./notes.md and (@src/prompt.py). @property no, @"with space.txt"'
    files = attach(prompt, directory, 8192)
    assert [(file.name, file.size, file.text) for file in files] == [
        ("notes.md", 8, "# Notes\n"),
        ("src/prompt.py", 18, "def prompt(): ...\n"),
        ("with space.txt", 7, "spaced\n"),
    ]
    (listing,) = attach("what is in @src?", directory, 8192)
    assert (listing.name, listing.text) == ("src/", "deep/other.py  5 B\nprompt.py  18 B\n")
    assert split_files(join_files("what?", [listing]))[1] == [listing]
    for name in "ab":
        (directory / name).write_text("x" * 40_000)
    with pytest.raises(UsageError, match="b does not fit"):
        attach("@a @b", directory, 8192)
    assert len(attach("@a @b", directory, 0)) == 2, "an unknown context refuses nothing"


@pytest.mark.parametrize(("make", "says"), [
    (lambda path: path.write_bytes(b"PK\x03\0\0"), "binary file"),
    (lambda path: path.write_bytes("naïve".encode("latin-1")), "not UTF-8 text"),
    (lambda path: os.mkfifo(path), "a device or a pipe"),
    (lambda path: path.write_text("x" * 70_000), "does not fit.*70.0 kB, about 17,500 tokens"),
])  # fmt: skip
def test_refused_files(directory: Path, make: Callable[[Path], object], says: str) -> None:
    make(directory / "it")
    with pytest.raises(UsageError, match=says):
        attach("look at @it", directory, 8192)


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["```\n", "````py\nx\n````\n", "Attached file: a (1 bytes)\n```\nq\n```", "\n\n", ""]
)
_name = st.text(st.characters(max_codepoint=127, categories=("L", "N")), min_size=1, max_size=8)


@given(prompt=_text, files=st.lists(st.tuples(_name, _text), max_size=3))
def test_split_is_the_inverse_of_join(prompt: str, files: list[tuple[str, str]]) -> None:
    prompt = typeable(prompt)
    if split_files(prompt)[1]:
        return  # the typed text looks like an attachment
    sent = [Attachment(name, len(text.encode()), typeable(text)) for name, text in files]
    text, found = split_files(join_files(prompt, sent))
    assert text == prompt
    assert [(file.name, file.size) for file in found] == [(file.name, file.size) for file in sent]
    for one, other in zip(sent, found, strict=True):
        assert other.text.removesuffix("\n") == one.text.removesuffix("\n")


async def test_missing_files_are_reported_once_before_they_are_sent_as_text(
    directory: Path,
) -> None:
    (directory / "picture.png").write_bytes(b"\x89PNG\0\0")
    async with chat(directory=directory) as it:
        await it.send("ask @john about me@example.com.")
        await it.until(lambda: len(it.prompts) == 1)
        await it.send("read @nofile.txt and @src/none")
        await it.until(lambda: it.notifications)
        assert it.notifications == [
            "File not found: nofile.txt, src/none. Press Enter again to send it as text."
        ]
        assert it.text() == "read @nofile.txt and @src/none"
        await it.press("enter")
        await it.until(lambda: len(it.prompts) == 2)
        await it.send("What is on @picture.png?")
        refusal = "picture.png is an image; this model reads text only"
        await it.until(lambda: it.notifications == [refusal])
        assert it.text() == "What is on @picture.png?", "it can be corrected"
        assert len(it.prompts) == 2
        it.app.post_message(Paste("'/tmp/a cat.JPG'\n"))
        await it.until(lambda: it.notifications == ["This model reads text only, no images."])


async def test_mentioned_files_are_marked_and_counted(directory: Path) -> None:
    (directory / "notes.md").write_text("word " * 800)
    async with chat(directory=directory) as it:
        it.box.insert("see @notes.md, @none.txt and @src/ says @john")
        await it.until(lambda: "2 files" in str(it.box.border_title))
        assert str(it.box.border_title) == "2 files, about 1,008 tokens"
        line = it.box.get_line(0)
        found = it.box.get_component_rich_style("prompt--file", partial=True)
        marked = {line.plain[span.start : span.end]: span.style == found for span in line.spans}
        assert marked == {"@notes.md,": True, "@none.txt": False, "@src/": True}
        it.box.clear()
        await it.until(lambda: str(it.box.border_title) == "")


def test_the_index_leaves_out_hidden_generated_and_ignored_files(directory: Path) -> None:
    index = FileIndex(directory)
    index.refresh()
    assert index.is_fresh
    files = ["notes.md", "src/deep/other.py", "src/prompt.py", "with space.txt"]
    assert sorted(index.paths) == files
    subprocess.run(["git", "init", "-q", str(directory)], check=True)
    (directory / ".gitignore").write_text("*.txt\nnode_modules\n")
    index.refresh()
    assert not [path for path in index.paths if path.endswith((".txt", ".js"))]


def test_file_names_rank_before_directories_and_scattered_letters_last() -> None:
    paths = ["p/r/o.txt", "prompt.md", "my_prompt.py", "prompts/a.py", "b.py"]
    assert [match.path for match in best_matches("pro", paths, 9)] == [
        "prompt.md", "my_prompt.py", "prompts/a.py", "p/r/o.txt",
    ]  # fmt: skip
    assert best_matches("pro", paths, 1)[0].places == (0, 1, 2)
    assert best_matches("zz", paths, 9) == []
    assert len(best_matches("", paths, 2)) == 2
    hostile = ["a" * 3000, "a" * 3000 + "b"]
    assert len(best_matches("a" * 40 + "b", hostile, 5)) == 1, "and in little time"


def test_paths_outside_of_the_directory_are_completed_by_directory(directory: Path) -> None:
    typed, suggestions = suggest(FileIndex(directory / "src"), f"see @{directory}/no")
    assert typed == f"@{directory}/no"
    inserts = [each.insert for each in suggestions]
    assert inserts == [f"@{directory}/notes.md ", f"@{directory}/node_modules/"]
    assert suggest(FileIndex(directory), "@../")[1]


@pytest.mark.parametrize("before", ["hello", "a /new", "me@example.com ", "/usr/bin", "/new\nx"])
def test_texts_without_suggestions(directory: Path, before: str) -> None:
    assert suggest(FileIndex(directory), before)[1] == []


def popup(it: Chat) -> SuggestionPopup:
    return it.app.query_one(SuggestionPopup)


def offered(it: Chat) -> list[str]:
    if not popup(it).is_open:
        return []
    return [str(option.prompt).split()[0] for option in popup(it).options]


async def test_tab_and_enter_complete_a_file(directory: Path) -> None:
    async with chat(directory=directory) as it:
        await it.press(*"see @prom")
        await it.until(lambda: offered(it) == ["src/prompt.py"])
        await it.press("tab")
        assert (it.text(), offered(it)) == ("see @src/prompt.py ", [])
        await it.press(*"@space")
        await it.until(lambda: offered(it))
        await it.press("enter")
        assert it.text() == 'see @src/prompt.py @"with space.txt" '
        assert it.prompts == []


@pytest.mark.long
async def test_enter_runs_a_command_and_tab_inserts_it(it: Chat) -> None:
    await it.press("slash", *"fin")
    assert str(popup(it).border_subtitle).startswith("Enter or Tab inserts it")
    await it.press("tab")
    assert it.text() == "/find "
    it.box.clear()
    await it.press("slash", *"colo")
    assert offered(it) == ["/theme"], "by its effect, too"
    assert str(popup(it).border_subtitle).startswith("Enter runs it · Tab inserts it")
    it.box.clear()
    await it.press("slash", *"he", "enter")
    assert (type(it.app.screen).__name__, it.text()) == ("HelpScreen", "")


@pytest.mark.long
async def test_arrows_choose_a_suggestion_and_escape_closes_until_more_is_typed(it: Chat) -> None:
    await it.press("slash")
    first = offered(it)[0]
    await it.press("down", "up", "up")
    assert popup(it).highlighted == len(offered(it)) - 1, "the list is a ring"
    await it.press("escape")
    assert (offered(it), it.text()) == ([], "/")
    await it.press("n")
    assert offered(it)[0] == first == "/new"
    await it.press("left")
    assert offered(it) == []
    it.box.clear()
    it.box.insert("/export a/b")
    await it.press("enter", "up")
    assert (it.text(), offered(it)) == ("/export a/b", []), "a recalled prompt opens nothing"
