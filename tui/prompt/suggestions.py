"""Suggestions while typing: files after an @, commands after a slash, arguments."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from textual.content import Content
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from akunu_py.text import displayable, human_size
from akunu_py.tui.prompt.attachments import is_text
from akunu_py.tui.prompt.file_index import FileIndex, best_matches
from akunu_py.tui.prompt.slash_commands import COMMANDS, argument_choices

# The mention syntax of `attach`, up to the cursor.
_MENTION = re.compile(r'(?<![^\s(\[])@(?:"([^"\n]*)|([^\s"@][^\s"]*|))$')
_NAME = re.compile(r"/([A-Za-z]*)")
_WORDS = re.compile(r"/([A-Za-z]+)[ \t]+(\S*)")
_MAX_SUGGESTIONS = 50


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One completion of the text before the cursor."""

    insert: str  # replaces the typed part
    label: str
    places: tuple[int, ...] = ()  # matched characters of `label`
    note: str = ""  # shown after the label
    runs: bool = False  # complete: Enter sends it immediately


def suggest(index: FileIndex, before: str) -> tuple[str, list[Suggestion]]:
    """Return the end of the text before the cursor, and suggestions that replace it."""
    if found := _NAME.fullmatch(before):
        return before, _commands(found[1].lower())
    if found := _WORDS.fullmatch(before):
        matches = best_matches(found[2], argument_choices(found[1].lower()), _MAX_SUGGESTIONS)
        return found[2], [
            Suggestion(each.path, each.path, each.places, runs=True) for each in matches
        ]
    if found := _MENTION.search(before):
        return found[0], list(_files(index, found[1] or found[2] or ""))
    return "", []


def _files(index: FileIndex, letters: str) -> Iterator[Suggestion]:
    """Yield mentions of text files; those of directories stay open for names inside."""
    for match in index.search(letters, _MAX_SUGGESTIONS):
        with contextlib.suppress(RuntimeError, ValueError):  # unknown home directory, a NUL
            path = index.directory / Path(match.path).expanduser()
            if not is_text(path):
                continue
            quote = '"' if " " in match.path else ""
            end, note = f"{quote} ", "gone"
            if match.path.endswith("/"):
                end, note = "", "folder"
            else:
                with contextlib.suppress(OSError):
                    note = human_size(path.stat().st_size)
            yield Suggestion(f"@{quote}{match.path}{end}", match.path, match.places, note)


def _commands(typed: str) -> list[Suggestion]:
    """Return commands whose name starts with `typed`, else has it, else the title."""
    found = [each for each in COMMANDS if typed in each.name or typed in each.title.lower()]
    found.sort(key=lambda each: (not each.name.startswith(typed), typed not in each.name))
    suggestions = []
    for command in found:
        start = command.name.find(typed) + 1
        suggestions.append(
            Suggestion(
                f"/{command.name} " if command.needs_argument else f"/{command.name}",
                command.usage,
                tuple(range(start, start + len(typed))) if start else (),
                command.title,
                runs=not command.needs_argument,
            )
        )
    return suggestions


_MOVES = {
    "up": "cursor_up",
    "ctrl+p": "cursor_up",
    "down": "cursor_down",
    "ctrl+n": "cursor_down",
    "pageup": "page_up",
    "pagedown": "page_down",
}
_FRAME = 7  # columns of margin, border, padding and scrollbar
_GAP = 2
_SHORT_NOTE = 8
_ROOM_FOR_NOTES = 26


