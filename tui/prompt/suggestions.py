"""What may follow in the prompt, and the list that shows it while one types: files after an @,
commands after a slash, and their arguments.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from textual.content import Content
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from akunu_py.text import displayable, human_size
from akunu_py.tui.prompt.attachments import is_text
from akunu_py.tui.prompt.file_index import FileIndex, Match, best
from akunu_py.tui.prompt.slash_commands import COMMANDS, choices_of

# As `attach` reads it, up to the cursor.
_MENTION = re.compile(r'(?<![^\s(\[])@(?:"([^"\n]*)|([^\s"@][^\s"]*|))$')
_NAME = re.compile(r"/([A-Za-z]*)")
_WORDS = re.compile(r"/([A-Za-z]+)[ \t]+(\S*)")
_MOST = 50


@dataclass(frozen=True, slots=True)
class Suggestion:
    """insert: what replaces the typed part. label, with the matched `places` in it, and `note` are
    shown. runs: whether it is complete, so that Enter may send it at once."""

    insert: str
    label: str
    places: tuple[int, ...] = ()
    note: str = ""
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What may replace the last `typed` characters before the cursor; at least one."""

    typed: int
    suggestions: Sequence[Suggestion]


class Suggester:
    """Finds suggestions; files are those of `directory`."""

    def __init__(self, directory: Path) -> None:
        self.index = FileIndex(directory)

    def wants_files(self, before: str) -> bool:
        """Whether the list of files is needed after `before`, the text before the cursor."""
        return _MENTION.search(before) is not None or before.startswith("/attach ")

    def suggest(self, before: str) -> Suggestions | None:
        """What may follow `before`, the text before the cursor; None for nothing."""
        if "\n" not in before:
            if found := _NAME.fullmatch(before):
                return _of(len(before), _commands(found[1].lower()))
            if found := _WORDS.fullmatch(before):
                return _of(len(found[2]), self._words(found[1].lower(), found[2]))
        if found := _MENTION.search(before):
            typed = found[0]
            letters = found[1] if found[1] is not None else found[2]
            return _of(len(typed), self._mentions(letters))
        return None

    def _words(self, command: str, typed: str) -> list[Suggestion]:
        if command == "attach":
            return [self._file(match, match.path) for match in self._texts(typed)]
        return [
            Suggestion(match.path, match.path, match.places, runs=True)
            for match in best(typed, choices_of(command), _MOST)
        ]

    def _mentions(self, letters: str) -> list[Suggestion]:
        return [self._file(match, f"@{_quoted(match.path)}") for match in self._texts(letters)]

    def _texts(self, letters: str) -> list[Match]:
        """The files that match, without those that would be refused."""
        directory = self.index.directory
        found = self.index.search(letters, _MOST)
        return [each for each in found if _can_be_read(directory, each.path)]

    def _file(self, match: Match, insert: str) -> Suggestion:
        """A directory stays open, so that what is in it can be named next."""
        if match.path.endswith("/"):
            return Suggestion(insert.removesuffix('"'), match.path, match.places, "folder")
        note = ""
        try:
            path = self.index.directory / Path(match.path).expanduser()
            note = human_size(os.stat(path).st_size)
        except (OSError, RuntimeError):
            note = "gone"
        return Suggestion(f"{insert} ", match.path, match.places, note)


def _can_be_read(directory: Path, path: str) -> bool:
    try:
        return is_text(directory / Path(path).expanduser())
    except (RuntimeError, ValueError):  # no such home, a NUL
        return False


def _commands(typed: str) -> list[Suggestion]:
    """Commands whose names begin with what was typed, then those that contain it, then those that
    are described with it."""
    names = {command.name: command for command in COMMANDS}
    matching = [name for name in names if name.startswith(typed)]
    matching += [name for name in names if typed in name and name not in matching]
    matching += [
        name
        for name, command in names.items()
        if name not in matching and typed in command.title.lower()
    ]
    suggestions = []
    for name in matching:
        command = names[name]
        start = name.find(typed) + 1
        suggestions.append(
            Suggestion(
                f"/{name} " if command.needs_argument else f"/{name}",
                command.usage,
                tuple(range(start, start + len(typed))) if start else (),
                command.title,
                runs=not command.needs_argument,
            )
        )
    return suggestions


def _of(typed: int, suggestions: Sequence[Suggestion]) -> Suggestions | None:
    return Suggestions(typed, suggestions) if suggestions else None


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path else path


_MOVES = {"up": -1, "down": 1, "ctrl+p": -1, "ctrl+n": 1, "pageup": -6, "pagedown": 6}
_FRAME = 7  # columns of margin, border, padding and scrollbar
_GAP = 2
_SHORT_NOTE = 8
_ROOM_FOR_NOTES = 26


