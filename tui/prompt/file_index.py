"""The files that a prompt can mention, and fuzzy matching of their names.

In a repository, files ignored by git are excluded. Git itself is not run: it could start programs
from the configuration. Character classes like `[[:alpha:]]` are unsupported. The pathspec library
needs 9 s for `*a*a*a*a*b` and a name of 200 letters.
"""

from __future__ import annotations

import fnmatch
import glob
import heapq
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from akunu_py.files import read_bounded

MAX_LISTED = 20_000  # files in a listing
MAX_ENTRIES = 200_000  # directory entries visited
MAX_SECONDS = 5.0
_FRESH_S = 10.0
_MAX_BYTES = 1 << 15  # larger ignore files are skipped
# Directories skipped outside of repositories.
_SKIPPED = {"node_modules", "__pycache__", "venv", "target", "build", "dist"}


class FileIndex:
    """The files below `directory`; empty until `refresh` is called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.paths: list[str] = []  # relative to `directory`
        self._read_at: float | None = None

    @property
    def is_fresh(self) -> bool:
        return self._read_at is not None and time.monotonic() - self._read_at < _FRESH_S

    def refresh(self) -> None:
        """List the directory. Blocks; call in a thread."""
        self.paths = list_files(self.directory, MAX_LISTED)
        self._read_at = time.monotonic()

    def search(self, letters: str, limit: int = 50) -> list[Match]:
        """Return matching paths, best first. /, ~ and .. lead outside the directory."""
        if letters.startswith(("/", "~", "..")):
            return _complete_path(self.directory, letters, limit)
        return best_matches(letters, self.paths, limit)


def _complete_path(directory: Path, letters: str, limit: int) -> list[Match]:
    head, _, tail = letters.rpartition("/")
    prefix = f"{head}/" if "/" in letters else ""
    try:
        base = directory / Path(prefix or ".").expanduser()
        names = sorted(_entries(base, hidden=tail.startswith(".")))
    except (OSError, RuntimeError, ValueError):
        return []
    if not prefix:
        return [Match(f"{letters}/")] if letters in ("~", "..") else []
    return [
        Match(prefix + match.path, tuple(place + len(prefix) for place in match.places))
        for match in best_matches(tail, names, limit)
    ]


def _entries(base: Path, *, hidden: bool) -> Iterator[str]:
    with os.scandir(base) as entries:
        for entry in islice(entries, MAX_LISTED):
            if is_mentionable(entry.name) and (hidden or not entry.name.startswith(".")):
                yield f"{entry.name}/" if entry.is_dir() else entry.name


def is_mentionable(path: str) -> bool:
    """Return whether a prompt can contain the path: printable and without quotes."""
    return path.isprintable() and '"' not in path


def list_files(directory: Path, limit: int) -> list[str]:
    """Return relative paths of up to `limit` files below `directory`, top ones first."""
    files = _ignore_files_above(directory)
    found = list(islice(_walk(directory, files), limit)) if files is not None else []
    return found or list(islice(_walk(directory, None), limit))


class IgnorePattern(NamedTuple):
    """One line of a `.gitignore`."""

    path: re.Pattern[str]  # of the path below the file's directory, newlines in place of slashes
    name: str  # the part of `path` for the last name
    is_negated: bool


class IgnoreFile:
    """The patterns for the directory `base`, whose path ends with a slash."""

    def __init__(self, base: str, text: str) -> None:
        self._base = base
        self._patterns = [found for line in text.split("\n") if (found := _parse_pattern(line))]
        # One combined expression rejects most names quickly.
        names = "|".join(f"(?:{each.name})\\Z" for each in self._patterns)
        self._names = re.compile(names or "(?!)")

    def is_ignored(self, path: str, name: str) -> bool | None:
        """Return the last matching pattern's verdict. Directory paths end with a slash."""
        if self._names.match(name):
            below = path[len(self._base) :].replace("/", "\n")
            for pattern in reversed(self._patterns):
                if pattern.path.match(below):
                    return not pattern.is_negated
        return None


def _parse_pattern(line: str) -> IgnorePattern | None:
    """Return the pattern in a line (None: an empty line or a comment)."""
    line = line.removesuffix("\r")
    text = line.rstrip(" ")
    if text != line and (len(text) - len(text.rstrip("\\"))) % 2:
        text += " "  # the space is escaped
    if text.startswith("#"):
        return None
    is_negated = text.startswith("!")
    text = text[is_negated:]
    end = r"\n\Z" if text.endswith("/") else r"\n?\Z"
    text = text.removesuffix("/").replace("[^", "[!")
    text = re.sub(r"\\(.)", lambda escaped: glob.escape(escaped[1]), text)
    if not text:
        return None
    sections = [""] if "/" in text else ["", ""]  # between two stars
    *above, name = text.removeprefix("/").split("/")
    if name == "**" and above:
        above, name = [*above, name], "*"
    for part in above:
        if part == "**":
            sections.append("")
        else:
            sections[-1] += rf"{_glob(part)}\n"
    sections[-1] += _glob(name) + end
    # Atomic groups, as in fnmatch: matching time does not grow with the number of stars.
    later = (rf"(?>(?:.+\n)*?{each})" for each in sections[1:])
    return IgnorePattern(re.compile(sections[0] + "".join(later)), _glob(name), is_negated)