class SuggestionPopup(OptionList, can_focus=False):
    """The list of suggestions, mounted right before its text area and drawn above it.

    It opens by typing, never by recalling or pasting. It never has the focus: the prompt box passes
    each key to `take_key` first.
    """

    DEFAULT_CSS = Path(__file__).with_name("suggestions.tcss").read_text("utf-8")
    COMPONENT_CLASSES = {"suggestion--place", "suggestion--note"}  # noqa: RUF012 - declared so

    def __init__(self, directory: Path, id: str | None = None) -> None:
        super().__init__(id=id, compact=True)
        self._index = FileIndex(directory)
        self._typed = ""  # text before the cursor that a suggestion replaces
        self._suggestions: list[Suggestion] = []
        self._typing = False
        self.display = False
        self.border_subtitle = "Tab insert · Esc close"

    def attach_to(self, box: TextArea) -> None:
        self._box = box
        self.watch(box, "selection", self._update, init=False)

    @property
    def is_open(self) -> bool:
        return bool(self.display)

    def take_key(self, key: str, *, is_typed: bool) -> bool:
        """Handle a key of the box; return whether the list consumed it.

        is_typed: the key inserts or deletes a character. Enter on a complete command inserts the
        command without consuming the key, so that the box sends it.
        """
        self._typing = is_typed
        if not self.is_open:
            return False
        if key in ("tab", "enter"):
            return self._choose(key)
        if key in _MOVES:
            getattr(self, f"action_{_MOVES[key]}")()
        elif key == "escape":
            self.close()
        return key in _MOVES or key == "escape"

    def close(self) -> None:
        """Hide the list until more is typed."""
        self.display = False
        self._suggestions = []

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._choose("tab")

    def on_option_list_option_highlighted(self) -> None:
        """Show the effect of Enter on the highlighted suggestion."""
        if self._suggestions and self.highlighted is not None:
            runs = self._suggestions[self.highlighted].runs
            enter = "Enter runs it · Tab inserts it" if runs else "Enter or Tab inserts it"
            self.border_subtitle = f"{enter} · Esc close"

    def on_resize(self) -> None:
        self._refill(self.highlighted)

    def _update(self) -> None:
        if not self._typing:
            self.close()
            return
        start, end = self._box.selection
        before = self._box.get_text_range((0, 0), end) if start == end else ""
        if _MENTION.search(before) and not self._index.is_fresh:
            self.run_worker(self._list_files(), group="files", exclusive=True)
        self._typed, self._suggestions = suggest(self._index, before)
        is_complete = len(self._suggestions) == 1 and before.endswith(self._suggestions[0].insert)
        self.display = bool(self._suggestions) and not is_complete
        self._refill()

    async def _list_files(self) -> None:
        await asyncio.to_thread(self._index.refresh)
        self._update()

    def _refill(self, highlighted: int | None = 0) -> None:
        if not self.is_open:
            return
        self.clear_options()
        room = self.app.size.width - _FRAME
        note = max(len(each.note) for each in self._suggestions)
        label = min(max(len(each.label) for each in self._suggestions), room)
        if note <= _SHORT_NOTE and room >= _ROOM_FOR_NOTES:
            label = min(label, room - note - _GAP)  # a size is worth more than the head of a path
        room -= label + _GAP
        self.add_options(Option(self._line(each, label, room)) for each in self._suggestions)
        self.highlighted = highlighted

    def _line(self, suggestion: Suggestion, width: int, room: int) -> Content:
        place = self.get_visual_style("suggestion--place", partial=True)
        muted = self.get_visual_style("suggestion--note", partial=True)
        label = Content(displayable(suggestion.label))
        for index in suggestion.places:
            label = label.stylize(place, index, index + 1)
        if label.cell_length > width and "/" in suggestion.label[1:]:
            label = Content.assemble("…", label[len(label) - width + 1 :])  # keep the path's end
        label = label.truncate(width, ellipsis=True)
        if room < _SHORT_NOTE:
            return label
        note = Content.styled(displayable(suggestion.note), muted).truncate(room, ellipsis=True)
        return Content.assemble(label.pad_right(max(0, width - label.cell_length) + _GAP), note)

    def _choose(self, key: str) -> bool:
        """Insert the highlighted suggestion; return whether the key was consumed."""
        if not self._suggestions or self.highlighted is None:
            return False
        suggestion = self._suggestions[self.highlighted]
        row, column = self._box.cursor_location
        self._typing = False
        self._box.replace(suggestion.insert, (row, column - len(self._typed)), (row, column))
        self.close()
        ends = ("/", "@", " ") if key == "tab" else ("/", "@")
        if suggestion.insert.endswith(ends):  # suggest files of the directory, or arguments
            self._typing = True
            self._update()
            self._typing = False
        return not (key == "enter" and suggestion.runs)
