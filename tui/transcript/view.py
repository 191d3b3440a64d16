"""The transcript: the conversation's turns in a scroll view, and a chosen message.

Only turns and answer sections near the viewport are mounted: layout cost does not grow with length.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Literal

from textual import events, work
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.reactive import reactive
from textual.scrollbar import ScrollBar
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.tui.open_conversation import ChatTurn, Conversation
from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.drafting import Drafting
from akunu_py.tui.transcript.find import (
    CurrentMark,
    Finder,
    ShownHit,
    clicked_text,
    hits_in,
    section_of_hit,
)
from akunu_py.tui.transcript.markdown import MarkdownSection
from akunu_py.tui.transcript.turn import AnswerView, PromptView, ThinkingView

_NEAR = 2  # screens: closer sections are mounted
_FAR = 3  # screens: farther sections are unmounted
TEXT_WIDTH = 100  # columns of text
_EDGES = 5  # columns of padding and scrollbar
_UPDATE_DELAY_S = 0.05  # minimum time between updates of the mounted sections
_LAYOUT_CHECKS = 100  # until a mounted message is laid out; under load they take longer
PAGE = 10  # turns mounted initially
_STEP = 5  # turns added when the reader scrolls near an end
_MAX_MOUNTED = 20  # turns; large screens allow more

MessageView = PromptView | AnswerView


def side_margin(width: int) -> int:
    """Return the empty columns on each side of the text, on `width` screen columns."""
    return max(0, width - _EDGES - TEXT_WIDTH) // 2


Part = Literal["prompt", "answer"]


class HiddenTurns(Static, can_focus=False):
    """Placeholder for the turns before or after the mounted ones."""


class TurnColumn(Vertical):
    """The column of mounted message views."""

    def __init__(self, make: Callable[[ChatTurn], list[Widget]]) -> None:
        super().__init__(classes="column")
        self._create_views = make  # creates the views of a turn
        self.earlier: list[ChatTurn] = []  # unmounted turns above
        self.later: list[ChatTurn] = []  # unmounted turns below

    @property
    def messages(self) -> list[MessageView]:
        return [view for view in self.children if isinstance(view, (PromptView, AnswerView))]

    @property
    def answers(self) -> list[AnswerView]:
        return [view for view in self.children if isinstance(view, AnswerView)]

    def message(self, turn: ChatTurn, part: Part) -> MessageView | None:
        """Return the view of a part of `turn`, if it is mounted."""
        # Called for each token; a query would walk through all widgets.
        view = self._nodes._get_by_id(f"{part}-{turn.number}")
        return view if isinstance(view, (PromptView, AnswerView)) else None

    @property
    def turns(self) -> list[ChatTurn]:
        return [view.turn for view in self.children if isinstance(view, PromptView)]

    async def show(self, turns: Sequence[ChatTurn], middle: int | None = None) -> None:
        """Mount the turns around index `middle` (None: the last ones); unmount all others."""
        await self.remove_children()
        first = max(0, len(turns) - PAGE)
        if middle is not None:
            first = min(first, max(0, middle - PAGE // 2))
        self.earlier, self.later = list(turns[:first]), list(turns[first + PAGE :])
        await self.mount_all(self.views_of(turns[first : first + PAGE]))
        await self._show_counts()

    async def unmount_from(self, turn: ChatTurn) -> None:
        await self.remove_children(self.children[self._index(turn) :])

    async def trim(self) -> None:
        """Unmount all but the last turns if too many are mounted."""
        if len(self.turns) > self._max_mounted:
            await self._keep_last(PAGE)

    async def mount_earlier(self) -> None:
        more = self.earlier[-_STEP:]
        del self.earlier[-_STEP:]
        first = self.messages[0] if self.messages else None
        await self.mount_all(self.views_of(more), before=first)
        turns = self.turns
        if len(turns) > (most := self._max_mounted):
            self.later[:0] = turns[most:]
            await self.unmount_from(turns[most])
        await self._show_counts()

    async def mount_later(self) -> None:
        more = self.later[:_STEP]
        del self.later[:_STEP]
        await self.query_children(HiddenTurns).remove()
        await self.mount_all(self.views_of(more))
        await self._keep_last(self._max_mounted)

    @property
    def _max_mounted(self) -> int:
        """Maximum number of mounted turns: four screens of turns of three lines."""
        return max(_MAX_MOUNTED, self.app.size.height * 4 // 3)

    def views_of(self, turns: Sequence[ChatTurn]) -> list[Widget]:
        return [view for turn in turns for view in self._create_views(turn)]

    async def _keep_last(self, count: int) -> None:
        turns = self.turns
        if earlier := turns[:-count]:
            self.earlier += earlier
            await self.remove_children(self.children[: self._index(turns[-count])])
        await self._show_counts()

    def _index(self, turn: ChatTurn) -> int:
        return self.children.index(self.message(turn, "prompt"))

    async def _show_counts(self) -> None:
        await self.query_children(HiddenTurns).remove()
        if self.earlier:
            await self.mount(HiddenTurns(f"↑ {len(self.earlier):,} earlier prompts"), before=0)
        if self.later:
            await self.mount(HiddenTurns(f"↓ {len(self.later):,} later prompts"))


class SteadyScroll(VerticalScroll):
    """A scroll view that keeps visible messages in place when content above changes."""

    def __init__(self, column: TurnColumn, *, id: str) -> None:
        super().__init__(column, id=id)
        self._column = column
        # The first message whose top is visible, and its position. Without such a message, changes
        # of the total height shift the view during `adjust_above`.
        self._reference: tuple[Widget | None, int] = (None, 0)
        self._adjusting = 0  # changes in progress above the viewport
        self._height = 0

    async def adjust_above(self, change: Awaitable[None]) -> None:
        """Await a change above the viewport that may change heights."""

        def end() -> None:
            self._adjusting -= 1

        self._adjusting += 1
        await change
        self.call_after_refresh(end)

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Lay out the column and scroll in the same step, so that nothing jumps."""
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
        """Re-anchor at the end as Textual does, unless later turns are unmounted."""
        if not self._column.later:
            super()._check_anchor()

    def _shift(self, lines: int) -> None:
        """Move the scroll position by `lines`, without the watchers that would redraw."""
        if lines:
            place = max(0.0, self.scroll_y + lines)
            self.set_reactive(Widget.scroll_y, place)
            self.set_reactive(Widget.scroll_target_y, place)
            self.vertical_scrollbar.set_reactive(ScrollBar.position, place)


