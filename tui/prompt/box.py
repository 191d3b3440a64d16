"""The prompt box: a text area that grows, sends prompts and recalls earlier ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events, work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import TextArea

from akunu_py.text import typeable
from akunu_py.tui.prompt import attachments
from akunu_py.tui.prompt.suggestions import SuggestionPopup
from akunu_py.tui.status import Unmarked, format_tokens

# Terminals without an extended keyboard protocol cannot distinguish Shift+Enter from Enter.
_NEWLINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter", "ctrl+enter")
_JOINERS = ("\u200c", "\u200d")  # not printable, but part of Persian words and of emoji
_ERASING_KEYS = ("backspace", "delete", "ctrl+h", "ctrl+w")


class PromptBox(Unmarked, TextArea):
    """The text area for prompts. Enter sends, Ctrl+J starts a new line, Up recalls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "app.search_prompts", "Search earlier prompts"),
        # These override TextArea's own bindings.
        Binding("f6", "app.edit", "Edit your last message and send it again"),
        Binding("f7", "app.copy_answer", "Copy the last answer"),
        Binding("pageup", "app.page(-1)", "Scroll up"),
        Binding("pagedown", "app.page(1)", "Scroll down"),
    ]

    @dataclass
    class Submitted(Message):
        """Posted with the prompt to send; the box is already empty."""

        text: str  # with labels in place of long pasted texts
        full_text: str  # with the pasted texts
        pastes: Sequence[attachments.Attachment]

    # Texts in the border, each with the app action that a click runs ("" for none).
    hints: reactive[Sequence[tuple[str, str]]] = reactive[Sequence[tuple[str, str]]](())
    heading: reactive[str] = reactive("")
    has_queued_prompt: reactive[bool] = reactive(False)
    COMPONENT_CLASSES: ClassVar[set[str]] = {"prompt--file", "prompt--no-file"}

    def __init__(self, placeholder: str, popup: SuggestionPopup, directory: Path, id: str) -> None:
        super().__init__(id=id, placeholder=placeholder, highlight_cursor_line=False)
        self._popup = popup
        self.count_tokens: Callable[[str], Awaitable[int | None]] | None = None
        self._context_length = 0  # tokens, 0 if unknown
        self._directory = directory  # of the mentioned files
        self._file_tokens: dict[str, int] = {}  # estimated, by name
        self._pasted = PastedTexts()
        self._after_ctrl_x = False
        self.sent_prompts: list[str] = []  # sent prompts, oldest first
        self._history_index: int | None = None  # index into `sent_prompts` of the shown prompt

    def on_mount(self) -> None:
        self._popup.attach_to(self)

    @property
    def full_text(self) -> str:
        """The text, with folded pastes expanded."""
        return self._pasted.unfold(self.text)

    def extend_history(self, prompts: Sequence[str]) -> None:
        """Add prompts of earlier conversations, oldest first, to the history."""
        self.sent_prompts[:0] = [typeable(self.prompt_of(prompt)) for prompt in prompts]
        self._history_index = None

    def put_back(self, prompt: str) -> None:
        """Restore an unanswered prompt before the text typed since."""
        typed = self.text
        self.write(prompt)
        if typed.strip():
            self.insert(f"\n\n{typed}", self.document.end)
            self.move_cursor(self.document.end)

    def write(self, prompt: str) -> None:
        self.text = typeable(prompt)  # imported conversations may contain control characters
        self.move_cursor(self.document.end)

    def prompt_of(self, message: str) -> str:
        """Return the prompt of a sent message, and keep its pasted texts for their labels."""
        prompt, files = attachments.split_files(message)
        texts = attachments.pasted_texts(files)
        labels = {label: self._pasted.label(text) for label, text in texts.items()}
        return attachments.expand_pastes(prompt, labels)

    @property
    def message(self) -> str:
        """The text as a message, as `prompt_of` expects it."""
        return attachments.join_files(self.text, self._pasted.in_prompt(self.text))

    def write_sent(self, prompt: str) -> None:
        """Replace the text with a sent prompt; Up then recalls the prompt before it."""
        self.write(prompt)
        if self.sent_prompts and self.sent_prompts[-1] == self.text:
            self._history_index = len(self.sent_prompts) - 1

    def empty(self) -> None:
        """Empty the box; Up recalls its text."""
        self._add_to_history(self.text.strip())
        self.clear()

    def watch_hints(self) -> None:
        shown = list(self.hints)
        while len(shown) > 1 and len(" · ".join(hint for hint, _ in shown)) > self.size.width - 2:
            del shown[-2]
        markup = "[@click=app.{}]$words[/]"
        links = [
            Content.from_markup(markup.format(action), words=hint) if action else Content(hint)
            for hint, action in shown
        ]
        self.border_subtitle = Content(" · ").join(links)

    def on_resize(self) -> None:
        self.watch_hints()
        self.call_after_refresh(self.scroll_cursor_visible)  # TextArea does not scroll on resize

    # Textual calls the base class's handlers after these two, unless they prevent the default.

    async def _on_key(self, event: events.Key) -> None:
        joins = event.character in _JOINERS
        typed = event.is_printable or joins or event.key in _ERASING_KEYS
        after_ctrl_x, self._after_ctrl_x = self._after_ctrl_x, event.key == "ctrl+x"
        if after_ctrl_x and event.key == "ctrl+e":
            await self.run_action("app.edit_prompt")
        elif event.key == "ctrl+x" and not self.selected_text:
            pass  # TextArea would cut the line
        elif self._popup.take_key(event.key, is_typed=typed) or (
            event.key == "tab" and self._unfold()
        ):
            pass
        elif joins:
            self.insert(event.character or "")
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
        if attachments.is_image(event.text):  # The terminal pastes the path of a dropped file.
            self.app.notify("This model reads text only, no images.", severity="error")
        if event.text.startswith("[pasted"):
            self.app.notify("Folded the pasted text. Press Tab right after it to unfold.")

    def _unfold(self) -> bool:
        """Expand the folded paste right before the cursor; return False if there is none."""
        end = self.cursor_location
        label = self._pasted.before(self.get_text_range((0, 0), end))
        if label is not None:
            self.replace(self._pasted.unfold(label), (end[0], end[1] - len(label)), end)
        return label is not None

    def use_model(self, context: int) -> None:
        """Count tokens anew, for a loaded model with `context` tokens of context."""
        self._context_length = context
        self._pasted.tokens.clear()
        self.on_text_area_changed()

    def on_text_area_changed(self) -> None:
        if "@" in self.text or self._file_tokens or self._pasted.in_prompt(self.text):
            self._update_attached()
        self.watch_heading()

    @work(group="attached", exclusive=True)
    async def _update_attached(self) -> None:
        names = attachments.mentions(self.text)
        estimate = attachments.estimate_tokens
        self._file_tokens = await asyncio.to_thread(estimate, names, self._directory)
        self._line_cache.clear()
        self.refresh()
        self.watch_heading()
        for paste in self._pasted.in_prompt(self.text):
            if (
                self.count_tokens is not None
                and paste.name not in self._pasted.tokens
                and (count := await self.count_tokens(paste.text)) is not None
            ):
                self._pasted.tokens[paste.name] = count
                self.watch_heading()

    def watch_heading(self) -> None:
        pasted, tokens = self._pasted.describe(self.text)
        count, in_files = len(self._file_tokens), sum(self._file_tokens.values())
        noun = "file" if count == 1 else "files"
        files = f"{count} {noun}, about {in_files:,} tokens" if count else ""
        title = Content(" · ".join(filter(None, (self.heading, files, pasted))))
        if 0 < self._context_length <= tokens + in_files:
            words = f" · too long for {format_tokens(self._context_length)} of context"
            title += Content.styled(words, "$text-error")
        self.border_title = title

    def get_line(self, line_index: int) -> Text:
        line = super().get_line(line_index)
        for found in attachments.MENTION.finditer(line.plain):
            name = found[1] or found[2]
            if name in self._file_tokens or attachments.looks_like_a_file(name):
                style = "prompt--file" if name in self._file_tokens else "prompt--no-file"
                line.stylize(self.get_component_rich_style(style, partial=True), *found.span())
        return line

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self.has_queued_prompt and not self.text:
            self.call_later(self.run_action, "app.take_back")
        elif not select and self.sent_prompts and (place := self._place) is not None:
            self._recall(max(0, place - 1))
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and (place := self._place) is not None:
            self._recall(place + 1)
        else:
            super().action_cursor_down(select)

    def action_cursor_line_start(self, select: bool = False) -> None:
        if self.text:
            super().action_cursor_line_start(select)
        else:
            self.call_later(self.run_action, "app.begin")

    def action_cursor_line_end(self, select: bool = False) -> None:
        if self.text:
            super().action_cursor_line_end(select)
        else:
            self.call_later(self.run_action, "app.follow")

    @property
    def _place(self) -> int | None:
        """The place in the history: of an unchanged recalled prompt, or the end if empty."""
        index = self._history_index
        if not self.text:
            return len(self.sent_prompts)
        return index if index is not None and self.text == self.sent_prompts[index] else None

    def send(self) -> None:
        """Post the text as a prompt and empty the box."""
        text = self.text.strip()
        full_text = self._pasted.unfold(text)
        if not full_text.strip():
            self.call_later(self.run_action, "app.accept_offer")
            return
        self._add_to_history(text)
        self.clear()
        self.post_message(self.Submitted(text, full_text, self._pasted.in_prompt(text)))

    def _add_to_history(self, text: str) -> None:
        if text and (not self.sent_prompts or self.sent_prompts[-1] != text):
            self.sent_prompts.append(text)
        self._history_index = None

    def _recall(self, index: int) -> None:
        if index >= len(self.sent_prompts):
            self._history_index = None
            self.clear()
        else:
            self._history_index = index
            self.write(self.sent_prompts[index])