class SuggestionPopup(OptionList, can_focus=False):
    """The list of suggestions above the text area that it is attached to, while one types.

    Mounted right before that text area; drawn over what is above it. It opens by typing, never
    because a prompt was recalled or pasted. It never has the focus: the prompt box passes it each
    key first (`take_key`).
    """

    DEFAULT_CSS = Path(__file__).with_name("suggestions.tcss").read_text("utf-8")
    COMPONENT_CLASSES = {"suggestion--place", "suggestion--note"}  # noqa: RUF012 - declared so

    def __init__(self, directory: Path, id: str | None = None) -> None:
        super().__init__(id=id, compact=True)
        self._suggester = Suggester(directory)
        self._suggestions: Suggestions | None = None
        self._box: TextArea | None = None
        self._typing = False
        self.display = False
        self.border_subtitle = "Tab insert · Esc close"

    def attach_to(self, box: TextArea) -> None:
        """Follows the cursor of `box` from now on."""
        self._box = box
        self.watch(box, "selection", self._follow, init=False)

    @property
    def is_open(self) -> bool:
        return bool(self.display)

    def take_key(self, key: str, *, is_typed: bool) -> bool:
        """Whether the key was for the list, which then has handled it.

        Called for every key of the box. is_typed: whether the key writes or deletes a character.
        A command that is complete is put into the box, and the key left to send it.
        """
        self._typing = is_typed
        if not self.is_open:
            return False
        if key in _MOVES:
            self._move(_MOVES[key])
            return True
        if key == "escape":
            self.close()
            return True
        if key in ("tab", "enter"):
            return self._choose(key)
        return False

    def close(self) -> None:
        """Hides the list until something more is typed."""
        self.display = False
        self._suggestions = None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """A click."""
        event.stop()
        self._choose("tab")

    def on_option_list_option_highlighted(self) -> None:
        """Says what Enter would do."""
        if self._suggestions is not None and self.highlighted is not None:
            runs = self._suggestions.suggestions[self.highlighted].runs
            enter = "Enter runs it · Tab inserts it" if runs else "Enter or Tab inserts it"
            self.border_subtitle = f"{enter} · Esc close"

    def on_resize(self) -> None:
        self._draw()

    def _follow(self) -> None:
        if not self._typing or self._box is None:
            self.close()
            return
        before = self._before()
        if self._suggester.wants_files(before) and not self._suggester.index.is_fresh:
            self.run_worker(self._list_files(), group="files", exclusive=True)
        self._suggestions = self._suggester.suggest(before)
        self.display = self._suggestions is not None and not self._is_typed_out(before)
        self._draw()

    async def _list_files(self) -> None:
        await asyncio.to_thread(self._suggester.index.refresh)
        self._follow()

    def _before(self) -> str:
        """The text before the cursor; empty where something is selected."""
        assert self._box is not None
        start, end = self._box.selection
        return self._box.get_text_range((0, 0), end) if start == end else ""

    def _is_typed_out(self, before: str) -> bool:
        """Whether what was typed is the only suggestion."""
        assert self._suggestions is not None
        suggestions = self._suggestions.suggestions
        insert = suggestions[0].insert
        return len(suggestions) == 1 and before.endswith(insert) and bool(insert)

    def _draw(self) -> None:
        if self._suggestions is None or not self.is_open:
            return
        self.clear_options()
        suggestions = self._suggestions.suggestions
        room = self.app.size.width - _FRAME
        note = max(len(each.note) for each in suggestions)
        label = min(max(len(each.label) for each in suggestions), room)
        if note <= _SHORT_NOTE and room >= _ROOM_FOR_NOTES:
            label = min(label, room - note - _GAP)  # a size tells more than the head of a path
        room -= label + _GAP
        self.add_options(Option(self._line(each, label, room)) for each in suggestions)
        self.highlighted = 0

    def _line(self, suggestion: Suggestion, width: int, room: int) -> Content:
        """The label, `width` wide, with its matched letters; the note where it has `room`."""
        place = self.get_visual_style("suggestion--place", partial=True)
        muted = self.get_visual_style("suggestion--note", partial=True)
        label = Content(displayable(suggestion.label))
        for index in suggestion.places:
            label = label.stylize(place, index, index + 1)
        if label.cell_length > width and "/" in suggestion.label[1:]:
            label = Content.assemble("…", label[len(label) - width + 1 :])  # its end tells more
        label = label.truncate(width, ellipsis=True)
        if room < _SHORT_NOTE:
            return label
        note = Content.styled(displayable(suggestion.note), muted).truncate(room, ellipsis=True)
        return Content.assemble(label.pad_right(max(0, width - label.cell_length) + _GAP), note)

    def _move(self, steps: int) -> None:
        count = self.option_count
        now = self.highlighted or 0
        if abs(steps) == 1:
            self.highlighted = (now + steps) % count
        else:
            self.highlighted = min(max(0, now + steps), count - 1)

    def _choose(self, key: str) -> bool:
        """Inserts the chosen suggestion; returns whether the key has been handled."""
        if self._suggestions is None or self._box is None or self.highlighted is None:
            return False
        suggestion = self._suggestions.suggestions[self.highlighted]
        typed = self._suggestions.typed
        row, column = self._box.cursor_location
        self._typing = False
        self._box.replace(suggestion.insert, (row, column - typed), (row, column))
        self.close()
        ends = ("/", "@", " ") if key == "tab" else ("/", "@")
        if suggestion.insert.endswith(ends):
            self._suggest_next()
        return not (key == "enter" and suggestion.runs)

    def _suggest_next(self) -> None:
        """Suggests what may follow, in a directory or after a command that needs an argument."""
        self._typing = True
        self._follow()
        self._typing = False
