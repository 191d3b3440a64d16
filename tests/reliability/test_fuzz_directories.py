"""Files that an @ offers in a repository: those that git lists, without running a program."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from akunu_py.tui.prompt import file_index
from akunu_py.tui.prompt.file_index import FileIndex, list_files
from tests.reliability.fuzz import explore, lengths

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
_NAMES = ["a", "b", "ab", "A", "a.b", ".a", "a b", "[a]", "!a", "#a", "a-", "a1", "a\\b", "*", "a]"]
_PIECES = [
    *("a", "b", "A", "1", ".", "*", "**", "/", "/", "?", "]", "!", "^", "-", "\\", "#", " "),
    *("[a-b]", "[!a]", "[^b]", "[]a]", "**/", "/**", "/**/", "a/", "\\ ", "\r", "\t"),
    *("[!]a]", "[^][]"),
]
# Against its own manual, which we follow, git takes two stars behind letters for any directories,
# and a slash in brackets for a character. We support no escaped slashes, and no `!/**`.
_line = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6).map("".join)
_lines = st.lists(
    _line.filter(lambda line: not re.search(r"[^/]\*\*|\[.*/|\\/|^!/\*\*", line)), max_size=8
)
_patterns = _lines.map("\n".join)
_others = (".git/info/exclude", "config/git/ignore", "a/.gitignore", "ab/b/.gitignore")
_files = st.fixed_dictionaries(
    {".gitignore": _patterns} | {place: st.just("") | _patterns for place in _others}
)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of files with all names, three deep, without other configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "work" / "config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    top = tmp_path / "work"
    directories = ("", "a/", "b/", "ab/", "ab/b/", "ab/b/a/", ".a/", "a b/")
    for directory in directories:
        (top / directory).mkdir(parents=True)
    for directory in directories:
        for name in _NAMES:
            if not (top / directory / name).exists():
                (top / directory / name).write_text(name)
    return top


def git(directory: Path, *arguments: str) -> list[str]:
    command = ["git", "-C", str(directory), "-c", "init.defaultBranch=x", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")


@needs_git
@lengths(10)
def test_it_lists_what_git_lists(repository: Path, examples: int) -> None:
    git(repository, "init", "-q")

    def check(files: dict[str, str]) -> None:
        for place, patterns in files.items():
            (repository / place).parent.mkdir(parents=True, exist_ok=True)
            (repository / place).write_text(patterns, newline="")
        for below in ("", "ab"):
            listed = git(repository / below, *["ls-files", "-z", "-c", "-o", "--exclude-standard"])
            # Where git lists nothing, all that is not hidden is offered.
            if expected := sorted(filter(file_index.is_mentionable, filter(None, listed))):
                assert sorted(list_files(repository / below, 10_000)) == expected, files

    explore(check, examples, _files)


@needs_git
@pytest.mark.parametrize("bare", [False, True], ids=["fsmonitor", "a bare repository in docs/"])
def test_listing_runs_nothing_that_the_directory_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/was-run'\n")
    hook.chmod(0o755)
    where = tmp_path / "work" / ("docs" if bare else "")
    git(tmp_path, "init", "-q", *(["--bare"] if bare else []), str(where))
    for key in ("core.fsmonitor", "core.sshCommand", "core.hooksPath", "core.pager"):
        git(where, "config", key, str(hook if key != "core.hooksPath" else tmp_path))
    if bare:
        git(where, "config", "core.worktree", str(where))
        git(where, "config", "core.bare", "false")
    (where / "notes.md").write_text("# Notes\n")
    subprocess.run(["git", "-C", str(where), "ls-files", "-co"], capture_output=True)
    assert (tmp_path / "was-run").exists(), "git itself runs it"
    (tmp_path / "was-run").unlink()
    for module, name in ((subprocess, "Popen"), (os, "posix_spawn"), (os, "fork"), (os, "system")):
        monkeypatch.setattr(module, name, None)
    index = FileIndex(where)
    index.refresh()
    assert "notes.md" in index.paths
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 40 + "*b", "/".join(["**", "a*"] * 30) + "/b", "[a-z]*" * 40 + "!", "?*" * 60 + "b",
     "**" * 100 + "b"],
    ids=lambda pattern: pattern[:8],
)  # fmt: skip
def test_no_pattern_takes_exponential_time(tmp_path: Path, pattern: str) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text(pattern)
    deep = tmp_path.joinpath(*["aa"] * 40)
    deep.mkdir(parents=True)
    (deep / ("a" * 250)).write_text("")
    assert len(list_files(tmp_path, 10)) == 2


@pytest.mark.parametrize("name", [".gitignore", ".git/info/exclude", ".git"])
def test_special_files_of_patterns_are_ignored(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.py").write_text("")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    makers: list[Callable[[], object]] = [
        lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"),
        lambda: path.write_bytes(b"\xff\xfe\0[" * 9), lambda: path.write_text("*\n" * 1_000_000),
        lambda: path.symlink_to(path), path.mkdir,
    ]  # fmt: skip
    for make in makers:
        path.unlink(missing_ok=True)
        make()
        assert "a.py" in list_files(tmp_path, 10)


def test_where_there_are_too_many_files_the_top_ones_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        path = tmp_path / "deep" / str(number) / "file"
        path.parent.mkdir(parents=True)
        path.write_text("")
    (tmp_path / "z.py").write_text("")
    assert list_files(tmp_path, 3) == ["z.py", "deep/0/file", "deep/1/file"]
    monkeypatch.setattr(file_index, "MAX_ENTRIES", 2)
    assert list_files(tmp_path, 3) == ["z.py"]
    monkeypatch.setattr(file_index, "MAX_SECONDS", -1.0)
    assert list_files(tmp_path, 3) == []


def test_links_are_named_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list_files(tmp_path, 10) == ["loop", "out"]
