"""How a turn is drawn: its prompt, its thinking, its answer; and notices between turns.

An answer is either Markdown, or plain text with its drafts marked (`drafting`). Everything shown
goes through `text.displayable`; no markup in it is obeyed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.text import displayable, human_size, on_one_line
from akunu_py.tui.conversation import Turn
from akunu_py.tui.prompt.files import split
from akunu_py.tui.transcript.drafting import DraftedText
from akunu_py.tui.transcript.markdown import AnswerMarkdown, MarkdownSection
from akunu_py.types import ENDINGS

# Drawing takes turns with decoding: after an update, so many times its duration passes.
_PAUSE_FACTOR = 20
_MAX_PAUSE_S = 1.5
_SHOWN_LINES = 12
_SHOWN_CHARACTERS = 1500
_THINKING_TAIL = 1500  # characters shown while it grows: all of it would be wrapped for each token


class ThinkingView(Vertical):
    """What a reasoning model wrote before its answer: one line, and the whole while `open`; not
    shown at all where there is none."""

    def __init__(self, turn: Turn, *, open: bool) -> None:
        super().__init__()
        self._turn = turn
        self._open = open
        self._is_whole = False  # what is shown is all there will be
        self._head = Static(classes="head")
        self._body = Static(classes="body")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._body

    def on_mount(self) -> None:
        self.sync()

    def on_click(self, event: events.Click) -> None:
        if event.widget is self._head:
            self.show(not self._open)

    def show(self, open: bool) -> None:
        """Opens or folds it."""
        self._open = open
        self._is_whole = False
        self.sync()

    def sync(self) -> None:
        """Draws what was added to the turn."""
        if self._is_whole:
            return
        thinking = self._turn.thinking.strip()
        self.display = bool(thinking)
        self._body.display = self._open
        if not thinking:
            return
        is_growing = self._turn.state == "answering" and not self._turn.answer
        self._is_whole = bool(self._turn.answer)
        words = len(thinking.split())
        mark, key = ("▾", "F3 folds") if self._open else ("▸", "F3 opens")
        head = "thinking…" if is_growing else "thought"
        self._head.update(Content(f"{mark} {head}  {words:,} words  {key}"))
        if self._open:
            self._body.update(
                Content(displayable(thinking[-_THINKING_TAIL:] if is_growing else thinking))
            )


BranchNumber = tuple[int, int]  # which, of how many


def branch_mark(number: BranchNumber) -> str:
    """Which of several branches this is; "" where there is one."""
    which, count = number
    return f"‹ {which}/{count} ›" if count > 1 else ""


class Notice(Static, can_focus=False):
    """A message of the program; `kind` is a class of the style sheet."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(Content(displayable(text)), classes=kind)


class PromptView(Widget, can_focus=False):
    """A prompt: its text, cut where it is long, and the names of its files."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"prompt--about"}

    def __init__(self, turn: Turn, number: BranchNumber) -> None:
        super().__init__(id=f"prompt-{turn.number}")
        self.turn = turn
        self._number = number
        text, self._files = split(turn.prompt.text)
        self._text, self._more = _shortened(text)

    def render(self) -> Content:
        about = [f"@{on_one_line(file.name)}  {human_size(file.size)}" for file in self._files]
        if self._more:
            about.insert(0, f"… {self._more:,} more characters")
        if mark := branch_mark(self._number):
            about.append(mark)
        style = self.get_visual_style("prompt--about", partial=True)
        lines = [Content(displayable(self._text)), *(Content.styled(line, style) for line in about)]
        return Content("\n").join(lines)


class AnswerView(Vertical):
    """The answer of a turn, in one of two views. It draws what the turn has; `sync` to see more."""

    def __init__(self, turn: Turn, number: BranchNumber, *, drafting: bool, thinking: bool) -> None:
        super().__init__(id=f"answer-{turn.number}")
        self.turn = turn
        self._number = number
        self._thinking = ThinkingView(turn, open=thinking)
        text = displayable(turn.answer)
        self._text = AnswerMarkdown(text)
        self._text.display = not drafting
        self._drafted = DraftedText(turn) if drafting else None
        self._foot = Static(classes="foot")
        self._drawn = len(text)  # characters of the answer that the text has
        self._drawing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # the answer is whole, as far as it came

    def compose(self) -> ComposeResult:
        yield self._thinking
        yield self._text
        if self._drafted is not None:
            yield self._drafted
        yield self._foot

    def on_mount(self) -> None:
        self.show_state()

    def on_unmount(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()

    @property
    def is_drawn(self) -> bool:
        """Whether what the turn has is on the screen."""
        return self._drafted is not None or self._drawn == len(self.turn.answer)

    @property
    def sections(self) -> list[MarkdownSection]:
        """Those that may be unmounted: the last one may grow while it is being answered."""
        ended = self.turn.state in ("done", "failed") and self.is_drawn
        return self._text.sections if ended else self._text.sections[:-1]

    def sync(self) -> None:
        """Draws what was added to the turn; returns at once."""
        self._thinking.sync()
        if self._drafted is not None:
            self._drafted.sync()
        elif self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw())

    def show_state(self) -> None:
        """Shows how the answer ended, unless it is whole, and which of several it is."""
        if self.turn.state in ("done", "failed"):
            self._ended.set()
        else:
            self._ended.clear()
        self.sync()
        words = [self._ending(), branch_mark(self._number)]
        text = "   ".join(word for word in words if word)
        self._foot.update(Content(text))
        self._foot.display = bool(text)

    def show_thinking(self, open: bool) -> None:
        """Opens or folds the thinking."""
        self._thinking.show(open)

    async def show_drafting(self, drafting: bool) -> None:
        """Switches between Markdown and plain text with marked drafts."""
        if drafting and self._drafted is None:
            self._drafted = DraftedText(self.turn)
            await self.mount(self._drafted, after=self._text)
        elif not drafting and self._drafted is not None:
            await self._drafted.remove()
            self._drafted = None
            self.sync()
        self._text.display = not drafting

    def _ending(self) -> str:
        if self.turn.state == "waiting":
            return "… waits its turn; Esc takes it back"
        if self.turn.state not in ("done", "failed"):
            return ""
        if self.turn.finish == "stop" and not self.turn.answer.strip():
            return "… the model has nothing to say to that"
        if self.turn.finish is None and not self.turn.answer:
            return "… not answered; Ctrl+G asks again"
        return ENDINGS[self.turn.finish].chat

    async def _draw(self) -> None:
        # Not Textual's MarkdownStream: its `stop` may start an append while another one runs, and
        # then both parse from the same line. This one also keeps within its share of the time.
        while self._drawn < len(self.turn.answer) and self._drafted is None:
            started = time.monotonic()
            start, self._drawn = self._drawn, len(self.turn.answer)
            await self._text.append(displayable(self.turn.answer[start : self._drawn]))
            if self.turn.state == "answering":
                pause = min(_PAUSE_FACTOR * (time.monotonic() - started), _MAX_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), pause)


def _shortened(text: str) -> tuple[str, int]:
    """The beginning of a long text, and how many characters were left out."""
    lines = text.split("\n")
    short = "\n".join(lines[:_SHOWN_LINES])[:_SHOWN_CHARACTERS]
    left_out = len(text) - len(short)
    return (short, left_out) if left_out > len(short) // 4 else (text, 0)
