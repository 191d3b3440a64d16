"""The drafting view: an answer as plain text with its drafts marked, and the panel below it.

Tokens are accepted drafts, rejected drafts, or the model's own. Everything shown goes through
`text.displayable`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content
from textual.content import Span as Styled
from textual.style import Style
from textual.widget import Widget

from akunu_py.text import displayable, on_one_line
from akunu_py.tui.conversation import Turn

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BAR = 8  # tokens in a pass; more look the same
_MAX_BARS = 16
_ROOM_FOR_WORDS = 72  # columns
_ROOM_FOR_LABELS = 60


class DraftedSection(Widget):
    """A part of an answer as plain text: `answer[start:end]`, up to its end for None.

    Rejected drafts stand where they were proposed, before the bonus token.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"drafted--accepted", "drafted--rejected"}

    def __init__(self, turn: Turn, start: int) -> None:
        super().__init__()
        self._turn = turn
        self.start = start
        self.end: int | None = None

    def render(self) -> Content:
        accepted = self.get_visual_style("drafted--accepted", partial=True)
        struck = self.get_visual_style("drafted--rejected", partial=True)
        answer, start = self._turn.answer, self.start
        end = len(answer) if self.end is None else self.end
        parts: list[str] = []
        styles: list[Styled] = []
        length = 0
        for place, rejected in self._rejected(end):
            length += self._append(parts, styles, length, (start, place), accepted)
            text = on_one_line(rejected)
            styles.append(Styled(length, length + len(text), struck))
            parts.append(text)
            length += len(text)
            start = place
        self._append(parts, styles, length, (start, end), accepted)
        return Content("".join(parts), spans=styles)

    def _rejected(self, end: int) -> Sequence[tuple[int, str]]:
        rejected = self._turn.rejected
        first = bisect_left(rejected, self.start, key=lambda each: each[0])
        last = len(rejected)
        if self.end is not None:  # what was proposed at the very end belongs to the next section
            last = bisect_right(rejected, end, key=lambda each: each[0])
        return rejected[first:last]

    def _append(
        self,
        parts: list[str],
        styles: list[Styled],
        length: int,
        part: tuple[int, int],
        accepted: Style,
    ) -> int:
        """Appends a part of the answer after `length` characters; returns its own length."""
        start, end = part
        parts.append(displayable(self._turn.answer[start:end]))
        spans = self._turn.spans
        first = bisect_right(spans, start, key=lambda span: span[1])
        last = bisect_left(spans, (end, 0))
        for span in spans[first:last]:
            marked = max(span[0], start) - start, min(span[1], end) - start
            styles.append(Styled(length + marked[0], length + marked[1], accepted))
        return end - start


class DraftedText(Vertical):
    """An answer as plain text in which drafts are marked.

    Cut into sections at newlines, so that a long answer is not wrapped again for every token.
    """

    SECTION = 1500  # characters

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._last = DraftedSection(turn, 0)
        super().__init__(self._last, *self._cut())

    def sync(self) -> None:
        """Draws what was added to the turn."""
        self._last.refresh(layout=True)
        if more := self._cut():
            self.mount_all(more)

    def _cut(self) -> list[DraftedSection]:
        """Ends the last section where it is long enough; returns those that follow it."""
        more: list[DraftedSection] = []
        while (end := self._turn.answer.find("\n", self._last.start + self.SECTION)) >= 0:
            self._last.end = end
            self._last = DraftedSection(self._turn, end + 1)
            more.append(self._last)
        return more


class DraftingPanel(Widget, can_focus=False):
    """What the marks mean, how many tokens the last passes yielded, and the estimated speedup."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "drafted--accepted",
        "drafted--rejected",
        "drafted--bars",
        "drafted--value",
        "drafted--words",
    }

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._passes: Sequence[int] = ()
        self._speedup: float | None = None

    def show(self, turn: Turn | None, speedup: float | None) -> None:
        """Shows the passes of `turn`, and how much faster than plain decoding they were."""
        self._passes = turn.passes[-_MAX_BARS:] if turn else ()
        self._speedup = speedup
        self.refresh()

    def render(self) -> Content:
        return Content("\n").join([self._legend(), self._speed()])

    def _legend(self) -> Content:
        words = self._style("words")
        long = self.size.width >= _ROOM_FOR_LABELS
        return Content.assemble(
            ("drafted and accepted" if long else "drafted", self._style("accepted")),
            ("   the model's own   " if long else "  own  ", words),
            ("drafted in vain" if long else "in vain", self._style("rejected")),
            ("   F2 back" if long else "", words),
        )

    def _speed(self) -> Content:
        words = self._style("words")
        wide = self.size.width >= _ROOM_FOR_WORDS
        bars = sparkline(self._passes, _MAX_BARS)
        speed = f"≈{self._speedup:.2f}×" if self._speedup else "–"
        long = " plain speed (planner's estimate)"
        return Content.assemble(
            (bars, self._style("bars")),
            (" tokens a pass   " if self.size.width >= _ROOM_FOR_LABELS else " ", words),
            (speed, self._style("value")),
            (long if wide else " plain (estimate)", words),
        )

    def _style(self, name: str) -> Style:
        return self.get_visual_style(f"drafted--{name}", partial=True)


def sparkline(passes: Sequence[int], width: int) -> str:
    """The last `width` passes, a bar each: the higher, the more tokens; filled up to `width`."""
    heights = (min(tokens, _MAX_BAR) - 1 for tokens in passes[-width:])
    return "".join(_BARS[max(0, height)] for height in heights).rjust(width, "·")
