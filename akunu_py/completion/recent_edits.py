"""What was changed lately, gathered as one types, and the difference between two texts."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from difflib import SequenceMatcher

from akunu_py.completion.types import Edit

LATEST = 6  # edits that are kept
_CONTEXT = 3  # lines around an edit
_NEAR = 8  # lines: what is changed so near belongs to the same edit


class RecentEdits:
    """What was changed lately in all buffers, the oldest first. What is changed near the last
    change belongs to the same edit."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # of the buffers, by path
        self._done: deque[Edit] = deque(maxlen=LATEST)
        self._base: tuple[str, str] | None = None  # path and text, before the edit under way

    def opened(self, path: str, text: str) -> None:
        self._texts[path] = text

    def changed(self, path: str, text: str) -> None:
        before = self._texts.get(path, text)
        step, current = difference(path, before, text), self._current()
        self._texts[path] = text
        if step is None:
            return
        if current is None or current.path != path or not _touch(current, step):
            if current is not None:
                self._done.append(current)
            self._base = path, before

    def __iter__(self) -> Iterator[Edit]:
        current = self._current()
        yield from [*self._done, *([current] if current else [])][-LATEST:]

    def _current(self) -> Edit | None:
        if self._base is None:
            return None
        path, base = self._base
        return difference(path, base, self._texts[path])


def _touch(one: Edit, other: Edit) -> bool:
    end = one.line + one.after.count("\n")
    return one.line - _NEAR <= other.line and other.line + other.before.count("\n") <= end + _NEAR


def difference(path: str, before: str, after: str) -> Edit | None:
    """The change from one text to another, with some lines around it; None where there is none."""
    if before == after:
        return None
    ahead = _common(before, after)
    behind = _common(before[ahead:], after[ahead:], backward=True)
    start = before.rfind("\n", 0, ahead) + 1
    for _ in range(_CONTEXT):
        start = before.rfind("\n", 0, max(0, start - 1)) + 1 if start else 0
    end = len(before) - behind
    for _ in range(_CONTEXT + 1):
        end = (before.find("\n", end) + 1 or len(before)) if end < len(before) else end
    rest = len(before) - end
    return Edit(
        path, before[start:end], after[start : len(after) - rest], before.count("\n", 0, start)
    )


def _common(one: str, other: str, *, backward: bool = False) -> int:
    """How many characters two texts share at their beginning, or at their end."""
    longest = min(len(one), len(other))

    def differ(count: int) -> bool:
        if backward:
            return one[len(one) - count :] != other[len(other) - count :]
        return one[:count] != other[:count]

    return bisect_left(range(1, longest + 1), True, key=differ)


def unified(edit: Edit) -> str:
    """The edit as a unified diff, without the lines that name the file."""
    old, new = with_end(edit.before).splitlines(True), with_end(edit.after).splitlines(True)
    parts = []
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(_CONTEXT):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        parts.append(f"@@ -{edit.line + i1 + 1},{i2 - i1} +{edit.line + j1 + 1},{j2 - j1} @@\n")
        for kind, a, b, c, d in group:
            sign = " " if kind == "equal" else "-"
            parts += [sign + line for line in old[a:b]]
            if kind != "equal":
                parts += ["+" + line for line in new[c:d]]
    return "".join(parts)


def with_end(text: str) -> str:
    """The text, the last line with its end."""
    return text if not text or text.endswith("\n") else text + "\n"
