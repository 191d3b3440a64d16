"""The files of the working folder, and which of them a few letters mean.

Owns the list (what git would show where the folder is in a repository, else what is not hidden)
and the ranking. Bounded: a folder with more files than `MOST` is listed in part.
"""

from __future__ import annotations

import heapq
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOST = 20_000
_FRESH_S = 10.0
_PATIENCE_S = 5.0
_SKIPPED = {"node_modules", "__pycache__", "venv", "target", "build", "dist"}


@dataclass(frozen=True, slots=True)
class Match:
    """A path that fits what was typed. places: indices into it of the letters that did."""

    path: str
    places: tuple[int, ...] = ()


class FileIndex:
    """The paths of the files below `folder`, relative to it; empty until `refresh` was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[str] = []
        self._read_at: float | None = None

    @property
    def is_fresh(self) -> bool:
        return self._read_at is not None and time.monotonic() - self._read_at < _FRESH_S

    def refresh(self) -> None:
        """Reads the folder; takes a moment for a large one, so call it in another thread."""
        self.paths = _listed_by_git(self.folder) or _listed(self.folder)
        self._read_at = time.monotonic()

    def search(self, letters: str, most: int = 50) -> list[Match]:
        """The paths that `letters` mean, best first. A path that leaves the folder is followed."""
        if letters.startswith(("/", "~", "..")):
            return _complete_path(self.folder, letters, most)
        return best(letters, self.paths, most)


def best(letters: str, paths: Iterable[str], most: int) -> list[Match]:
    """The `most` of `paths` that fit best: a name that begins with the letters, one that holds
    them, a path that holds them, then one in which they come in order."""
    letters = letters.lower()
    # Each class leaves out the letter that follows, so there is one way to match: no backtracking.
    in_order = re.compile("".join(f"[^{re.escape(each)}]*{re.escape(each)}" for each in letters))
    scored: list[tuple[int, int, str]] = []
    for path in paths:
        lower = path.lower()
        if in_order.match(lower):
            scored.append((_rank(letters, lower), len(path), path))
    chosen = heapq.nsmallest(most, scored)
    return [Match(path, _places(letters, path.lower())) for _, _, path in chosen]


def _rank(letters: str, path: str) -> int:
    """Of a path that has the letters in order; lower is better."""
    name = path.rpartition("/")[2]
    if name.startswith(letters):
        return 1
    if letters in name:
        return 2
    return 3 if letters in path else 4


def _places(letters: str, path: str) -> tuple[int, ...]:
    if len(letters) == 0:
        return ()
    start = path.rfind(letters)
    if start >= 0:
        return tuple(range(start, start + len(letters)))
    places: list[int] = []
    for letter in letters:
        places.append(path.index(letter, places[-1] + 1 if places else 0))
    return tuple(places)


def _listed_by_git(folder: Path) -> list[str]:
    """Tracked files and new ones that are not ignored; nothing outside a repository."""
    command = ["git", "-C", str(folder), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return []
    paths = [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]
    return [path for path in paths if _can_be_named(path)][:MOST]


def _listed(folder: Path) -> list[str]:
    paths: list[str] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED and not name.startswith(".")
        )
        below = os.path.relpath(root, folder)
        paths += [
            name if below == "." else f"{below}/{name}"
            for name in sorted(names)
            if not name.startswith(".") and _can_be_named(name)
        ]
        if len(paths) > MOST:
            break
    return paths[:MOST]


def _complete_path(folder: Path, letters: str, most: int) -> list[Match]:
    """What is in the folder that a path names so far; folders end in a slash."""
    head, _, tail = letters.rpartition("/")
    prefix = f"{head}/" if "/" in letters else ""
    try:
        base = folder / Path(prefix or ".").expanduser()
        names = sorted(_entries(base, hidden=tail.startswith(".")))
    except (OSError, RuntimeError, ValueError):
        return []
    if not prefix:
        return [Match(f"{letters}/")] if letters in ("~", "..") else []
    places = len(prefix)
    return [
        Match(prefix + match.path, tuple(place + places for place in match.places))
        for match in best(tail, names, most)
    ]


def _entries(base: Path, *, hidden: bool) -> Iterator[str]:
    with os.scandir(base) as entries:
        for number, entry in enumerate(entries):
            if number == MOST:
                return
            if _can_be_named(entry.name) and (hidden or not entry.name.startswith(".")):
                yield f"{entry.name}/" if entry.is_dir() else entry.name


def _can_be_named(path: str) -> bool:
    """Whether it can be written in a prompt: printable, and no quote, which would end it."""
    return path.isprintable() and '"' not in path
