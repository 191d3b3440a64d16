"""Which turns of a conversation are on the screen's canvas: some around what is read.

Owns the views of a stretch of the conversation, and the words that stand for the turns before and
after it. Moving the stretch mounts views at one end and takes them away at the other, so that a
conversation of any length costs the layout the same. Knows nothing of scrolling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.tui.conversation import Turn
from akunu_py.tui.transcript.turn import AnswerView, PromptView

PAGE = 10  # turns mounted at once, at first and where one goes on at the end
_STEP = 5  # turns that come at once where the reader comes near
_MOST = 20

MessageView = PromptView | AnswerView


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
    def turns(self) -> list[Turn]:
        """Those that are mounted."""
        return [view.turn for view in self.children if isinstance(view, PromptView)]

    async def show(self, turns: Sequence[Turn], middle: int | None = None) -> None:
        """Shows the turns around the one at `middle`, the last ones for None; all else goes."""
        await self.remove_children()
        first = max(0, len(turns) - PAGE)
        if middle is not None:
            first = min(first, max(0, middle - PAGE // 2))
        self.before, self.after = list(turns[:first]), list(turns[first + PAGE :])
        await self.mount_all(self._views(turns[first : first + PAGE]))
        await self._count()

    async def append(self, turns: Sequence[Turn]) -> None:
        """Shows more at the end, where the last turns are mounted."""
        await self.mount_all(self._views(turns))

    async def cut(self, turn: Turn) -> None:
        """Takes away the views of a turn and everything below."""
        children = list(self.children)
        await self.remove_children(children[self._place(children, turn) :])

    async def trim(self) -> None:
        """Leaves the last turns mounted, where they have become many."""
        if len(turns := self.turns) > _MOST:
            await self._take_first(turns, len(turns) - PAGE)
            await self._count()

    async def move_up(self) -> None:
        """Shows earlier turns."""
        more = self.before[-_STEP:]
        del self.before[-_STEP:]
        first = self.messages[0] if self.messages else None
        await self.mount_all(self._views(more), before=first)
        turns = self.turns
        if len(turns) > _MOST:
            self.after[:0] = turns[_MOST:]
            await self.cut(turns[_MOST])
        await self._count()

    async def move_down(self) -> None:
        """Shows later turns."""
        more = self.after[:_STEP]
        del self.after[:_STEP]
        await self.query_children(Later).remove()
        await self.mount_all(self._views(more))
        turns = self.turns
        await self._take_first(turns, max(0, len(turns) - _MOST))
        await self._count()

    def _views(self, turns: Sequence[Turn]) -> list[Widget]:
        return [view for turn in turns for view in self._make(turn)]

    async def _take_first(self, turns: list[Turn], count: int) -> None:
        if count:
            children = list(self.children)
            self.before += turns[:count]
            await self.remove_children(children[: self._place(children, turns[count])])

    def _place(self, children: list[Widget], turn: Turn) -> int:
        views = (each for each in children if isinstance(each, PromptView) and each.turn is turn)
        return children.index(next(views))

    async def _count(self) -> None:
        await self.query_children("Earlier, Later").remove()
        if self.before:
            words = f"↑ {len(self.before):,} earlier prompts"
            await self.mount(Earlier(words, id="earlier"), before=0)
        if self.after:
            await self.mount(Later(f"↓ {len(self.after):,} later prompts", id="later"))
