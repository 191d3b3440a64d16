"""What became of the completions that were shown: counts by language and place, in a file here.

Where the editor reports what is accepted, completions of a kind that never is are not made.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.completion.request import CompletionRequest
from akunu_py.files import read_json, write_atomically
from akunu_py.text import on_one_line

_LARGEST_FILE = 1 << 20  # bytes
_SAVED_EVERY = 20  # ghosts
_REMEMBERED = 64  # ghosts, of which more may be accepted
# A kind is hidden when so many of it were shown and less than one in so many was accepted; every
# so many it is tried again.
_SHOWN, _SELDOM, _TRIED = 50, 200, 10

Kind = tuple[str, str]  # language and place


@dataclass(slots=True)
class Ghost:
    """A completion that was shown."""

    kind: Kind
    accepted: bool = False


class Acceptance:
    """The counts of one helper, and those of all before it. May be used from any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """path: of the file, None to keep nothing."""
        self._path = path
        self._lock = threading.Lock()
        self._counts = read_counts(path) if path else {}  # of all
        self._new: dict[Kind, Counter[str]] = {}  # not in the file yet
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._asked: Counter[Kind] = Counter()  # of those that are hidden
        self._unsaved = 0
        self._reported = False  # whether this editor says what was accepted

    def shown(self, request: CompletionRequest, text: str, growing: Ghost | None = None) -> Ghost:
        """Counts a completion, unless it is what is left of one that was counted, or all of one
        that was shown while it was growing."""
        end = hash((request.path, request.prefix + text))
        with self._lock:
            if end not in self._ghosts:
                self._ghosts[end] = growing or Ghost(kind_of(request))
                while len(self._ghosts) > _REMEMBERED:
                    self._ghosts.popitem(last=False)
                if growing is None:
                    self._count(self._ghosts[end].kind, shown=1)
                    self._unsaved += 1
            ghost = self._ghosts[end]
        if self._unsaved >= _SAVED_EVERY:
            self.save()
        return ghost

    def accepted(self, ghost: Ghost, characters: int) -> None:
        """Counts so many characters of a completion as accepted."""
        with self._lock:
            self._reported = True
            self._count(ghost.kind, accepted=int(not ghost.accepted), characters=characters)
            ghost.accepted = True

    def hides(self, request: CompletionRequest) -> bool:
        """Whether what would be shown here is hardly ever accepted, and not due to be tried."""
        kind = kind_of(request)
        with self._lock:
            counts = self._counts.get(kind, Counter())
            if not self._reported or counts["shown"] < _SHOWN:
                return False
            if counts["accepted"] * _SELDOM >= counts["shown"]:
                return False
            self._asked[kind] += 1
            return self._asked[kind] % _TRIED != 0

    def save(self) -> None:
        """Adds what is new to the file, which other editors' helpers add to as well. A disk that
        refuses costs the counts, not the completions."""
        with self._lock:
            new, self._new, self._unsaved = self._new, {}, 0
        if self._path is None or not new:
            return
        with contextlib.suppress(OSError), _locked(self._path):
            counts = read_counts(self._path)
            for kind, more in new.items():
                counts.setdefault(kind, Counter()).update(more)
            rows = [[*kind, dict(each)] for kind, each in sorted(counts.items())]
            write_atomically(self._path, json.dumps(rows).encode())

    def _count(self, kind: Kind, **more: int) -> None:
        for counts in (self._counts, self._new):
            counts.setdefault(kind, Counter()).update(more)


def kind_of(request: CompletionRequest) -> Kind:
    """The language, and where in the line the cursor is, or that the next edit was wanted."""
    before = request.prefix[request.prefix.rfind("\n") + 1 :]
    after = request.suffix.partition("\n")[0]
    if after.strip():
        place = "inside a line"
    else:
        place = "at the end of a line" if before.strip() else "on an empty line"
    if request.edits is not None:
        place = "next edit"
    suffix = os.path.splitext(request.path)[1]
    return request.language or suffix.removeprefix(".") or "text", place


def read_counts(path: Path) -> dict[Kind, Counter[str]]:
    """The counts in a file: none where it is missing, damaged or not ours."""
    try:
        rows: Any = read_json(path, _LARGEST_FILE)
    except (OSError, ValueError):
        return {}
    counts: dict[Kind, Counter[str]] = {}
    for row in rows if isinstance(rows, list) else []:
        match row:
            case [str(language), str(place), dict(found)]:
                good = {name: n for name, n in found.items() if type(n) is int and n >= 0}
                counts[language, place] = Counter(good)
    return counts


def stats_table(counts: dict[Kind, Counter[str]]) -> list[str]:
    """The lines of `akunu complete --stats`, what was shown most often first."""
    if not counts:
        return ["no completion was shown yet"]
    rows = [("language", "place", "shown", "accepted", "", "characters")]
    for (language, place), each in sorted(counts.items(), key=lambda item: -item[1]["shown"]):
        shown, accepted = each["shown"], each["accepted"]
        share = f"{accepted / shown:.0%}" if shown else ""
        names = on_one_line(language), on_one_line(place)
        rows.append((*names, f"{shown:,}", f"{accepted:,}", share, f"{each['characters']:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".lock-{path.name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
