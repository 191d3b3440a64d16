"""How a turn is drawn: its prompt, its thinking, its answer; and notices between turns.

An answer is either Markdown, or plain text with its drafts marked (`drafting`). Everything shown
goes through `text.displayable`; no markup in it is obeyed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.text import displayable, human_size, on_one_line
from akunu_py.tui.open_conversation import ChatTurn
from akunu_py.tui.prompt.attachments import split
from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.drafting import DraftedText
from akunu_py.tui.transcript.markdown import AnswerMarkdown, AnswerText, MarkdownSection
from akunu_py.types import FinishReason

# Why an answer is incomplete; None: it failed, or the program was killed.
_ENDINGS: dict[FinishReason | None, str] = {
    "length": "… cut off at the limit of tokens (--max-tokens); F9 goes on",
    "context": "… the context is full; Ctrl+N starts a new chat",
    "cancelled": "■ stopped",
    None: "… broken off; F9 goes on",
}
# Drawing takes turns with decoding: after an update, so many times its duration passes.
_PAUSE_FACTOR = 20
_MAX_PAUSE_S = 1.5
_SHOWN_LINES = 12
_SHOWN_CHARACTERS = 1500
_THINKING_TAIL = 1500  # characters shown while it grows: all of it would be wrapped for each token


class ThinkingView(Vertical):
    """What a reasoning model wrote before its answer: one line, and the whole while `open`; not
    shown at all where there is none."""

    def __init__(self, turn: ChatTurn, *, open: bool) -> None:
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


_ACTIONS = {"copy": "copy_message", "edit": "edit", "again": "regenerate", "code": "copy_code"}
_ACTIONS |= {"go on": "continue", "‹": "branch(-1)", "›": "branch(1)"}


def clickable(words: str, action: str, style: Style) -> tuple[str, Style]:
    """Words that run an action when they are clicked on."""
    return words, style + Style.from_meta({"@click": action})


def action_row(
    names: Sequence[str], number: BranchNumber, action: Style, between: Style
) -> Content:
    """What can be done with a message, to be clicked on."""

    def item(name: str) -> tuple[str, Style]:
        # Later: it may remove this very widget, which would wait for the click to end.
        return clickable(name, f"app.later('{_ACTIONS[name]}')", action)

    parts: list[tuple[str, Style]] = []
    for name in names:
        parts += [item(name), (" · ", between)]
    which, count = number
    if count > 1:
        parts += [item("‹"), (f" {which}/{count} ", between), item("›")]
        return Content.assemble(*parts)
    return Content.assemble(*parts[:-1])


class Notice(Static, can_focus=False):
    """A message of the program; `kind` is a class of the style sheet."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(Content(displayable(text)), classes=kind)