def _glob(part: str) -> str:
    """Return an expression in which stars do not match newlines."""
    expression = fnmatch.translate(part).removeprefix("(?s:")[:-3]  # without `)\Z`
    return re.sub(r"\[\^(\]?)", r"[^\1\\n", expression)


def _ignore_files_above(directory: Path) -> list[IgnoreFile] | None:
    """Return the ignore files above `directory`; None if ignored or in no repository."""
    directory = Path(os.path.realpath(directory))
    above = (directory, *directory.parents)
    root = next((each for each in above if os.path.lexists(each / ".git")), None)
    if root is None:
        return None
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    files = _read_patterns(Path(config, "git", "ignore"), f"{root}/")
    files += _read_patterns(root / ".git" / "info" / "exclude", f"{root}/")
    here = root
    for part in directory.relative_to(root).parts:
        files += _read_patterns(here / ".gitignore", f"{here}/")
        here /= part
        if _is_ignored(files, f"{here}/", part):
            return None
    return files


def _read_patterns(path: Path, base: str) -> list[IgnoreFile]:
    try:
        text = os.fsdecode(read_bounded(path, _MAX_BYTES).removeprefix(b"\xef\xbb\xbf"))
        return [IgnoreFile(base, text)]
    except (OSError, ValueError, RecursionError, OverflowError, re.error):
        return []


def _is_ignored(files: Sequence[IgnoreFile], path: str, name: str) -> bool:
    for each in reversed(files):
        if (ignored := each.is_ignored(path, name)) is not None:
            return ignored
    return False


def _walk(top: Path, ignore_files: Sequence[IgnoreFile] | None) -> Iterator[str]:
    """Yield files below `top`, breadth first. ignore_files: None without a repository."""
    end, entries_left = time.monotonic() + MAX_SECONDS, MAX_ENTRIES
    base = os.path.realpath(top)
    pending: deque[tuple[str, Sequence[IgnoreFile]]] = deque([("", ignore_files or ())])
    while pending:
        below, above = pending.popleft()
        entries: dict[str, os.DirEntry[str]] = {}
        try:
            with os.scandir(os.path.join(base, below)) as found:
                for entry in found:
                    entries_left -= 1
                    if entries_left < 0 or time.monotonic() > end:
                        return
                    if is_mentionable(entry.name):
                        entries[entry.name] = entry
        except OSError:
            continue
        if ignore_files is not None and below and ".git" in entries:
            continue  # another repository
        if ignore_files is not None and ".gitignore" in entries:
            path = Path(base, below, ".gitignore")
            if not path.is_symlink():
                above = [*above, *_read_patterns(path, f"{path.parent}/")]
        for name, entry in sorted(entries.items()):
            is_directory = entry.is_dir(follow_symlinks=False)
            if ignore_files is None:
                is_skipped = name.startswith(".") or (is_directory and name in _SKIPPED)
            else:
                path_here = f"{base}/{below}{name}{'/' if is_directory else ''}"
                is_skipped = name == ".git" or _is_ignored(above, path_here, name)
            if is_directory and not is_skipped:
                pending.append((f"{below}{name}/", above))
            elif not is_skipped and (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                yield f"{below}{name}"


@dataclass(frozen=True, slots=True)
class Match:
    path: str
    places: tuple[int, ...] = ()  # indices of the matched letters


def best_matches(letters: str, paths: Iterable[str], limit: int) -> list[Match]:
    """Return the `limit` best matches of `paths`: names with the prefix come first."""
    # textual.fuzzy takes up to 80 ms for one name.
    letters = letters.lower()
    # Each class excludes the next letter to prevent backtracking.
    in_order = re.compile("".join(f"[^{re.escape(each)}]*({re.escape(each)})" for each in letters))
    found: list[tuple[int, int, str, tuple[int, ...]]] = []
    for path in paths:
        lower = path.lower()
        if match := in_order.match(lower):
            start, name = lower.rfind(letters), lower.rfind("/") + 1
            places = tuple(match.start(number + 1) for number in range(len(letters)))
            rank = 4
            if start >= 0:
                places = tuple(range(start, start + len(letters)))
                rank = 1 if lower.startswith(letters, name) else 2 if start >= name else 3
            found.append((rank, len(path), path, places))
    return [Match(path, places) for *_, path, places in heapq.nsmallest(limit, found)]