class PastedTexts:
    """Long pasted texts, folded to `[pasted 5,000 lines]` in the box."""

    LINES, CHARACTERS = 12, 3000  # longer texts are folded

    def __init__(self) -> None:
        self._pastes: dict[str, attachments.Attachment] = {}  # by label
        self.tokens: dict[str, int] = {}  # counted by the model, by label

    def fold(self, text: str) -> str:
        """Return the label of a long pasted text, or a short text unchanged."""
        lines = text.count("\n") + (not text.endswith("\n"))
        is_short = lines <= self.LINES and len(text) <= self.CHARACTERS
        return text if is_short else self.label(text)

    def label(self, text: str) -> str:
        """Return the label of a pasted text, and keep the text."""
        lines = text.count("\n") + (not text.endswith("\n"))
        words = f"{lines:,} lines" if lines > self.LINES else f"{len(text):,} characters"
        label, number = f"[pasted {words}]", 1
        while (known := self._pastes.get(label)) and known.text != text:
            number += 1
            label = f"[pasted {words} #{number}]"
        size = len(text.encode())  # here, because the box is described after each key
        self._pastes[label] = attachments.Attachment(label, size, text, is_paste=True)
        return label

    def unfold(self, text: str) -> str:
        texts = {label: paste.text for label, paste in self._pastes.items()}
        return attachments.expand_pastes(text, texts)

    def in_prompt(self, text: str) -> list[attachments.Attachment]:
        labels = dict.fromkeys(attachments.PASTE_LABEL.findall(text))
        return [self._pastes[label] for label in labels if label in self._pastes]

    def describe(self, text: str) -> tuple[str, int]:
        """Return the tokens of pasted texts in words ("" for none) and as a number."""
        pastes = self.in_prompt(text)
        estimates = {each.name: each.size // attachments.BYTES_PER_TOKEN for each in pastes}
        tokens = sum((estimates | self.tokens)[name] for name in estimates)
        about = "" if estimates.keys() <= self.tokens.keys() else "about "
        return f"pasted text, {about}{tokens:,} tokens" if tokens else "", tokens

    def before(self, text: str) -> str | None:
        """Return the label at the end of `text`, if any."""
        return next((label for label in self._pastes if text.endswith(label)), None)
