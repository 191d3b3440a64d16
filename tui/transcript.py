"""The transcript: prompts, answers and notices, as they are drawn.

Owns how an answer looks in each of its two views: Markdown to read, or plain text with the accepted
draft tokens marked. Everything shown goes through `text.displayable`; no markup in it is obeyed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from typing import ClassVar

from markdown_it import MarkdownIt
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.content import Span as Styled
from textual.widget import Widget
from textual.widgets import Markdown, Static

from akunu_py.tui.conversation import Turn
from akunu_py.tui.text import displayable
from akunu_py.types import FinishReason

_ROOM_FOR_LEGEND = 62  # columns

_ENDINGS: dict[FinishReason, str] = {
    "stop": "",
    "cancelled": "■ stopped",
    "length": "… cut off at the limit of tokens (--max-tokens)",
    "context": "… the context is full; Ctrl+N starts a new conversation",
}


def markdown_parser() -> MarkdownIt:
    """A parser that shows HTML as text instead of dropping it."""
    return MarkdownIt("gfm-like", {"html": False})


class UserPrompt(Static, can_focus=False):
    """What the person said."""

    def __init__(self, prompt: str, id: str) -> None:
        super().__init__(Content(displayable(prompt)), id=id)


class Notice(Static, can_focus=False):
    """What the program has to say; `kind` is a class of the style sheet."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(Content(displayable(text)), classes=kind)


class Stretch(Widget):
    """A stretch of an answer as plain text: `answer[start:end]`, up to its end for None."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"drafted--accepted"}

    def __init__(self, turn: Turn, start: int) -> None:
        super().__init__()
        self._turn = turn
        self.start = start
        self.end: int | None = None

    def render(self) -> Content:
        text = displayable(self._turn.answer[self.start : self.end])
        style = self.get_visual_style("drafted--accepted", partial=True)
        spans = self._turn.spans
        first = bisect_right(spans, self.start, key=lambda span: span[1])
        last = len(spans) if self.end is None else bisect_left(spans, (self.end, 0))
        marked = [
            Styled(max(0, start - self.start), min(end - self.start, len(text)), style)
            for start, end in spans[first:last]
        ]
        return Content(text, spans=marked)


class DraftedText(Vertical):
    """An answer as plain text in which accepted draft tokens are marked.

    Cut into stretches at line ends, so that a long answer is not wrapped again for every token.
    """

    STRETCH = 1500  # characters

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._last = Stretch(turn, 0)
        super().__init__(self._last, *self._cut())

    def sync(self) -> None:
        """Draws what the turn has got since."""
        self._last.refresh(layout=True)
        if more := self._cut():
            self.mount_all(more)

    def _cut(self) -> list[Stretch]:
        """Ends the last stretch where it is long enough; returns those that follow it."""
        more: list[Stretch] = []
        while (end := self._turn.answer.find("\n", self._last.start + self.STRETCH)) >= 0:
            self._last.end = end
            self._last = Stretch(self._turn, end + 1)
            more.append(self._last)
        return more


class Legend(Widget, can_focus=False):
    """What the colours of the drafting view mean, in one line."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"drafted--accepted", "legend--words"}

    def render(self) -> Content:
        accepted = self.get_visual_style("drafted--accepted", partial=True)
        words = self.get_visual_style("legend--words", partial=True)
        if self.size.width < _ROOM_FOR_LEGEND:
            return Content.assemble(("drafted", accepted), ("  the model's own", words))
        return Content.assemble(
            ("drafted and accepted", accepted),
            ("   the model's own   F2 back to Markdown", words),
        )


class AnswerView(Vertical):
    """The answer of a turn, in one of two views. It draws what the turn has; `sync` to see more."""

    def __init__(self, turn: Turn, *, drafting: bool, id: str) -> None:
        super().__init__(id=id)
        self._turn = turn
        self._markdown = Markdown(parser_factory=markdown_parser, open_links=False)
        self._markdown.display = not drafting
        self._drafted = DraftedText(turn) if drafting else None
        self._drawn = 0  # characters of the answer that the Markdown has
        self._drawing: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        yield self._markdown
        if self._drafted is not None:
            yield self._drafted

    def on_mount(self) -> None:
        self.sync()

    def on_unmount(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()

    def sync(self) -> None:
        """Draws what the turn has got since; returns at once."""
        if self._drafted is not None:
            self._drafted.sync()
        elif self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw())

    async def end(self) -> None:
        """Says how the answer ended, where that is worth a word."""
        words = _ENDINGS[self._turn.finish] if self._turn.finish else ""
        if self._turn.finish == "stop" and not self._turn.answer.strip():
            words = "… the model has nothing to say to that"
        if words:
            await self.mount(Static(Content(words), classes="ending"))

    async def show_drafting(self, drafting: bool) -> None:
        """Changes the view."""
        if drafting and self._drafted is None:
            self._drafted = DraftedText(self._turn)
            await self.mount(self._drafted, after=self._markdown)
        elif not drafting and self._drafted is not None:
            await self._drafted.remove()
            self._drafted = None
            self.sync()
        self._markdown.display = not drafting

    async def _draw(self) -> None:
        # Not Textual's MarkdownStream: its `stop` may start an append while another one runs, and
        # then both parse from the same line.
        while self._drawn < len(self._turn.answer) and self._drafted is None:
            start, self._drawn = self._drawn, len(self._turn.answer)
            await self._markdown.append(displayable(self._turn.answer[start : self._drawn]))


class Transcript(VerticalScroll, can_focus=False):
    """The conversation; follows its end unless the reader scrolled up."""

    def __init__(self, *first: Widget, id: str) -> None:
        # An anchored container aligns at its end; the column inside, at least as high as the
        # container, keeps a short conversation at the top.
        self._column = Vertical(*first, classes="column")
        super().__init__(self._column, id=id)

    def on_mount(self) -> None:
        self.anchor()

    @property
    def is_empty(self) -> bool:
        return not self._column.children

    async def add(self, *widgets: Widget) -> None:
        """Shows more at the end."""
        await self._column.mount_all(widgets)

    async def add_turn(self, turn: Turn, *, drafting: bool) -> None:
        """Shows a prompt, and the place where its answer will be; follows the end again."""
        await self.add(
            UserPrompt(turn.prompt, id=f"prompt-{turn.number}"),
            AnswerView(turn, drafting=drafting, id=f"answer-{turn.number}"),
        )
        self.anchor()

    async def remove_turn(self, turn: Turn) -> None:
        """Takes a prompt and its answer away."""
        await self.query(f"#prompt-{turn.number}, #answer-{turn.number}").remove()

    def answer(self, turn: Turn) -> AnswerView:
        """Where the answer of `turn` is drawn."""
        return self.query_one(f"#answer-{turn.number}", AnswerView)

    async def show_drafting(self, drafting: bool) -> None:
        """Changes the view of all answers."""
        for view in self.query(AnswerView):
            await view.show_drafting(drafting)

    def page(self, direction: int) -> None:
        """Scrolls a page up (-1) or down (1); who comes to the end follows it again."""
        target = self.scroll_y + direction * (self.scrollable_content_region.height - 1)
        if target >= self.max_scroll_y:
            self.anchor()
        else:
            self.scroll_to(y=max(0, target), animate=False)

    async def clear(self) -> None:
        """Takes everything away."""
        await self._column.remove_children()
        self.anchor()
