"""The prompt box: a text area that grows, sends prompts and recalls earlier ones.

Control characters are left out, pasted or typed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import TextArea

from akunu_py.text import typeable
from akunu_py.tui.prompt.attachments import (
    find,
    looks_like_a_file,
    mention_spans,
    mentions,
    tokens_of,
)
from akunu_py.tui.prompt.suggestions import SuggestionPopup

# Terminals without a richer keyboard protocol send Ctrl+J as a line feed and cannot tell
# Shift+Enter from Enter; those that can, send it.
_NEWLINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter", "ctrl+enter")
_ERASING_KEYS = ("backspace", "delete", "ctrl+h", "ctrl+w")


class PromptBox(TextArea):
    """Where prompts are written. Enter sends, Ctrl+J breaks the line, Up recalls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "search", "Search earlier prompts"),
        # A text area has its own use for these two.
        Binding("f6", "app.edit", "Edit your last message and send it again"),
        Binding("f7", "app.copy_answer", "Copy the last answer"),
    ]

    @dataclass
    class Submitted(Message):
        """A prompt to be sent; the box is empty again."""

        text: str

    class NothingToSend(Message):
        """Enter in an empty box."""

    @dataclass
    class Paged(Message):
        """Page Up (-1) or Page Down (1): the transcript scrolls, not the few lines here."""

        direction: int

    class QueuedWanted(Message):
        """Up in an empty box while a prompt waits its turn: it comes back."""

    class EditorWanted(Message):
        """Ctrl+X Ctrl+E: the prompt is written in the user's editor."""

    class FollowWanted(Message):
        """End in an empty box: the transcript follows its end again."""

    @dataclass
    class SearchWanted(Message):
        """An earlier prompt is searched for; `earlier` are all that are known, oldest first."""

        earlier: Sequence[str]

    # What is shown in the border, and the action of the app that a click on it runs, "" for none.
    hints: reactive[Sequence[tuple[str, str]]] = reactive[Sequence[tuple[str, str]]](())

    heading: reactive[str] = reactive("")
    has_queued: reactive[bool] = reactive(False)
    COMPONENT_CLASSES: ClassVar[set[str]] = {"prompt--file", "prompt--no-file"}

    def __init__(self, placeholder: str, popup: SuggestionPopup, directory: Path, id: str) -> None:
        super().__init__(
            id=id,
            placeholder=placeholder,
            show_line_numbers=False,
            highlight_cursor_line=False,
            soft_wrap=True,
        )
        self._popup = popup
        self._files = NamedFiles(directory, {})
        self._pasted = PastedTexts()
        self._after_ctrl_x = False
        self._sent: list[str] = []
        self._recalled: int | None = None  # index into _sent of what the box shows

    def on_mount(self) -> None:
        self._popup.attach_to(self)

    @property
    def whole(self) -> str:
        """The text, with what was pasted into it."""
        return self._pasted.unfold(self.text)

    def remember(self, prompts: Sequence[str]) -> None:
        """Adds prompts of earlier conversations, oldest first, to be recalled."""
        self._sent[:0] = [typeable(prompt) for prompt in prompts]
        self._recalled = None

    def put_back(self, prompt: str) -> None:
        """Puts back a prompt that was not answered, before what was typed since."""
        typed = self.text
        self.write(prompt)
        if typed.strip():
            self.insert(f"\n\n{typed}", self.document.end)
            self.move_cursor(self.document.end)

    def write(self, prompt: str) -> None:
        """Replaces the whole text by a prompt."""
        self.text = typeable(prompt)  # one of an imported conversation may hold anything
        self.move_cursor(self.document.end)

    def recall(self, prompt: str) -> None:
        """Replaces the text by a prompt that was sent; Up goes on from there."""
        self.write(prompt)
        if self._sent and self._sent[-1] == self.text:
            self._recalled = len(self._sent) - 1

    def empty(self) -> None:
        """Empties the box; Up brings back what was in it."""
        self._remember(self.whole.strip())
        self.clear()

    def name_file(self, name: str) -> None:
        """Appends an @ and the name of a file; without one the list of files opens."""
        text = self.text.rstrip()
        self.write(f"{text} " if text else "")
        self.focus()
        self._popup.take_key("@", is_typed=not name)
        self.insert(f"@{name} " if name else "@")

    def watch_hints(self) -> None:
        """Shows the keys that matter now in the border: as many as fit."""
        shown = list(self.hints)
        while len(shown) > 1 and len(" · ".join(hint for hint, _ in shown)) > self.size.width - 2:
            del shown[-2]
        links = [_link(hint, action) if action else Content(hint) for hint, action in shown]
        self.border_subtitle = Content(" · ").join(links)

    def on_resize(self) -> None:
        self.watch_hints()
        self.call_after_refresh(self.scroll_cursor_visible)  # a text area does not follow it

    # Textual calls the base class's handlers after these two, unless they prevent it.

    async def _on_key(self, event: events.Key) -> None:
        typed = event.is_printable or event.key in _ERASING_KEYS
        after_ctrl_x, self._after_ctrl_x = self._after_ctrl_x, event.key == "ctrl+x"
        if after_ctrl_x and event.key == "ctrl+e":
            self.post_message(self.EditorWanted())
        elif event.key == "ctrl+x" and not self.selected_text:
            pass  # a text area would cut the line
        elif self._popup.take_key(event.key, is_typed=typed) or (
            event.key == "tab" and self._unfold()
        ):
            pass
        elif event.key == "enter":
            self.send()
        elif event.key in _NEWLINE_KEYS:
            self.insert("\n")
            self.scroll_cursor_visible()
        elif event.key == "ctrl+d" and not self.text:
            await self.run_action("app.quit")
        elif event.character == "?" and not self.text:
            await self.run_action("app.help")
        else:
            return
        event.stop()
        event.prevent_default()

    async def _on_paste(self, event: events.Paste) -> None:
        event.text = self._pasted.fold(typeable(event.text))
        if event.text.startswith("[pasted"):
            self.app.notify("Folded; Tab right behind it unfolds it.")

    def _unfold(self) -> bool:
        """Writes out the pasted text right before the cursor; False where there is none."""
        end = self.cursor_location
        chip = self._pasted.before(self.get_text_range((0, 0), end))
        if chip is not None:
            self.replace(self._pasted.unfold(chip), (end[0], end[1] - len(chip)), end)
        return chip is not None

    # What is named in the text

    def on_text_area_changed(self) -> None:
        if "@" in self.text or self._files.tokens:
            self.run_worker(self._look_up(), group="mentions", exclusive=True)

    async def _look_up(self) -> None:
        self._files = await asyncio.to_thread(self._files.with_names, mentions(self.text))
        self._line_cache.clear()
        self.refresh()
        self.watch_heading()

    def watch_heading(self) -> None:
        parts = [part for part in (self.heading, self._files.describe()) if part]
        self.border_title = Content(" · ".join(parts))

    def get_line(self, line_index: int) -> Text:
        line = super().get_line(line_index)
        if "@" in line.plain:
            for start, end, is_found in self._files.spans(line.plain):
                name = "prompt--file" if is_found else "prompt--no-file"
                line.stylize(self.get_component_rich_style(name, partial=True), start, end)
        return line

    def action_search(self) -> None:
        self.post_message(self.SearchWanted(self._sent))

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self.has_queued and not self.text:
            self.post_message(self.QueuedWanted())
        elif not select and self._sent and (not self.text or self._is_browsing):
            newest = len(self._sent)
            self._recall(max(0, (self._recalled if self._is_browsing else newest) or 0) - 1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self._is_browsing and self._recalled is not None:
            self._recall(self._recalled + 1)
        else:
            super().action_cursor_down(select)

    def action_cursor_line_end(self, select: bool = False) -> None:
        if self.text:
            super().action_cursor_line_end(select)
        else:
            self.post_message(self.FollowWanted())

    def action_cursor_page_up(self) -> None:
        self.post_message(self.Paged(-1))

    def action_cursor_page_down(self) -> None:
        self.post_message(self.Paged(1))

    @property
    def _is_browsing(self) -> bool:
        """Whether the box shows a recalled prompt, unchanged."""
        return self._recalled is not None and self.text == self._sent[self._recalled]

    def send(self) -> None:
        """Posts the text to be sent, and empties the box."""
        text = self.whole.strip()
        if not text:
            self.post_message(self.NothingToSend())
            return
        self._remember(text)
        self.clear()
        self.post_message(self.Submitted(text))

    def _remember(self, text: str) -> None:
        if text and (not self._sent or self._sent[-1] != text):
            self._sent.append(text)
        self._recalled = None

    def _recall(self, index: int) -> None:
        """Shows the prompt at `index`; before the first stays there, after the last is empty."""
        index = max(0, index)
        if index >= len(self._sent):
            self._recalled = None
            self.clear()
        else:
            self._recalled = index
            self.write(self._sent[index])


def _link(words: str, action: str) -> Content:
    return Content.from_markup(f"[@click=app.{action}]$words[/]", words=words)


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """The names in a prompt that are files or directories, each with its size in tokens, estimated.
    directory: where they are looked for."""

    directory: Path
    tokens: Mapping[str, int]

    def with_names(self, names: Sequence[str]) -> NamedFiles:
        """Looks `names` up; call it in another thread."""
        tokens = {}
        for name in names:
            if (found := find(name, self.directory)) is not None:
                tokens[name] = tokens_of(found[1])
        return NamedFiles(self.directory, tokens)

    def describe(self) -> str:
        """How many there are, and how much they add to the prompt; "" for none."""
        count, tokens = len(self.tokens), sum(self.tokens.values())
        files = "1 file" if count == 1 else f"{count} files"
        return f"{files}, about {tokens:,} tokens" if count else ""

    def spans(self, line: str) -> list[tuple[int, int, bool]]:
        """Where in a line names are, and whether they are found; words that need be no file are
        left out."""
        return [
            (start, end, name in self.tokens)
            for start, end, name in mention_spans(line)
            if name in self.tokens or looks_like_a_file(name)
        ]


class PastedTexts:
    """Long pasted texts, which stand in the box as `[pasted 5,000 lines]`."""

    LINES, CHARACTERS = 12, 3000  # as much stays as it is
    _CHIP = re.compile(r"\[pasted [\d,]+ (?:lines|characters)(?: #\d+)?\]")

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """What stands for a pasted text in the box: itself where it is short."""
        lines = text.count("\n") + 1
        if lines <= self.LINES and len(text) <= self.CHARACTERS:
            return text
        words = f"{lines:,} lines" if lines > self.LINES else f"{len(text):,} characters"
        chip, number = f"[pasted {words}]", 1
        while self._texts.get(chip, text) != text:
            number += 1
            chip = f"[pasted {words} #{number}]"
        self._texts[chip] = text
        return chip

    def unfold(self, text: str) -> str:
        """The text with what was pasted in it."""
        return self._CHIP.sub(lambda chip: self._texts.get(chip[0], chip[0]), text)

    def before(self, text: str) -> str | None:
        """The chip at the very end of `text`, None for none."""
        return next((chip for chip in self._texts if text.endswith(chip)), None)
