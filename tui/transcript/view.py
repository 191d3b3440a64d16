"""The transcript: the turns of the conversation in a scroll view, and the message that is chosen.

Only turns around what is read are mounted, and of their answers only the sections near it drawn, so
that a conversation of any length costs the layout the same. The keys of the chosen message are
bound here, because they only count while the transcript has the focus; the app carries them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.tui.open_conversation import Conversation, Turn
from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.column import MessageView, Part, SteadyScroll, TurnColumn
from akunu_py.tui.transcript.markdown import MarkdownSection
from akunu_py.tui.transcript.turn import AnswerView, PromptView

_NEAR = 2  # screens: sections closer than that are drawn
_FAR = 3  # screens: sections farther than that are unmounted
_MEASURE = 100  # columns of text
_COPIED_S = 1.5  # how long a message shows that it was copied
_UPDATE_DELAY_S = 0.05  # at most one update of what is drawn in that time


class Transcript(SteadyScroll):
    """The conversation; follows its end unless the reader scrolled up."""

    FOCUS_ON_CLICK = False  # the prompt box keeps the focus
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "choose(-1)", "Message before", show=False),
        Binding("down,j", "choose(1)", "Next message", show=False),
        Binding("pageup", "page(-1)", "Scroll up", show=False),
        Binding("pagedown,space", "page(1)", "Scroll down", show=False),
        Binding("home", "begin", "To the beginning", show=False),
        Binding("end", "follow", "To the end", show=False),
        Binding("left,h", "app.branch(-1)", "Branch before"),
        Binding("right,l", "app.branch(1)", "Next branch"),
        Binding("e", "app.edit", "Edit the prompt and send it again"),
        Binding("r", "app.regenerate", "Answer again"),
        Binding("g", "app.continue", "Go on with an answer that was cut off"),
        Binding("c,y", "app.copy_message", "Copy the message"),
        Binding("b", "app.copy_code", "Copy a block of code; again for the next"),
        Binding("enter", "unfold", "Unfold a long prompt, or fold it"),
        Binding("w", "wrap_code", "Wrap long lines of code, or cut them again"),
        Binding("shift+left", "scroll_code(-1)", "Scroll long lines of code", show=False),
        Binding("shift+right", "scroll_code(1)", "Scroll long lines of code"),
        Binding("question_mark", "app.help", "Keys", show=False),
    ]

    drafting: reactive[bool] = reactive(False, init=False)
    thinking: reactive[bool] = reactive(False, init=False)

    class MoreBelow(Static, can_focus=False):
        """Shown below the transcript while more is written than is seen."""

        def on_click(self) -> None:
            self.post_message(Transcript.EndWanted())

    class EndWanted(Message):
        """The reader wants to follow the end again."""

    class Left(Message):
        """The reader went down from the last message."""

    def __init__(self, conversation: Conversation, *first: Widget, id: str) -> None:
        self._column = TurnColumn(self._views, *first)
        super().__init__(self._column, id=id)
        self._conversation = conversation
        self.more_below = self.MoreBelow("↓ more below · End", id="more")
        self._chosen: MessageView | None = None
        self._is_clicked = False  # it was chosen with the mouse
        self._mounting = asyncio.Lock()  # one change of what is mounted at a time
        self._update_pending = False

    def on_resize(self) -> None:
        """Centres the measure; what is wider has the columns right of it."""
        left = max(0, self.scrollable_content_region.width - _MEASURE) // 2
        self._column.styles.padding = (0, 0, 0, left)

    def on_mount(self) -> None:
        self.anchor()
        self.more_below.display = False
        self.can_focus = False
        self.watch(self, "scroll_y", self._scrolled, init=False)
        self.watch(self, "virtual_size", self._scrolled, init=False)

    # What is on the screen

    @property
    def is_empty(self) -> bool:
        return self._column.is_empty

    async def reload(self, message: str | None = None) -> None:
        """Shows the conversation, at the message of that id or at its end; notices go."""
        turns = self._conversation.turns
        places = [
            place for place, turn in enumerate(turns) if message in (turn.prompt.id, turn.reply_id)
        ]
        async with self._mounting:
            await self._column.show(turns, places[0] if places else None)
        self.can_focus = bool(turns)
        self.anchor()
        if self._column.after:
            self.release_anchor()
        for view in self._column.messages:
            turn = view.turn
            if message == (turn.prompt.id if isinstance(view, PromptView) else turn.reply_id):
                if self._column.after:  # else the last message is near
                    self._mark_chosen(view)
                self.call_after_refresh(self._look_at, view)

    async def add(self, *widgets: Widget) -> None:
        """Shows more at the end."""
        if self._column.after:
            await self.reload()
        await self._column.mount_all(widgets)

    async def show_branch(self) -> None:
        """Shows the active branch, where it differs from what is shown; notices below go."""
        turns, column = self._conversation.turns, self._column
        skipped = turns[: len(column.before)]
        if column.after or [turn.number for turn in skipped] != [
            turn.number for turn in column.before
        ]:
            await self.reload()
            return
        shown, rest = column.turns, turns[len(column.before) :]
        same = 0
        while same < min(len(shown), len(rest)) and shown[same] is rest[same]:
            same += 1
        async with self._mounting:
            if same < len(shown):
                await column.cut(shown[same])
            await column.append(rest[same:])
        self.can_focus = bool(column.messages)

    def answer(self, turn: Turn) -> AnswerView | None:
        """The view of the answer of `turn`, if it is mounted."""
        view = self._column.message(turn, "answer")
        return view if isinstance(view, AnswerView) else None

    def mark_edited(self, turn: Turn | None) -> None:
        """Marks the prompt of `turn` as the one that is being edited, and no other."""
        for view in self._column.messages:
            view.set_class(isinstance(view, PromptView) and view.turn is turn, "-edited")

    def mark_copied(self, turn: Turn, part: Part, code: str | None = None) -> None:
        """Shows for a moment on the message, or on its block of code, that it was copied."""
        if view := self._column.message(turn, part):
            blocks = [each for each in view.query(CodeBlock) if f"{each.code}\n" == code]
            self.mark(blocks[0] if blocks else view)

    def mark(self, copied: Widget) -> None:
        """Shows for a moment that something was copied."""
        copied.add_class("-copied")
        self.set_timer(_COPIED_S, lambda: copied.remove_class("-copied"))

    async def watch_drafting(self, drafting: bool) -> None:
        with self.app.batch_update():
            await asyncio.gather(*(view.show_drafting(drafting) for view in self._column.answers))

    def watch_thinking(self, thinking: bool) -> None:
        for view in self._column.answers:
            view.show_thinking(thinking)

    # The chosen message

    @property
    def chosen(self) -> tuple[Turn, Part] | None:
        """The message that the keys apply to; None while the focus is elsewhere and none was
        clicked on."""
        # Not `has_focus`: a key may come before the event of the focus.
        if self.screen.focused is self:
            self.on_focus()
            self._choose_seen()
        elif not self._is_clicked or self._chosen not in self._column.messages:
            return None
        if self._chosen is None:
            return None
        return self._chosen.turn, "prompt" if isinstance(self._chosen, PromptView) else "answer"

    def choose(self, turn: Turn, part: Part) -> None:
        """Chooses a message, and scrolls to it."""
        view = self._column.message(turn, part)
        if view is None:
            return
        self._choose(view)
        if self.screen.focused is not self:
            self._is_clicked = True  # what leads here was clicked on too
            view.show_actions(True)

    def leave(self) -> None:
        """What was clicked on is chosen no more."""
        if self._is_clicked and self._chosen is not None:
            self._is_clicked = False
            self._chosen.show_actions(False)
            if self.screen.focused is not self:
                self._chosen.remove_class("-chosen")

    def watch_has_focus(self, _has_focus: bool) -> None:
        super().watch_has_focus(_has_focus)
        for block in self.query(CodeBlock):
            block.refresh()  # it says which keys copy and wrap it

    def on_focus(self) -> None:
        views = self._column.messages
        if self._chosen not in views:
            self._chosen = None
            most = max(views, key=self._seen_lines, default=None)
            if most is not None and self._anchor_released and self._seen_lines(most):
                self._mark_chosen(most)  # nothing moves
            elif views:
                self._choose(views[-1])
        elif self._chosen is not None:
            self._chosen.add_class("-chosen")

    def _seen_lines(self, view: MessageView) -> int:
        return view.region.intersection(self.content_region).height

    def on_blur(self) -> None:
        if self._chosen is not None and not self._is_clicked:
            self._chosen.remove_class("-chosen")

    def on_click(self, event: events.Click) -> None:
        """Chooses a message; a second click leaves it."""
        below, _ = self.screen.get_widget_at(*event.screen_offset)
        above = below.ancestors_with_self
        view = next((each for each in above if isinstance(each, (PromptView, AnswerView))), None)
        if "@click" in event.style.meta or self.screen.get_selected_text():
            return
        was_chosen = self._is_clicked and view is self._chosen
        self.leave()
        if view is not None and not was_chosen:
            self._mark_chosen(view)
            self._is_clicked = True
            view.show_actions(True)

    async def action_choose(self, steps: int) -> None:
        self.on_focus()
        column, views = self._column, self._column.messages
        now = views.index(self._chosen) if self._chosen in views else len(views)
        if now + steps < 0 and column.before:
            await self._move(column.move_up())
        elif now + steps >= len(views) and column.after:
            await self._move(column.move_down())
        views = column.messages
        if self._chosen in views:
            now = views.index(self._chosen)
        if now + steps >= len(views):
            self.post_message(self.Left())
        else:
            self._choose(views[max(0, now + steps)])

    async def action_page(self, direction: int) -> None:
        """Scrolls a page up (-1) or down (1); at the end, follows it again."""
        self.call_after_refresh(self._choose_seen)
        lines = direction * (self.scrollable_content_region.height - 1)
        target = self.scroll_y + lines
        self.release_anchor()
        if target < 0 and self._column.before:
            await self._move(self._column.move_up())
            self.call_after_refresh(self.scroll_relative, y=lines, animate=False)
        elif target < self.max_scroll_y:
            self.scroll_to(y=max(0, target), animate=False)
        elif self._column.after:
            await self._move(self._column.move_down())
            self.call_after_refresh(self.scroll_relative, y=lines, animate=False)
        else:
            self.anchor()

    async def action_begin(self) -> None:
        """Scrolls to the first prompt."""
        if self._column.before:
            async with self._mounting:
                await self._column.show(self._conversation.turns, 0)
        self.scroll_home(animate=False, immediate=True)
        if self._column.messages:
            self._mark_chosen(self._column.messages[0])

    async def action_follow(self) -> None:
        """Scrolls to the end, and follows it."""
        async with self._mounting:
            if self._column.after:
                await self._column.show(self._conversation.turns)
            else:
                await self._column.trim()
        self.anchor()
        if self.screen.focused is self and self._column.messages:
            self._mark_chosen(self._column.messages[-1])

    def action_unfold(self) -> None:
        """Unfolds the chosen prompt, or folds it."""
        self.on_focus()
        if isinstance(self._chosen, PromptView):
            self._chosen.action_unfold()

    def action_wrap_code(self) -> None:
        """Wraps the lines of all blocks of code, or cuts them again."""
        self.toggle_class("-wrap")

    def on_code_block_wrap_wanted(self) -> None:
        self.action_wrap_code()

    def action_scroll_code(self, steps: int) -> None:
        """Scrolls the blocks of code of the chosen message."""
        self.on_focus()
        if self._chosen is not None:
            for block in self._chosen.query(CodeBlock):
                block.scroll_code(steps)

    def _mark_chosen(self, view: MessageView) -> None:
        if self._chosen is not view:
            self.leave()
        if self._chosen is not None:
            self._chosen.remove_class("-chosen")
        self._chosen = view
        view.add_class("-chosen")

    def _choose_seen(self) -> None:
        """Chooses the first message that is seen, where the chosen one is not."""
        if self.screen.focused is not self or self._chosen is None:
            return
        if not self._anchor_released and self._column.messages[-1:] == [self._chosen]:
            return  # its end will be seen, when it is laid out
        here = self.content_region
        laid_out = [view for view in self._column.messages if view.region.height]
        seen = [view for view in laid_out if view.region.overlaps(here)]
        if self._chosen in laid_out and seen and self._chosen not in seen:
            self._mark_chosen(seen[0])

    def _choose(self, view: MessageView) -> None:
        self._mark_chosen(view)
        if view is self._column.messages[-1] and not self._column.after:
            self.anchor()
        else:
            self._look_at(view)

    def _look_at(self, view: MessageView) -> None:
        self.release_anchor()
        self.scroll_to_widget(
            view, animate=False, top=view.size.height > self.size.height, immediate=True
        )

    # What is mounted

    def _views(self, turn: Turn) -> list[Widget]:
        number = self._conversation.branch_number
        return [
            PromptView(turn, number(turn.prompt.id)),
            AnswerView(turn, number(turn.reply_id), drafting=self.drafting, thinking=self.thinking),
        ]

    async def _move(self, move: Awaitable[object]) -> None:
        """Awaits a change of which turns are mounted."""
        async with self._mounting:
            await move

    def on_answer_view_state_shown(self) -> None:
        self.call_after_refresh(self._scrolled)

    def _scrolled(self) -> None:
        self.more_below.display = self._anchor_released and self._grows_below
        if not self._update_pending:
            self._update_pending = True
            self.set_timer(
                _UPDATE_DELAY_S, lambda: self.run_worker(self._update_nearby(), group="update")
            )

    @property
    def _grows_below(self) -> bool:
        """Whether an answer is being written below what is seen."""
        turns = self._conversation.turns
        is_below = self.max_scroll_y - self.scroll_y > 1 or bool(self._column.after)
        return is_below and any(turn.state == "answering" for turn in turns[-2:])

    async def _update_nearby(self) -> None:
        """Mounts and draws what the reader comes near, and unmounts what is far."""
        self._update_pending = False
        column, near = self._column, self.size.height
        self._choose_seen()
        async with self._mounting:  # what is decided here holds until it is done
            if self._anchor_released and not self.is_adjusting and column.is_laid_out:
                if self.scroll_y < near and column.before:
                    await column.move_up()
                elif self.max_scroll_y - self.scroll_y < near and column.after:
                    await column.move_down()
            await self._update_sections()

    async def _update_sections(self) -> None:
        if self.drafting or self.screen.selections:
            return
        here, below = self.region, list[MarkdownSection]()
        for section in [each for view in self._column.answers for each in view.sections]:
            region = section.region
            distance = max(here.y - region.bottom, region.y - here.bottom)
            if not region.height:
                continue  # it was not laid out yet
            if section.is_unmounted and distance < _NEAR * here.height:
                if region.bottom <= here.y:
                    await self.adjust_above(section.restore())
                else:
                    below.append(section)
            elif not section.is_unmounted and distance > _FAR * here.height:
                await section.unmount()
        if self.is_adjusting and below:
            self._scrolled()  # those below come when those above have their height
        else:
            for section in below:
                await section.restore()