class PromptView(Widget, can_focus=False):
    """A prompt: its text, cut where it is long, and the names of its files."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"prompt--about", "prompt--action"}

    def __init__(self, turn: ChatTurn, number: BranchNumber) -> None:
        super().__init__(id=f"prompt-{turn.number}")
        self.turn = turn
        self._number = number
        self._whole, self._files = split(turn.prompt.text)
        self._most = _SHOWN_CHARACTERS
        self._has_actions = False

    def action_unfold(self) -> None:
        """Shows ten times more of a long prompt; all of it folds again."""
        self._most = _SHOWN_CHARACTERS if self._is_unfolded else 10 * self._most
        self.refresh(layout=True)

    def show_actions(self, shown: bool) -> None:
        self._has_actions = shown
        self.refresh(layout=True)

    @property
    def _is_unfolded(self) -> bool:
        """Whether all of a long prompt is shown."""
        return self._most > _SHOWN_CHARACTERS and not shortened(self._whole, self._most)[1]

    def render(self) -> Content:
        style = self.get_visual_style("prompt--about", partial=True)
        action = self.get_visual_style("prompt--action", partial=True)
        text, more = shortened(self._whole, self._most)
        lines = [Content(displayable(text))]
        if more or self._is_unfolded:
            words = f"… {more:,} more characters · " if more else ""
            unfold = clickable("unfold" if more else "fold", "unfold", action)
            lines.append(Content.assemble((words, style), unfold))
        about = [f"@{on_one_line(file.name)}  {human_size(file.size)}" for file in self._files]
        lines += [Content.styled(line, style) for line in about]
        if self._has_actions:
            lines.append(action_row(("copy", "edit", "again"), self._number, action, style))
        elif mark := branch_mark(self._number):
            lines.append(Content.styled(mark, style))
        return Content("\n").join(lines)


class AnswerView(Vertical):
    """The answer of a turn, in one of two views. It draws what the turn has; `sync` to see more.
    What cannot be drawn as Markdown is shown as it was written."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"answer--about", "answer--action"}

    class StateShown(Message):
        """It begins, grows no more, or its foot is another one."""

    @dataclass
    class NotDrawn(Message):
        """It is shown as plain text, because of a bug."""

        error: Exception

    def __init__(
        self, turn: ChatTurn, number: BranchNumber, *, drafting: bool, thinking: bool
    ) -> None:
        super().__init__(id=f"answer-{turn.number}")
        self.turn = turn
        self._number = number
        self._has_actions = False
        self._thinking = ThinkingView(turn, open=thinking)
        text = displayable(turn.answer)
        self._text: AnswerMarkdown | DraftedText = AnswerMarkdown(text)
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
        is_plain = self._drafted is not None or isinstance(self._text, DraftedText)
        return is_plain or self._drawn == len(self.turn.answer)

    @property
    def sections(self) -> list[MarkdownSection]:
        """Those that may be unmounted: the last one may grow while it is being answered."""
        if isinstance(self._text, DraftedText):
            return []
        ended = self.turn.state in ("done", "failed") and self.is_drawn
        return self._text.sections if ended else self._text.sections[:-1]

    def sync(self) -> None:
        """Draws what was added to the turn; returns at once."""
        self._thinking.sync()
        if self._drafted is not None:
            self._drafted.sync()
        elif isinstance(self._text, DraftedText):
            self._text.sync()
        elif self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw())

    def show_actions(self, shown: bool) -> None:
        self._has_actions = shown
        self.show_state()

    def show_state(self) -> None:
        """Shows how the answer ended, unless it is whole, and which of several it is; what can be
        done with it, once it was clicked on."""
        if self.turn.state in ("done", "failed"):
            self._ended.set()
        else:
            self._ended.clear()
        self.sync()
        ending, mark = self._ending(), branch_mark(self._number)
        foot = Content("   ".join(word for word in (ending, mark) if word))
        if self._has_actions:
            between = self.get_visual_style("answer--about", partial=True)
            action = self.get_visual_style("answer--action", partial=True)
            names = ["copy", *(["code"] if self.query(CodeBlock) else []), "again"]
            names += ["go on"] if self.turn.can_continue else []
            row = action_row(names, self._number, action, between)
            foot = Content.assemble(ending, "   " if ending else "", row)
        self._foot.update(foot)
        self._foot.display = bool(foot)
        self.post_message(self.StateShown())

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
        return _ENDINGS.get(self.turn.finish, "")

    async def _draw(self) -> None:
        # Not Textual's MarkdownStream: its `stop` may start an append while another one runs, and
        # then both parse from the same line. This one also keeps within its share of the time.
        while self._drafted is None and isinstance(self._text, AnswerMarkdown):
            started = time.monotonic()
            start, self._drawn = self._drawn, len(self.turn.answer)
            if start == self._drawn:
                break
            try:
                await self._text.append(displayable(self.turn.answer[start:]))
            except Exception as error:  # noqa: BLE001 - a bug must not hide what was said
                await self._draw_plainly(error)
            if self.turn.state == "answering":
                pause = min(_PAUSE_FACTOR * (time.monotonic() - started), _MAX_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), pause)

    async def on_answer_text_drawing_failed(self, event: AnswerText.DrawingFailed) -> None:
        event.stop()
        await self._draw_plainly(event.error)

    async def _draw_plainly(self, error: Exception) -> None:
        failed = self._text
        if isinstance(failed, AnswerMarkdown) and self.is_attached:
            self._text = DraftedText(self.turn, marked=False)
            self._text.display = failed.display
            await self.mount(self._text, after=failed)
            await failed.remove()
            self.post_message(self.NotDrawn(error))


def shortened(text: str, most: int = _SHOWN_CHARACTERS) -> tuple[str, int]:
    """The beginning of a long text, and how many characters were left out."""
    most_lines = _SHOWN_LINES * most // _SHOWN_CHARACTERS
    short = "\n".join(text.split("\n", most_lines)[:most_lines])[:most]
    left_out = len(text) - len(short)
    return (short, left_out) if left_out > len(short) // 4 else (text, 0)
