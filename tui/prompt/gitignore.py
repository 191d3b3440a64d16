"""The files of a directory that git does not ignore, without git: it would run what the directory's
own configuration names.

Patterns are those of https://git-scm.com/docs/gitignore, made into regular expressions that never
try a second way (atomic groups), so that a pattern of many stars costs no more than another. Those
of pathspec take 14 seconds for four stars and a name of 200 letters: a .gitignore could stop the
chat.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from akunu_py.files import read_bounded

MAX_ENTRIES = 200_000  # looked at
MAX_SECONDS = 5.0
_MAX_BYTES = 1 << 15  # of one file of patterns; a larger one counts for nothing
_SKIPPED = {"node_modules", "__pycache__", "venv", "target", "build", "dist"}  # in no repository
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r" \t",
    "digit": "0-9",
    "lower": "a-z",
    "punct": r"!-.:-@\[-`{-~",
    "space": r" \t-\r",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


def list_files(directory: Path, most: int) -> list[str]:
    """The paths of at most `most` files below `directory`, relative to it, those near the top
    first: what is not ignored in a git repository, and elsewhere what is neither hidden nor made
    by a build. Where there are very many, those that MAX_SECONDS and MAX_ENTRIES reach."""
    rules = _rules_above(directory)
    found = list(islice(_walk(directory, rules), most)) if rules is not None else []
    return found or list(islice(_walk(directory, None), most))


class _Rules:
    """The patterns of one file; `base` is the directory they are for."""

    def __init__(self, base: str, text: str) -> None:
        self.base = base
        parsed = [each for line in text.split("\n") if (each := _parse(line))]
        self._negated = [negated for _, negated, _ in parsed]
        self._for_names = _any_of(parsed, of_names=True)
        self._for_paths = _any_of(parsed, of_names=False)

    def is_ignored(self, path: str) -> bool | None:
        """What the last pattern that matches says; a directory's path ends in a slash."""
        name = path[path.rfind("/", 0, -1) + 1 :]
        last = max(_last(self._for_names, name), _last(self._for_paths, path[len(self.base) :]))
        return None if last < 0 else not self._negated[last]


_Parsed = tuple[str, bool, bool]  # a regular expression, whether negated, whether for names
_Any = tuple[re.Pattern[str], list[int]]


def _any_of(parsed: Sequence[_Parsed], *, of_names: bool) -> _Any | None:
    """One expression for all patterns, the last first, each a group; and their numbers."""
    numbers = [number for number, each in enumerate(parsed) if each[2] is of_names][::-1]
    joined = "|".join(f"({parsed[number][0]})" for number in numbers)
    return (re.compile(joined, re.DOTALL), numbers) if numbers else None


def _last(patterns: _Any | None, text: str) -> int:
    match = patterns[0].fullmatch(text) if patterns else None
    return patterns[1][match.lastindex - 1] if patterns and match and match.lastindex else -1


def _parse(line: str) -> _Parsed | None:
    """A line of a file of patterns; None where it can match nothing."""
    line = line.removesuffix("\r")
    text = line.rstrip(" ")
    if text != line and (len(text) - len(text.rstrip("\\"))) % 2:
        text += " "  # it was escaped
    if text.startswith("#"):
        return None
    negated = text.startswith("!")
    text = text[negated:]
    end = "/" if text.endswith("/") else "/?"  # only directories, or files too
    text = text.removesuffix("/")
    is_name = "/" not in text
    text = re.sub(r"\\(.)", _plain_slash, text.removeprefix("/"))
    pattern = _glob(text) if is_name else _path(text.split("/"))
    return (pattern + end, negated, is_name) if pattern else None


def _plain_slash(escaped: re.Match[str]) -> str:
    return "/" if escaped[1] == "/" else escaped[0]


def _path(segments: Sequence[str]) -> str | None:
    groups: list[list[str]] = [[]]  # what is between two `**`
    for segment in segments:
        if segment != "**":
            if not (pattern := _glob(segment)):
                return None
            groups[-1].append(pattern)
        elif groups[-1] or len(groups) == 1:
            groups.append([])
    first, *others = ("/".join(group) for group in groups)
    if not others:
        return first
    middle = "".join(f"(?>(?:[^/]++/)*?{group}/)" for group in others[:-1])
    last = f"(?:[^/]++/)*{others[-1]}" if others[-1] else ".+"
    return (f"{first}/" if first else "") + middle + last


def _glob(segment: str) -> str | None:
    """The expression for one part of a path; None where it matches nothing."""
    chunks, at = [""], 0  # what is between two stars
    while at < len(segment):
        character = segment[at]
        at += 1
        if character == "*":
            chunks.append("")
        elif character == "?":
            chunks[-1] += "[^/]"
        elif character == "[":
            if (bracket := _bracket(segment, at)) is None:
                return None
            chunks[-1] += bracket[0]
            at = bracket[1]
        else:
            if character == "\\":
                if at == len(segment):
                    return None
                character = segment[at]
                at += 1
            chunks[-1] += re.escape(character)
    first, *others = chunks
    if not others:
        return first
    if not any(chunks):
        return "[^/]+"
    middle = "".join(f"(?>[^/]*?{chunk})" for chunk in others[:-1] if chunk)
    return f"{first}{middle}[^/]*{others[-1]}"


