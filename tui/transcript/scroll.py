"""A scroll view in which what is seen stays where it is, whatever changes above it.

Owns keeping the place. Knows messages, which are what the place is kept by, and nothing of what
they say.
"""

from __future__ import annotations

from collections.abc import Awaitable

from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.scrollbar import ScrollBar
from textual.widget import Widget

from akunu_py.tui.transcript.column import TurnColumn
from akunu_py.tui.transcript.turn import AnswerView, PromptView


class SteadyScroll(VerticalScroll):
    """Holds one column of messages.

    An anchored container aligns at its end; the column inside, at least as high as the container,
    keeps a short conversation at the top.
    """

    def __init__(self, column: TurnColumn, *, id: str) -> None:
        super().__init__(column, id=id)
        self._column = column
        # What is seen must not move: the first message whose top is seen, and where it is; where
        # none is, the height of everything, while only what is above changes.
        self._mark: tuple[Widget | None, int] = (None, 0)
        self._keeping = 0
        self._height = 0

    @property
    def is_keeping(self) -> bool:
        """Whether what is above is just changing its height."""
        return self._keeping > 0

    async def keep_below(self, change: Awaitable[None]) -> None:
        """Lets something above what is seen change, which may not be as high as it was."""
        self._keeping += 1
        await change
        self.call_after_refresh(self._let_go)

    def _let_go(self) -> None:
        self._keeping -= 1

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Where everything is. The place moves in the same layout, as Textual does it for an
        anchor, so that nothing jumps."""
        result = super().arrange(size, optimal)
        column = next(each for each in result.placements if each.widget is self._column)
        tops = {
            each.widget: each.region.y
            for each in self._column.arrange(column.region.size).placements
            if isinstance(each.widget, (PromptView, AnswerView))
        }
        height = result.total_region.height
        if self._anchor_released:
            mark, top = self._mark
            if mark in tops:
                self._shift(tops[mark] - top)
            elif self._keeping:
                self._shift(height - self._height)
        self._height = height
        seen = range(int(self.scroll_y), int(self.scroll_y) + size.height)
        self._mark = next(((each, top) for each, top in tops.items() if top in seen), (None, 0))
        return result

    def _shift(self, lines: int) -> None:
        if lines:
            place = max(0.0, self.scroll_y + lines)
            self.set_reactive(Widget.scroll_y, place)
            self.set_reactive(Widget.scroll_target_y, place)
            self.vertical_scrollbar.set_reactive(ScrollBar.position, place)
