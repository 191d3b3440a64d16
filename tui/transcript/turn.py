"""Views of a turn (prompt, thinking, tool calls, answer), and of notices between."""

import asyncio
import contextlib
import json
import re
import time
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Static

from akunu_py.chats.tree import Outcome, ToolUse
from akunu_py.text import displayable, human_size, on_one_line
from akunu_py.tui.open_conversation import SUMMARY_PROMPT, ChatTurn
from akunu_py.tui.prompt.attachments import expand_pastes, pasted_texts, split_files
from akunu_py.tui.transcript.drafting import Drafting, DraftMarks
from akunu_py.tui.transcript.markdown import AnswerMarkdown, MarkdownSection
from akunu_py.types import FinishReason

_THINKING_TAIL = 1500  # characters shown while thinking grows; each token wraps them again


class Foldable(Vertical):
    """A line, and more text below it while `is_open`; a click on it opens or folds it."""

    def __init__(self, *, is_open: bool) -> None:
        super().__init__()
        self.is_open = is_open
        self._head = Static(classes="head")
        self._body = Static(classes="body")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._body

    def on_mount(self) -> None:
        self.sync()

    def on_click(self, event: events.Click) -> None:
        clicked, _ = self.screen.get_widget_at(*event.screen_offset)
        if clicked is self._head:
            self.show(not self.is_open)

    def show(self, is_open: bool) -> None:
        self.is_open = is_open
        self.sync()

    def sync(self) -> None:
        """Draw the present text."""
        raise NotImplementedError


class ThinkingView(Foldable):
    """The reasoning before an answer: one line, or all of it. Hidden if empty."""

    def __init__(self, turn: ChatTurn, *, is_open: bool) -> None:
        super().__init__(is_open=is_open)
        self._turn = turn
        self._completed: bool | None = None  # `is_open` when all of the reasoning was drawn

    def sync(self) -> None:
        if self._completed is self.is_open:
            return
        thinking = self._turn.thinking.strip()
        self.display = bool(thinking)
        self._body.display = self.is_open
        if not thinking:
            return
        is_growing = self._turn.state == "answering" and not self._turn.answer
        self._completed = self.is_open if self._turn.answer else None
        words = len(thinking.split())
        mark, key = ("▾", "F3 folds") if self.is_open else ("▸", "F3 opens")
        head = "thinking…" if is_growing else "thought"
        self._head.update(Content(f"{mark} {head}  {words:,} words  {key}"))
        if self.is_open:
            shown = thinking[-_THINKING_TAIL:] if is_growing else thinking
            self._body.update(Content(displayable(shown)))


_MARKS: dict[Outcome, str] = {
    "waiting": "? waits for your decision",
    "running": "… running",
    "done": "✓",
    "failed": "× failed",
    "denied": "– denied",
    "stopped": "■ stopped",
}
_ESCAPE = re.compile(r"\\(.)")
_MAX_HEAD = 300  # characters of the arguments in the first line


def describe_call(use: ToolUse) -> str:
    return on_one_line(f"{use.server} · {use.call.name}" if use.server else use.call.name)


