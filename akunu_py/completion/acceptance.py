"""Counts of shown and accepted completions by language and place, saved in a file."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.completion.request import CompletionRequest
from akunu_py.files import locked, read_json, write_atomically
from akunu_py.text import table

_MAX_FILE = 1 << 20  # bytes
_SAVED_EVERY = 20  # shown completions
_MAX_RECENT = 64  # shown completions whose acceptance can still be reported
_MAX_LATEST = 4  # shown completions that the next one may extend; a request may show three

Kind = tuple[str, str]  # language and place


@dataclass(slots=True)
class ShownCompletion:
    """A completion that was shown."""

    kind: Kind
    accepted: bool = False


class Acceptance:
    """The new counts of one process. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        """path: the file to add the counts to, None to save nothing."""
        self._path = path
        self._lock = threading.Lock()
        self._unsaved_counts: dict[Kind, Counter[str]] = {}  # not in the file yet
        self._by_end = OrderedDict[Hashable, ShownCompletion]()  # by the text they end in
        # The latest ones: the request, the buffer up to the end of the text, the completion.
        self._latest = deque[tuple[CompletionRequest, str, ShownCompletion]](maxlen=_MAX_LATEST)
        self._by_id = OrderedDict[Hashable, ShownCompletion]()
        self._unsaved = 0

    def shown(self, request: CompletionRequest, text: str, id: str | int) -> None:
        """Count a completion, unless it is the rest or an extension of a counted one.

        id: to pass to `accepted`.
        """
        whole = request.prefix + text
        end = hash((request.path, whole))
        with self._lock:
            if end not in self._by_end:
                completion = self._extended(request, whole)
                if completion is None:
                    completion = ShownCompletion(kind_of(request))
                    self._count(completion.kind, shown=1)
                    self._unsaved += 1
                _add_recent(self._by_end, end, completion)
                self._latest.append((request, whole, completion))
            _add_recent(self._by_id, id, self._by_end[end])
        if self._unsaved >= _SAVED_EVERY:
            self.save()

    def _extended(self, request: CompletionRequest, whole: str) -> ShownCompletion | None:
        """Return the latest completion that `whole` extends, even after typing a part of it."""
        for earlier, text, completion in reversed(self._latest):
            typed = len(earlier.prefix) <= len(request.prefix) < len(text)
            if request.path == earlier.path and typed and whole.startswith(text):
                return completion
        return None

    def accepted(self, id: str | int, characters: int) -> None:
        """Count `characters` of a completion as accepted; unknown ids are ignored."""
        with self._lock:
            completion = self._by_id.get(id)
            if completion is not None:
                first = int(not completion.accepted)
                self._count(completion.kind, accepted=first, characters=characters)
                completion.accepted = True

    def save(self) -> None:
        """Add the new counts to the file, which processes share. A disk error loses the counts."""
        with self._lock:
            new, self._unsaved_counts, self._unsaved = self._unsaved_counts, {}, 0
        if self._path is None or not new:
            return
        lock = self._path.with_name(f".lock-{self._path.name}")
        with contextlib.suppress(OSError), locked(lock):
            counts = read_counts(self._path)
            for kind, more in new.items():
                counts.setdefault(kind, Counter()).update(more)
            rows = [[*kind, dict(each)] for kind, each in sorted(counts.items())]
            write_atomically(self._path, json.dumps(rows).encode())

    def _count(self, kind: Kind, **more: int) -> None:
        self._unsaved_counts.setdefault(kind, Counter()).update(more)


def _add_recent(
    recent: OrderedDict[Hashable, ShownCompletion], key: Hashable, completion: ShownCompletion
) -> None:
    recent[key] = completion
    while len(recent) > _MAX_RECENT:
        recent.popitem(last=False)


def kind_of(request: CompletionRequest) -> Kind:
    """Return (language, place); the place is the cursor's in its line, or "next edit"."""
    before = request.prefix[request.prefix.rfind("\n") + 1 :]
    after = request.suffix.partition("\n")[0]
    if request.edits is not None:
        place = "next edit"
    elif after.strip():
        place = "inside a line"
    else:
        place = "at the end of a line" if before.strip() else "on an empty line"
    suffix = os.path.splitext(request.path)[1]
    return request.language or suffix.removeprefix(".") or "text", place


def read_counts(path: Path) -> dict[Kind, Counter[str]]:
    """Return the counts in a file, none if it is missing or damaged."""
    try:
        rows: Any = read_json(path, _MAX_FILE)
    except (OSError, ValueError):
        return {}
    counts: dict[Kind, Counter[str]] = {}
    for row in rows if isinstance(rows, list) else []:
        match row:
            case [str(language), str(place), dict(found)]:
                valid = {name: n for name, n in found.items() if type(n) is int and n >= 0}
                counts[language, place] = Counter(valid)
    return counts


def stats_table(counts: dict[Kind, Counter[str]]) -> list[str]:
    """Return the lines of `akunu complete --stats`, the most frequently shown kind first."""
    if not counts:
        return ["no completions shown yet"]
    rows = [("language", "place", "shown", "accepted", "", "characters")]
    for (language, place), each in sorted(counts.items(), key=lambda item: -item[1]["shown"]):
        shown, accepted = each["shown"], each["accepted"]
        share = f"{accepted / shown:.0%}" if shown else ""
        numbers = f"{shown:,}", f"{accepted:,}", share, f"{each['characters']:,}"
        rows.append((language, place, *numbers))
    return table(rows, right=range(2, 6))