def _bracket(text: str, at: int) -> tuple[str, int] | None:
    """The class of characters that begins at `at`, behind its bracket, and where it ends."""
    negated = text[at : at + 1] in ("!", "^")
    at += negated
    start, parts, previous = at, "", ""
    while at == start or text[at : at + 1] != "]":
        character, following = text[at : at + 1], text[at + 1 : at + 2]
        end = text.find("]", at + 2)
        if character == "[" and following == ":" and end < 0:
            return None
        if character == "[" and following == ":" and text[at + 2 : end].endswith(":"):
            if (named := _CLASSES.get(text[at + 2 : end - 1])) is None:
                return None
            parts, previous, at = parts + named, "", end
        elif character == "-" and previous and following not in ("", "]"):
            at += 1
            if following == "\\":
                at += 1
            if not (last := text[at : at + 1]):
                return None
            if previous <= last:
                parts += f"{re.escape(previous)}-{re.escape(last)}"
            previous = ""
        else:
            if character == "\\":
                at += 1
                character = text[at : at + 1]
            if not character:
                return None
            parts, previous = parts + re.escape(character), character
        at += 1
    return f"[^/{parts}]" if negated else f"(?!/)[{parts}]", at + 1


def _rules_above(directory: Path) -> list[_Rules] | None:
    """The patterns that hold in `directory` from above it, the weakest first; None where it is in
    no repository, or ignored itself."""
    directory = Path(os.path.realpath(directory))
    root = next((each for each in (directory, *directory.parents) if _is_top(each)), None)
    if root is None:
        return None
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    rules = [
        *_read(Path(config, "git", "ignore"), f"{root}/"),
        *_read(root / ".git" / "info" / "exclude", f"{root}/"),
    ]
    parts = directory.relative_to(root).parts
    for number, part in enumerate(parts):
        here = root.joinpath(*parts[:number])
        rules += _read(here / ".gitignore", f"{here}/")
        if _are_ignored(rules, f"{here / part}/"):
            return None
    return rules


def _is_top(directory: Path) -> bool:
    try:
        os.lstat(directory / ".git")
    except OSError:
        return False
    return True


def _read(path: Path, base: str) -> list[_Rules]:
    try:
        text = os.fsdecode(read_bounded(path, _MAX_BYTES).removeprefix(b"\xef\xbb\xbf"))
        return [_Rules(base, text)]
    except (OSError, ValueError, RecursionError, OverflowError):
        return []


def _are_ignored(rules: Sequence[_Rules], path: str) -> bool:
    for each in reversed(rules):
        if (ignored := each.is_ignored(path)) is not None:
            return ignored
    return False


def _walk(top: Path, rules: Sequence[_Rules] | None) -> Iterator[str]:
    """Breadth first, so that one deep directory does not hide all others."""
    end, left = time.monotonic() + MAX_SECONDS, MAX_ENTRIES
    base = os.path.realpath(top)
    pending: deque[tuple[str, Sequence[_Rules]]] = deque([("", rules or ())])
    while pending:
        below, above = pending.popleft()
        entries: list[os.DirEntry[str]] = []
        try:
            with os.scandir(os.path.join(base, below)) as found:
                for entry in found:
                    left -= 1
                    if left < 0 or time.monotonic() > end:
                        return
                    if can_be_named(entry.name):
                        entries.append(entry)
        except OSError:
            continue
        names = {entry.name for entry in entries}
        if rules is not None and below and ".git" in names:
            continue  # another repository, as git sees it
        if rules is not None and ".gitignore" in names:
            path = Path(base, below, ".gitignore")
            above = [*above, *([] if path.is_symlink() else _read(path, f"{path.parent}/"))]
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_directory = entry.is_dir(follow_symlinks=False)
            path_below = f"{below}{entry.name}"
            if _is_left_out(entry, is_directory, rules is None, above, f"{base}/{path_below}"):
                continue
            if time.monotonic() > end:
                return
            if is_directory:
                pending.append((f"{path_below}/", above))
            elif entry.is_symlink() or entry.is_file(follow_symlinks=False):
                yield path_below


def _is_left_out(
    entry: os.DirEntry[str], is_directory: bool, plain: bool, rules: Sequence[_Rules], path: str
) -> bool:
    if plain:
        return entry.name.startswith(".") or (is_directory and entry.name in _SKIPPED)
    return entry.name == ".git" or _are_ignored(rules, f"{path}/" if is_directory else path)


def can_be_named(path: str) -> bool:
    """Whether it can be written in a prompt: printable, and no quote, which would end it."""
    return path.isprintable() and '"' not in path