def readable_arguments(arguments: str) -> str:
    """Return arguments as indented JSON with broken lines; unchanged if invalid."""
    try:
        text = json.dumps(json.loads(arguments or "{}"), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return displayable(arguments)
    # The bar keeps lines of a string apart from lines of the JSON.
    return _ESCAPE.sub(lambda found: "\n  │ " if found[1] == "n" else found[0], displayable(text))


class ToolUseView(Foldable):
    """A call: one line, or its arguments and its result while open."""

    def __init__(self, use: ToolUse) -> None:
        super().__init__(is_open=False)
        self.use = use

    def sync(self) -> None:
        use = self.use
        mark = "▾" if self.is_open else "▸"
        arguments = on_one_line(use.call.arguments[:_MAX_HEAD])
        size = f"  {len(use.result):,} characters" if use.outcome == "done" else ""
        head = f"{mark} {describe_call(use)}  {_MARKS[use.outcome]}{size}  {arguments}"
        self._head.update(Content(head))
        self._body.display = self.is_open
        if self.is_open:
            arguments = readable_arguments(use.call.arguments)
            result = displayable(use.shown_result) if use.has_ended else ""
            self._body.update(Content("\n\n".join(filter(None, (arguments, result)))))


class RoundsView(Vertical):
    """The parts of an answer that ended with tool calls, with these calls."""

    def __init__(self, turn: ChatTurn, *, thinking: bool) -> None:
        super().__init__()
        self._turn = turn
        self._thinking = thinking

    def compose(self) -> ComposeResult:
        for each in self._turn.rounds:
            part = ChatTurn(self._turn.prompt, each.text or " ", each.thinking, state="done")
            yield ThinkingView(part, is_open=self._thinking)
            if each.text.strip():
                yield AnswerMarkdown(displayable(each.text))
            for use in each.uses:
                yield ToolUseView(use)

    def sync(self) -> None:
        uses = [use for each in self._turn.rounds for use in each.uses]
        for view, use in zip(self.query(ToolUseView), uses, strict=False):
            view.use = use
            view.sync()

    def toggle(self) -> None:
        """Open all calls, or fold them if all are open."""
        views = list(self.query(ToolUseView))
        unfold = not all(view.is_open for view in views)
        for view in views:
            view.show(unfold)


# Why an answer is incomplete. None: it failed, or the process was killed.
_ENDINGS: dict[FinishReason | None, str] = {
    "length": "… reached the token limit (Ctrl+S); F9 continues",
    "context": "… the context is full; /compact makes room",
    "cancelled": "■ stopped; F9 continues",
    "repetition": "… stopped, because the answer repeated itself; r tries again",
    None: "… interrupted; F9 continues",
}
# The pause after an update, as a multiple of its duration: drawing must not slow decoding.
_PAUSE_FACTOR = 20
_MAX_PAUSE_S = 1.5
_MAX_DRAWN = 2000  # characters in one step, so that keys do not wait
_SHOWN_LINES = 12
_SHOWN_CHARACTERS = 1500


BranchNumber = tuple[int, int]  # position from 1, number of branches


def branch_mark(number: BranchNumber) -> str:
    """Return the position among several branches ("" for a single branch)."""
    which, count = number
    return f"‹ {which}/{count} ›" if count > 1 else ""


class Notice(Static, can_focus=False):
    """A message from the app; `kind` is a CSS class."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(Content(displayable(text)), classes=kind)


class PromptView(Widget, can_focus=False):
    """A prompt: its text, shortened if long, and the names of its files."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"prompt--about", "prompt--action"}

    def __init__(self, turn: ChatTurn, number: BranchNumber) -> None:
        super().__init__(id=f"prompt-{turn.number}")
        self.turn = turn
        self._number = number
        is_summary = turn.prompt.text == SUMMARY_PROMPT
        self._short_text, self._files = split_files("/compact" if is_summary else turn.prompt.text)
        self._full_text = expand_pastes(self._short_text, pasted_texts(self._files))
        self.is_open = False
        self._shown, more = shorten(self._short_text)
        self._hidden = more + len(self._full_text) - len(self._short_text)  # characters

    def action_unfold(self) -> None:
        """Show all of a long prompt, also its pasted texts, or fold it."""
        self.is_open = not self.is_open and self._hidden > 0
        self.refresh(layout=True)

    def render(self) -> Content:
        style = self.get_visual_style("prompt--about", partial=True)
        action = self.get_visual_style("prompt--action", partial=True)
        text, more = (self._full_text, 0) if self.is_open else (self._shown, self._hidden)
        lines = [Content(displayable(text))]
        if self._hidden:
            words = f"… {more:,} more characters · " if more else ""
            click = action + Style.from_meta({"@click": "unfold"})
            fold = "unfold" if more else "fold"
            lines.append(Content.assemble((words, style), (fold, click)))
        files = [file for file in self._files if not file.is_paste]
        about = [f"@{on_one_line(file.name)}  {human_size(file.size)}" for file in files]
        lines += [Content.styled(line, style) for line in about]
        if mark := branch_mark(self._number):
            lines.append(Content.styled(mark, style))
        return Content("\n").join(lines)


class AnswerView(Vertical):
    """The answer of a turn. `sync` draws new text."""

    class StateChanged(Message):
        """Posted when the answer starts or ends, or when its footer changes."""

    def __init__(
        self, turn: ChatTurn, number: BranchNumber, *, drafting: Drafting, thinking: bool
    ) -> None:
        super().__init__(id=f"answer-{turn.number}")
        self.turn = turn
        self._number = number
        self.thinking = ThinkingView(turn, is_open=thinking)
        text = displayable(turn.answer)
        self._marks, prefix = DraftMarks(turn, drafting), turn.markdown_prefix
        self._text = AnswerMarkdown(prefix + text, self._marks, -len(prefix))
        self._rounds = RoundsView(turn, thinking=thinking) if turn.rounds else None
        self._calling = Static(classes="calling")  # the call that the model is writing
        self._footer = Static(classes="foot")
        self._drawn = len(text)  # characters of the answer in `_text`
        self._drawing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    def compose(self) -> ComposeResult:
        if self._rounds is not None:
            yield self._rounds
        yield self.thinking
        yield self._text
        yield self._calling
        yield self._footer

    def on_mount(self) -> None:
        self.show_state()

    def on_unmount(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()

    @property
    def is_drawn(self) -> bool:
        """Whether all text of the turn is on the screen."""
        return self._drawn == len(self.turn.answer)

    @property
    def sections(self) -> list[MarkdownSection]:
        """The sections that may be unmounted: all but a growing last one."""
        ended = self.turn.state in ("done", "failed") and self.is_drawn
        before = [] if self._rounds is None else list(self._rounds.query(MarkdownSection))
        return before + (self._text.sections if ended else self._text.sections[:-1])

    def sync(self) -> None:
        """Start to draw new text of the turn."""
        self.thinking.sync()
        call = self.turn.calling if self.turn.state == "answering" else None
        self._calling.display = call is not None
        if call is not None:
            size = f"{len(call.arguments):,} characters"
            self._calling.update(Content(f"… calling {on_one_line(call.name)}  {size}"))
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw())

    def sync_rounds(self) -> None:
        if self._rounds is not None:
            self._rounds.sync()

    def action_unfold(self) -> None:
        if self._rounds is not None:
            self._rounds.toggle()

    def show_state(self) -> None:
        """Update the footer: why the answer is incomplete, and its branch."""
        if self.turn.state in ("done", "failed"):
            self._ended.set()
        else:
            self._ended.clear()
        self.sync()
        ending, mark = self._ending(), branch_mark(self._number)
        foot = Content("   ".join(word for word in (ending, mark) if word))
        self._footer.update(foot)
        self._footer.display = bool(foot)
        self.post_message(self.StateChanged())

    async def show_drafting(self, drafting: Drafting) -> None:
        self._marks.shown = drafting
        await self._text.redraw()

    def _ending(self) -> str:
        """Return why the answer is incomplete or empty, "" if it is complete or growing."""
        if self.turn.state == "queued":
            return "… queued; Esc takes it back"
        if self.turn.state not in ("done", "failed"):
            return ""
        if self.turn.finish_reason == "stop" and not self.turn.answer.strip():
            return "… the model returned an empty answer"
        if self.turn.finish_reason in (None, "cancelled") and not self.turn.has_output:
            return "… no answer; F5 tries again"
        return _ENDINGS.get(self.turn.finish_reason, "")

    async def _draw(self) -> None:
        # The `stop` of Textual's MarkdownStream may start a second append while one runs.
        while True:
            started = time.monotonic()
            end = min(len(self.turn.answer), self._drawn + _MAX_DRAWN)
            if end == self._drawn:
                self._text.end()
                break
            await self._text.append(displayable(self.turn.answer[self._drawn : end]))
            self._drawn = end
            if self.turn.state == "answering":
                pause = min(_PAUSE_FACTOR * (time.monotonic() - started), _MAX_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), pause)


def shorten(text: str) -> tuple[str, int]:
    """Return the beginning of a long text and the number of omitted characters."""
    short = "\n".join(text.split("\n", _SHOWN_LINES)[:_SHOWN_LINES])[:_SHOWN_CHARACTERS]
    omitted = len(text) - len(short)
    return (short, omitted) if omitted > len(short) // 4 else (text, 0)