class Transcript(SteadyScroll, can_focus=False):
    """The conversation; follows its end until scrolled up. Not focusable while empty."""

    FOCUS_ON_CLICK = False  # the prompt box keeps the focus
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "choose(-1)", "Previous message", show=False),
        Binding("down,j", "choose(1)", "Next message", show=False),
        Binding("pageup", "page(-1)", "Scroll up", show=False),
        Binding("pagedown,space", "page(1)", "Scroll down", show=False),
        Binding("home", "begin", "Go to the beginning", show=False),
        Binding("end", "follow", "Go to the end", show=False),
        Binding("left", "app.branch(-1)", "Previous branch"),
        Binding("right", "app.branch(1)", "Next branch"),
        Binding("e", "app.edit", "Edit the prompt and send it again"),
        Binding("r", "app.regenerate", "Regenerate the answer"),
        Binding("g", "app.continue", "Continue a truncated answer"),
        Binding("c", "app.copy_message", "Copy the message"),
        Binding("b", "app.copy_code", "Copy a code block; again for the next"),
        Binding("enter", "unfold", "Fold or unfold a long prompt or tool calls"),
        Binding("w", "wrap_code", "Wrap or truncate long lines of code"),
        Binding("shift+left", "scroll_code(-1)", "Scroll long lines of code", show=False),
        Binding("shift+right", "scroll_code(1)", "Scroll long lines of code"),
        Binding("n", "app.find_next(1)", "Next hit of /find"),
        Binding("N", "app.find_next(-1)", "Previous hit of /find"),
        Binding("slash", "app.find", "Find in this chat", show=False),
        Binding("question_mark", "app.help", "Keys", show=False),
    ]

    drafting: reactive[Drafting] = reactive[Drafting]("hidden", init=False)
    thinking: reactive[bool] = reactive(False, init=False)

    class MoreBelow(Static, can_focus=False):
        """A hint below the transcript that an answer grows below the viewport."""

        async def on_click(self) -> None:
            await self.run_action("app.follow")

    def __init__(self, conversation: Conversation, id: str) -> None:
        self._column = TurnColumn(self._views)
        super().__init__(self._column, id=id)
        self._conversation = conversation
        self.more_below = self.MoreBelow("↓ more below · End", id="more")
        self._chosen: MessageView | None = None
        self._mounting = asyncio.Lock()  # serializes mounting and unmounting
        self._update_pending = False
        self._hit: Widget | None = None  # the widget with the current hit

    def on_resize(self) -> None:
        """Center the text column. Wider content extends to the right."""
        self._column.styles.padding = (0, 0, 0, side_margin(self.app.size.width))

    def on_mount(self) -> None:
        self.anchor()
        self.more_below.display = False
        self.watch(self, "scroll_y", self._after_scroll, init=False)
        self.watch(self, "virtual_size", self._after_scroll, init=False)

    @property
    def is_empty(self) -> bool:
        return not self._column.children

    async def reload(self, message: str | None = None) -> None:
        """Show the conversation at the message with this id, else its end; drop notices."""
        turns = self._conversation.turns
        ids = ((turn.prompt.id, turn.reply_id) for turn in turns)
        place = next((place for place, pair in enumerate(ids) if message in pair), None)
        async with self._mounting:
            await self._column.show(turns, place)
        self.can_focus = bool(turns)
        self.anchor()
        if self._column.later:
            self.release_anchor()
        for view in self._column.messages:
            turn = view.turn
            if message == (turn.prompt.id if isinstance(view, PromptView) else turn.reply_id):
                if self._column.later:  # otherwise the last message is close enough
                    self._mark_chosen(view)
                self.call_after_refresh(self._scroll_after_reload, view)

    def _scroll_after_reload(self, view: MessageView) -> None:
        if self._hit is None:  # otherwise /find has scrolled meanwhile
            self._scroll_into_view(view)

    async def add(self, *widgets: Widget) -> None:
        if self._column.later:
            await self.reload()
        await self._column.mount_all(widgets)

    async def show_branch(self) -> None:
        """Show the active branch: replace the turns and notices from the first change on."""
        turns, column = self._conversation.turns, self._column
        skipped = [turn.number for turn in turns[: len(column.earlier)]]
        if column.later or skipped != [turn.number for turn in column.earlier]:
            await self.reload()
            return
        shown, rest = column.turns, turns[len(column.earlier) :]
        same = 0
        while same < min(len(shown), len(rest)) and shown[same] is rest[same]:
            same += 1
        async with self._mounting:
            if same < len(shown):
                await column.unmount_from(shown[same])
            await column.mount_all(column.views_of(rest[same:]))
        self.can_focus = bool(column.messages)

    def answer(self, turn: ChatTurn) -> AnswerView | None:
        """Return the view of the answer of `turn`, if it is mounted."""
        view = self._column.message(turn, "answer")
        return view if isinstance(view, AnswerView) else None

    async def renew(self, turn: ChatTurn) -> None:
        """Draw the answer of `turn` anew, because a round of tool calls began."""
        async with self._mounting:
            view, prompt = self.answer(turn), self._column.message(turn, "prompt")
            if view is None or prompt is None:
                return
            _, fresh = self._views(turn)
            with self.app.batch_update():
                await view.remove()
                await self._column.mount(fresh, after=prompt)
            if self._chosen is view and isinstance(fresh, AnswerView):
                self._mark_chosen(fresh)

    def mark_edited(self, turn: ChatTurn | None) -> None:
        for view in self._column.messages:
            view.set_class(isinstance(view, PromptView) and view.turn is turn, "-edited")

    # Found text

    async def show_hit(self, turn: ChatTurn, part: Part, index: int, find: Finder) -> None:
        """Mount a message, scroll to a hit in it, and mark the hit."""
        turns = self._conversation.turns
        self.mark_hit(None)
        self.release_anchor()
        if self._column.message(turn, part) is None and turn in turns:
            async with self._mounting:
                await self._column.show(turns, turns.index(turn))
        view = self._column.message(turn, part)
        if view is None:
            return
        self._mark_chosen(view)
        where: Widget = view
        if isinstance(view, AnswerView):
            where, index = section_of_hit(view, view.query(MarkdownSection), index, find)
        elif not view.is_open:
            view.action_unfold()
        hits = list[ShownHit]()
        for _ in range(_LAYOUT_CHECKS):
            if isinstance(where, MarkdownSection) and where.is_unmounted:
                # First, because sections far from the screen are unmounted.
                self.scroll_to_widget(where, animate=False, top=True, immediate=True)
                async with self._mounting:
                    await where.restore()
            hits = list(hits_in(where, find))
            if len(hits) > index:
                break
            await asyncio.sleep(_UPDATE_DELAY_S)  # not laid out yet
        if hits:
            self.mark_hit(hits[min(index, len(hits) - 1)])
        else:
            self._scroll_into_view(view)

    def mark_hit(self, hit: ShownHit | None) -> None:
        """Mark the current hit, and scroll to it; None removes the mark."""
        if self._hit is not None:
            del self._hit.__dict__["get_line_filters"]
            self._hit.refresh()
        self._hit = hit.widget if hit else None
        if hit is None:
            return
        widget, filters = hit.widget, hit.widget.get_line_filters
        mark = CurrentMark(hit.selection)
        widget.__dict__["get_line_filters"] = lambda: [mark, *filters()]
        widget.refresh()
        self._scroll_to_hit(hit)
        # Sections that are not laid out yet move the hit.
        self.call_after_refresh(self.call_after_refresh, self._scroll_to_hit, hit)

    def _scroll_to_hit(self, hit: ShownHit) -> None:
        widget = hit.widget
        if self._hit is not widget or not widget.is_mounted:
            return
        row, height = hit.row_in(self), self.content_region.height
        if not 0 <= row - self.scroll_y < height:
            self.scroll_to(y=max(0, row - height // 2), animate=False, immediate=True)

    def redraw(self) -> None:
        for widget in self.query("*"):
            widget.refresh()

    async def watch_drafting(self, drafting: Drafting) -> None:
        with self.app.batch_update():
            await asyncio.gather(*(view.show_drafting(drafting) for view in self._column.answers))

    def watch_thinking(self, thinking: bool) -> None:
        for view in self._column.answers:
            for each in view.query(ThinkingView):
                each.show(thinking)

    # The chosen message

    @property
    def chosen(self) -> tuple[ChatTurn, Part] | None:
        """The message that keys apply to; None without focus."""
        # Not `has_focus`: a key may arrive before the focus event.
        if self.screen.focused is self:
            self.on_focus()
            self._choose_visible()
        if self.screen.focused is not self or self._chosen is None:
            return None
        return self._chosen.turn, "prompt" if isinstance(self._chosen, PromptView) else "answer"

    def choose(self, turn: ChatTurn, part: Part) -> None:
        if view := self._column.message(turn, part):
            self._choose(view)

    def on_focus(self) -> None:
        views = self._column.messages
        if self._chosen not in views:
            self._chosen = None
            most = max(views, key=self._visible_lines, default=None)
            if most is not None and self._anchor_released and self._visible_lines(most):
                self._mark_chosen(most)  # nothing moves
            elif views:
                self._choose(views[-1])
        else:
            self._show_chosen(True)

    def _visible_lines(self, view: MessageView) -> int:
        return self._scrolled_region(view).intersection(self.content_region).height

    def watch_has_focus(self, _has_focus: bool) -> None:
        """Update the style of the transcript, as Textual does, but of none of its blocks."""
        self.app.stylesheet.update_nodes([self])

    def _scrolled_region(self, widget: Widget) -> Region:
        """Return where a mounted widget is at the current scroll position.

        `widget.region` is where the last frame drew it, and frames are late on a slow terminal.
        """
        region = widget.region  # Read first: it may lay out the column, which the next line reads.
        drawn_scroll_y = self.content_region.y - self._column.region.y
        return region.translate((0, drawn_scroll_y - self.scroll_offset.y))

    def on_blur(self) -> None:
        self._show_chosen(False)

    def on_click(self, event: events.Click) -> None:
        """Select the word at a double click, the line at a triple click."""
        widget, offset = self.screen.get_widget_and_offset_at(*event.screen_offset)
        if event.chain > 1 and widget is not None and offset is not None:
            selection = clicked_text(widget, offset, line=event.chain > 2)
            self.screen.selections = {widget: selection} if selection else {}
            event.stop()

    async def action_choose(self, steps: int) -> None:
        self.on_focus()
        column, views = self._column, self._column.messages
        now = views.index(self._chosen) if self._chosen in views else len(views)
        is_above, is_below = now + steps < 0, now + steps >= len(views)
        if (is_above and column.earlier) or (is_below and column.later):
            await self._mount_more(up=is_above)
        views = column.messages
        if self._chosen in views:
            now = views.index(self._chosen)
        if now + steps >= len(views):
            await self.run_action("app.focus('prompt')")
        else:
            self._choose(views[max(0, now + steps)])

    async def action_page(self, direction: int) -> None:
        """Scroll a page up (-1) or down (1); follow the end again when it is reached."""
        self.call_after_refresh(self._choose_visible)
        lines = direction * (self.scrollable_content_region.height - 1)
        target = self.scroll_y + lines
        self.release_anchor()
        is_above, is_below = target < 0, target >= self.max_scroll_y
        if (is_above and self._column.earlier) or (is_below and self._column.later):
            await self._mount_more(up=is_above)
            self.call_after_refresh(self.scroll_relative, y=lines, animate=False)
        elif is_below:
            self.anchor()
        else:
            self.scroll_to(y=max(0, target), animate=False)

    async def action_begin(self) -> None:
        if self._column.earlier:
            async with self._mounting:
                await self._column.show(self._conversation.turns, 0)
        self.release_anchor()
        self.scroll_home(animate=False, immediate=True)
        if self.screen.focused is self and self._column.messages:
            self._mark_chosen(self._column.messages[0])

    async def action_follow(self) -> None:
        async with self._mounting:
            if self._column.later:
                await self._column.show(self._conversation.turns)
            else:
                await self._column.trim()
        self.anchor()
        if self.screen.focused is self and self._column.messages:
            self._mark_chosen(self._column.messages[-1])

    def action_unfold(self) -> None:
        self.on_focus()
        if self._chosen is not None:
            self._chosen.action_unfold()

    def action_wrap_code(self) -> None:
        """Switch between wrapping and truncating code lines in all blocks."""
        self.toggle_class("-wrap")

    def action_scroll_code(self, steps: int) -> None:
        self.on_focus()
        if self._chosen is not None:
            for block in self._chosen.query(CodeBlock):
                block.scroll_code(steps)

    def _mark_chosen(self, view: MessageView) -> None:
        self._show_chosen(False)
        self._chosen = view
        self._show_chosen(True)

    def _show_chosen(self, shown: bool) -> None:
        if self._chosen is not None and self._chosen.has_class("-chosen") != shown:
            # A long answer has hundreds of blocks, whose styles do not depend on the class.
            self._chosen.set_class(shown, "-chosen", update=False)
            self.app.stylesheet.update_nodes([self._chosen])
            for block in self._chosen.query(CodeBlock):
                block.refresh()  # its header names the keys

    def _choose_visible(self) -> None:
        if self.screen.focused is not self or self._chosen is None:
            return
        if not self._anchor_released and self._column.messages[-1:] == [self._chosen]:
            return  # its end becomes visible after layout
        here = self.content_region
        laid_out = [view for view in self._column.messages if view.region.height]
        seen = [view for view in laid_out if self._scrolled_region(view).overlaps(here)]
        if self._chosen in laid_out and seen and self._chosen not in seen:
            self._mark_chosen(seen[0])

    def _choose(self, view: MessageView) -> None:
        self._mark_chosen(view)
        if view is self._column.messages[-1] and not self._column.later:
            self.anchor()
        else:
            self._scroll_into_view(view)

    def _scroll_into_view(self, view: MessageView) -> None:
        self.release_anchor()
        is_taller = view.size.height > self.size.height
        self.scroll_to_widget(view, animate=False, top=is_taller, immediate=True)

    def _views(self, turn: ChatTurn) -> list[Widget]:
        number = self._conversation.branch_number
        return [
            PromptView(turn, number(turn.prompt.id)),
            AnswerView(turn, number(turn.reply_id), drafting=self.drafting, thinking=self.thinking),
        ]

    async def _mount_more(self, *, up: bool) -> None:
        async with self._mounting:
            await (self._column.mount_earlier() if up else self._column.mount_later())

    def on_answer_view_state_changed(self) -> None:
        self.call_after_refresh(self._after_scroll)

    def _after_scroll(self) -> None:
        is_growing = any(turn.state == "answering" for turn in self._conversation.turns[-2:])
        is_end_hidden = self.max_scroll_y - self.scroll_y > 1 or bool(self._column.later)
        self.more_below.display = self._anchor_released and is_end_hidden and is_growing
        if not self._update_pending:
            self._update_pending = True
            self.set_timer(_UPDATE_DELAY_S, self._update_nearby)

    @work(group="update")
    async def _update_nearby(self) -> None:
        self._update_pending = False
        column, near = self._column, self.size.height
        self._choose_visible()
        async with self._mounting:
            is_laid_out = all(view.size.height for view in column.messages)
            if self._anchor_released and not self._adjusting and is_laid_out:
                if self.scroll_y < near and column.earlier:
                    await column.mount_earlier()
                elif self.max_scroll_y - self.scroll_y < near and column.later:
                    await column.mount_later()
            await self._update_sections()

    async def _update_sections(self) -> None:
        if self.screen.selections:
            return
        here, below = self.region, list[MarkdownSection]()
        kept = self._hit.ancestors if self._hit is not None else []  # its mark would be lost
        for section in [each for view in self._column.answers for each in view.sections]:
            region = self._scrolled_region(section)
            distance = max(here.y - region.bottom, region.y - here.bottom)
            if not region.height:
                continue  # not laid out yet
            if section.is_unmounted and distance < _NEAR * here.height:
                if region.bottom <= here.y:
                    await self.adjust_above(section.restore())
                else:
                    below.append(section)
            elif not section.is_unmounted and distance > _FAR * here.height and section not in kept:
                await section.unmount()
        if self._adjusting and below:
            self._after_scroll()  # restores the sections below after those above have a height
        else:
            for section in below:
                await section.restore()
