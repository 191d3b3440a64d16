"""The transcript: the turns of the conversation, and the message that is chosen among them.

Owns scrolling, which turns are mounted (the last ones first: a long conversation opens at once) and
the chosen message. What is done with that message is the app's business; its keys are here because
they only count while the transcript has the focus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.tui.conversation import Conversation, Turn
from akunu_py.tui.turn_view import AnswerView, PromptView

_PAGE = 20  # turns mounted at once

Part = Literal["prompt", "answer"]
MessageView = PromptView | AnswerView


class Earlier(Static, can_focus=False):
    """Stands for the turns before those that are mounted."""

    def __init__(self, count: int) -> None:
        super().__init__(f"↑ {count:,} earlier prompts; Page Up shows them", id="earlier")


class Transcript(VerticalScroll):
    """The conversation; follows its end unless the reader scrolled up."""

    FOCUS_ON_CLICK = False  # who clicks goes on typing
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "choose(-1)", "Message before", show=False),
        Binding("down,j", "choose(1)", "Next message", show=False),
        Binding("pageup", "page(-1)", "Scroll up", show=False),
        Binding("pagedown,space", "page(1)", "Scroll down", show=False),
        Binding("home", "scroll_home", "To the beginning", show=False),
        Binding("end", "follow", "To the end", show=False),
        Binding("left,h", "app.branch(-1)", "Branch before"),
        Binding("right,l", "app.branch(1)", "Next branch"),
        Binding("e", "app.edit", "Edit the prompt and send it again"),
        Binding("r", "app.regenerate", "Answer again"),
        Binding("g", "app.continue", "Go on with an answer that was cut off"),
        Binding("c,y", "app.copy_message", "Copy the message"),
        Binding("b", "app.copy_code", "Copy a block of code; again for the next"),
        Binding("question_mark", "app.help", "Keys", show=False),
    ]

    drafting: reactive[bool] = reactive(False, init=False)
    thinking: reactive[bool] = reactive(False, init=False)

    class Left(Message):
        """The reader went down from the last message."""

    def __init__(self, conversation: Conversation, *first: Widget, id: str) -> None:
        # An anchored container aligns at its end; the column inside, at least as high as the
        # container, keeps a short conversation at the top.
        self._column = Vertical(*first, classes="column")
        super().__init__(self._column, id=id)
        self._conversation = conversation
        self._before: list[Turn] = []  # turns that are not mounted
        self._chosen: MessageView | None = None

    def on_mount(self) -> None:
        self.anchor()
        self.can_focus = False

    # What is on the screen

    @property
    def is_empty(self) -> bool:
        return not self._column.children

    async def open(self, conversation: Conversation) -> None:
        """Shows a conversation from its end; everything else goes."""
        self._conversation = conversation
        await self._column.remove_children()
        await self._show(conversation.turns)
        self.anchor()

    async def add(self, *widgets: Widget) -> None:
        """Shows more at the end."""
        await self._column.mount_all(widgets)

    async def read_branch(self) -> None:
        """Shows the active branch, where it differs from what is shown; notices below go."""
        turns = self._conversation.turns
        shown = [view.turn for view in self.query(PromptView)]
        skipped = turns[: len(self._before)]
        if [turn.number for turn in skipped] != [turn.number for turn in self._before]:
            await self.open(self._conversation)
            return
        rest = turns[len(self._before) :]
        same = 0
        while same < min(len(shown), len(rest)) and shown[same] is rest[same]:
            same += 1
        if same < len(shown):
            children = list(self._column.children)
            first = children.index(self.query_one(f"#prompt-{shown[same].number}"))
            await self._column.remove_children(children[first:])
        await self._show(rest[same:])

    def answer(self, turn: Turn) -> AnswerView | None:
        """Where the answer of `turn` is drawn, if it is."""
        views = self.query(f"#answer-{turn.number}").results(AnswerView)
        return next(iter(views), None)

    async def watch_drafting(self, drafting: bool) -> None:
        for view in self.query(AnswerView):
            await view.show_drafting(drafting)

    def watch_thinking(self, thinking: bool) -> None:
        for view in self.query(AnswerView):
            view.show_thinking(thinking)

    # The chosen message

    @property
    def chosen(self) -> tuple[Turn, Part] | None:
        """The message that the keys are about; None while the reader is elsewhere."""
        # Not `has_focus`: a key may come before the word that the focus did.
        if self.screen.focused is not self:
            return None
        self.on_focus()
        if self._chosen is None:
            return None
        return self._chosen.turn, "prompt" if isinstance(self._chosen, PromptView) else "answer"

    def choose(self, turn: Turn, part: Part) -> None:
        """Chooses a message, and brings it into view."""
        views = self.query(f"#{part}-{turn.number}")
        if views:
            self._choose(views.first())  # type: ignore[arg-type]

    def show_message(self, message: str | None) -> None:
        """Brings the message of that id into view, where it is mounted."""
        for view in self._messages():
            turn = view.turn
            if message == (turn.prompt.id if isinstance(view, PromptView) else turn.reply_id):
                self.call_after_refresh(self._look_at, view)

    def on_focus(self) -> None:
        views = self._messages()
        if self._chosen not in views:
            self._chosen = None
            if views:
                self._choose(views[-1])

    async def action_choose(self, steps: int) -> None:
        self.on_focus()
        views = self._messages()
        if not views:
            return
        now = views.index(self._chosen) if self._chosen in views else len(views)
        if now + steps < 0 and self._before:
            await self._show_earlier()
            views = self._messages()
            now = views.index(self._chosen) if self._chosen in views else len(views)
        if now + steps >= len(views):
            self.post_message(self.Left())
        else:
            self._choose(views[max(0, now + steps)])

    async def action_page(self, direction: int) -> None:
        """Scrolls a page up (-1) or down (1); who comes to the end follows it again."""
        target = self.scroll_y + direction * (self.scrollable_content_region.height - 1)
        if target >= self.max_scroll_y:
            self.anchor()
            return
        if target < 0 and self._before:
            height = self.virtual_size.height
            await self._show_earlier()
            self.call_after_refresh(self._scroll_by_growth, height, target)
            return
        self.release_anchor()
        self.scroll_to(y=max(0, target), animate=False)

    def action_follow(self) -> None:
        self.anchor()

    def _scroll_by_growth(self, height: int, target: float) -> None:
        self.scroll_to(y=max(0, target + self.virtual_size.height - height), animate=False)

    def _choose(self, view: MessageView) -> None:
        if self._chosen is not None:
            self._chosen.remove_class("-chosen")
        self._chosen = view
        view.add_class("-chosen")
        if view is self._messages()[-1]:
            self.anchor()
        else:
            self._look_at(view)

    def _look_at(self, view: MessageView) -> None:
        self.release_anchor()
        self.scroll_to_widget(view, animate=False, top=view.size.height > self.size.height)

    def _messages(self) -> list[MessageView]:
        views = self._column.children
        return [view for view in views if isinstance(view, (PromptView, AnswerView))]

    # Mounting

    def _views(self, turn: Turn) -> list[Widget]:
        place = self._conversation.place
        return [
            PromptView(turn, place(turn.prompt.id)),
            AnswerView(turn, place(turn.reply_id), drafting=self.drafting, thinking=self.thinking),
        ]

    async def _show(self, turns: Sequence[Turn]) -> None:
        """Mounts the last of `turns` at the end; those before wait."""
        if self.is_empty:
            self._before = list(turns[:-_PAGE])
            turns = turns[-_PAGE:]
            await self._show_count()
        await self.add(*(view for turn in turns for view in self._views(turn)))
        self.can_focus = bool(self._messages())

    async def _show_earlier(self) -> None:
        turns, self._before = self._before[-_PAGE:], self._before[:-_PAGE]
        views = [view for turn in turns for view in self._views(turn)]
        await self._column.mount_all(views, before=self._messages()[0])
        await self._show_count()

    async def _show_count(self) -> None:
        await self.query(Earlier).remove()
        if self._before:
            await self._column.mount(Earlier(len(self._before)), before=0)
