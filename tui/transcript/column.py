"""The column of messages in its scroll view: which turns are mounted, and that nothing jumps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from textual.containers import Vertical, VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.scrollbar import ScrollBar
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.tui.open_conversation import Turn
from akunu_py.tui.transcript.turn import AnswerView, PromptView

PAGE = 10  # turns mounted at first, and at the end
_STEP = 5  # more of them where the reader comes near an end
_MAX_MOUNTED = 20  # more where the screen shows more

MessageView = PromptView | AnswerView
Part = Literal["prompt", "answer"]


class Earlier(Static, can_focus=False):
    """Stands for the turns before those that are mounted."""


class Later(Static, can_focus=False):
    """Stands for the turns after those that are mounted."""


class TurnColumn(Vertical):
    """The views of `before` | mounted | `after`. make: the views of a turn."""

    def __init__(self, make: Callable[[Turn], list[Widget]], *first: Widget) -> None:
        super().__init__(*first, classes="column")
        self._make = make
        self.before: list[Turn] = []
        self.after: list[Turn] = []

    @property
    def is_empty(self) -> bool:
        return not self.children

    @property
    def messages(self) -> list[MessageView]:
        return [view for view in self.children if isinstance(view, (PromptView, AnswerView))]

    @property
    def answers(self) -> list[AnswerView]:
        return [view for view in self.children if isinstance(view, AnswerView)]

    def message(self, turn: Turn, part: Part) -> MessageView | None:
        """The view of a part of `turn`, if it is mounted; without a walk through all that is, which
        a query would be for each token."""
        view = self._nodes._get_by_id(f"{part}-{turn.number}")
        return view if isinstance(view, (PromptView, AnswerView)) else None

    @property
    def turns(self) -> list[Turn]:
        """Those that are mounted."""
        return [view.turn for view in self.children if isinstance(view, PromptView)]

    @property
    def is_laid_out(self) -> bool:
        """Whether all that is mounted has its height."""
        return all(view.size.height for view in self.messages)

    async def show(self, turns: Sequence[Turn], middle: int | None = None) -> None:
        """Mounts the turns around the one at `middle`, the last ones for None, and no others."""
        await self.remove_children()
        first = max(0, len(turns) - PAGE)
        if middle is not None:
            first = min(first, max(0, middle - PAGE // 2))
        self.before, self.after = list(turns[:first]), list(turns[first + PAGE :])
        await self.mount_all(self._views(turns[first : first + PAGE]))
        await self._show_counts()

    async def append(self, turns: Sequence[Turn]) -> None:
        """Mounts more at the end, where the last turns are mounted."""
        await self.mount_all(self._views(turns))

    async def cut(self, turn: Turn) -> None:
        """Unmounts the views of a turn and everything below."""
        children = list(self.children)
        await self.remove_children(children[self._index(children, turn) :])

    async def trim(self) -> None:
        """Unmounts all but the last turns, where they have become many."""
        if len(turns := self.turns) > self._most:
            await self._unmount_first(turns, len(turns) - PAGE)
            await self._show_counts()

    async def move_up(self) -> None:
        """Mounts earlier turns."""
        more = self.before[-_STEP:]
        del self.before[-_STEP:]
        first = self.messages[0] if self.messages else None
        await self.mount_all(self._views(more), before=first)
        turns = self.turns
        if len(turns) > (most := self._most):
            self.after[:0] = turns[most:]
            await self.cut(turns[most])
        await self._show_counts()

    async def move_down(self) -> None:
        """Mounts later turns."""
        more = self.after[:_STEP]
        del self.after[:_STEP]
        await self.query_children(Later).remove()
        await self.mount_all(self._views(more))
        turns = self.turns
        await self._unmount_first(turns, max(0, len(turns) - self._most))
        await self._show_counts()

    @property
    def _most(self) -> int:
        """How many turns may be mounted: four screens of the shortest, which take three lines, so
        that what one end takes away is not missed at the other."""
        return max(_MAX_MOUNTED, self.app.size.height * 4 // 3)

    def _views(self, turns: Sequence[Turn]) -> list[Widget]:
        return [view for turn in turns for view in self._make(turn)]

    async def _unmount_first(self, turns: list[Turn], count: int) -> None:
        if count:
            children = list(self.children)
            self.before += turns[:count]
            await self.remove_children(children[: self._index(children, turns[count])])

    def _index(self, children: list[Widget], turn: Turn) -> int:
        views = (each for each in children if isinstance(each, PromptView) and each.turn is turn)
        return children.index(next(views))

    async def _show_counts(self) -> None:
        await self.query_children("Earlier, Later").remove()
        if self.before:
            words = f"↑ {len(self.before):,} earlier prompts"
            await self.mount(Earlier(words, id="earlier"), before=0)
        if self.after:
            await self.mount(Later(f"↓ {len(self.after):,} later prompts", id="later"))


class SteadyScroll(VerticalScroll):
    """A scroll view of one column of messages, in which what is seen stays where it is, whatever
    changes above it.

    An anchored container aligns at its end; the column inside, at least as high as the container,
    keeps a short conversation at the top.
    """

    def __init__(self, column: TurnColumn, *, id: str) -> None:
        super().__init__(column, id=id)
        self._column = column
        # What is seen must not move: the first message whose top is seen, and where it is; where
        # none is, the height of everything, while only what is above changes.
        self._reference: tuple[Widget | None, int] = (None, 0)
        self._adjusting = 0
        self._height = 0

    @property
    def is_adjusting(self) -> bool:
        """Whether something above is just changing its height."""
        return self._adjusting > 0

    async def adjust_above(self, change: Awaitable[None]) -> None:
        """Awaits a change above what is seen, which may change its height."""
        self._adjusting += 1
        await change
        self.call_after_refresh(self._end_adjusting)

    def _end_adjusting(self) -> None:
        self._adjusting -= 1

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """The layout; the scroll position is moved within it, as Textual does it for an anchor, so
        that nothing jumps."""
        result = super().arrange(size, optimal)
        column = next(each for each in result.placements if each.widget is self._column)
        tops = {
            each.widget: each.region.y
            for each in self._column.arrange(column.region.size).placements
            if isinstance(each.widget, (PromptView, AnswerView))
        }
        height = result.total_region.height
        if self._anchor_released:
            view, top = self._reference
            if view in tops:
                self._shift(tops[view] - top)
            elif self._adjusting:
                self._shift(height - self._height)
        self._height = height
        seen = range(int(self.scroll_y), int(self.scroll_y) + size.height)
        self._reference = next(
            ((each, top) for each, top in tops.items() if top in seen), (None, 0)
        )
        return result

    def _check_anchor(self) -> None:
        """Textual follows the end again where the reader comes to it: not where later turns exist
        that are not mounted."""
        if not self._column.after:
            super()._check_anchor()

    def _shift(self, lines: int) -> None:
        if lines:
            place = max(0.0, self.scroll_y + lines)
            self.set_reactive(Widget.scroll_y, place)
            self.set_reactive(Widget.scroll_target_y, place)
            self.vertical_scrollbar.set_reactive(ScrollBar.position, place)
