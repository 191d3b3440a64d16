"""What may follow in the prompt: files after an @, commands after a slash, and their words.

Owns where in the text a completion applies and what it offers. Knows nothing of widgets;
`completion_popup` shows it.
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
from akunu_py.tui.prompt.files import FileIndex, Match, best
from akunu_py.tui.slash_commands import COMMANDS, choices_of

# As `attach` reads it, up to the cursor.
_MENTION = re.compile(r'(?<![^\s(\[])@(?:"([^"\n]*)|([^\s"@][^\s"]*|))$')
_NAME = re.compile(r"/([A-Za-z]*)")
_WORDS = re.compile(r"/([A-Za-z]+)[ \t]+(\S*)")
_MOST = 50


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One offer. insert: what replaces the typed part. label, with the matched `places` in it, and
    `note` are shown. runs: whether it is complete, so that Enter may send it at once."""

    insert: str
    label: str
    places: tuple[int, ...] = ()
    note: str = ""
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Suggestions:
    """The offers for the last `typed` characters before the cursor; there is at least one."""

    typed: int
    suggestions: Sequence[Suggestion]


class Suggester:
    """Completes prompts; files are those of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.index = FileIndex(folder)

    def wants_files(self, before: str) -> bool:
        """Whether the list of files will be asked for; `before`: the text before the cursor."""
        return _MENTION.search(before) is not None or before.startswith("/attach ")

    def complete(self, before: str) -> Suggestions | None:
        """What may follow `before`, the text before the cursor; None where nothing is known."""
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
            return [self._file(match, match.path) for match in self.index.search(typed, _MOST)]
        return [
            Suggestion(match.path, match.path, match.places, runs=True)
            for match in best(typed, choices_of(command), _MOST)
        ]

    def _mentions(self, letters: str) -> list[Suggestion]:
        return [
            self._file(match, f"@{_quoted(match.path)}")
            for match in self.index.search(letters, _MOST)
        ]

    def _file(self, match: Match, insert: str) -> Suggestion:
        """A folder stays open, so that what is in it can be named next."""
        if match.path.endswith("/"):
            return Suggestion(insert.removesuffix('"'), match.path, match.places, "folder")
        note = ""
        try:
            path = self.index.folder / Path(match.path).expanduser()
            note = human_size(os.stat(path).st_size)
        except (OSError, RuntimeError):
            note = "gone"
        return Suggestion(f"{insert} ", match.path, match.places, note)


def _commands(typed: str) -> list[Suggestion]:
    """Commands whose names begin with what was typed, then those that hold it."""
    names = {command.name: command for command in COMMANDS}
    fitting = [name for name in names if name.startswith(typed)]
    fitting += [name for name in names if typed in name and name not in fitting]
    suggestions = []
    for name in fitting:
        command = names[name]
        start = name.index(typed) + 1
        suggestions.append(
            Suggestion(
                f"/{name} " if command.needs_argument else f"/{name}",
                command.usage,
                tuple(range(start, start + len(typed))),
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
    """The offers for what is before the cursor of the text area that it serves.

    Mounted right before that text area; drawn over what is above it.
    """

    DEFAULT_CSS = Path(__file__).with_name("suggestions.tcss").read_text("utf-8")
    COMPONENT_CLASSES = {"completion--place", "completion--note"}  # noqa: RUF012 - declared so

    def __init__(self, folder: Path, id: str | None = None) -> None:
        super().__init__(id=id, compact=True)
        self._completer = Suggester(folder)
        self._completion: Suggestions | None = None
        self._box: TextArea | None = None
        self._typing = False
        self.display = False
        self.border_subtitle = "Tab insert · Esc close"

    def serve(self, box: TextArea) -> None:
        """Follows the cursor of `box` from here on."""
        self._box = box
        self.watch(box, "selection", self._follow, init=False)

    @property
    def is_open(self) -> bool:
        return bool(self.display)

    def take_key(self, key: str, *, is_typed: bool) -> bool:
        """Whether the key was for the list, which then did what it says.

        Asked for every key of the box. is_typed: whether the key writes or deletes a character.
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
        self._completion = None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """A click."""
        event.stop()
        self._choose("tab")

    def on_resize(self) -> None:
        self._show_offers()

    def _follow(self) -> None:
        if not self._typing or self._box is None:
            self.close()
            return
        before = self._before()
        if self._completer.wants_files(before) and not self._completer.index.is_fresh:
            self.run_worker(self._read_folder(), group="folder", exclusive=True)
        self._completion = self._completer.complete(before)
        self.display = self._completion is not None and not self._is_said(before)
        self._show_offers()

    async def _read_folder(self) -> None:
        await asyncio.to_thread(self._completer.index.refresh)
        self._follow()

    def _before(self) -> str:
        """The text before the cursor; empty where something is selected."""
        assert self._box is not None
        start, end = self._box.selection
        return self._box.get_text_range((0, 0), end) if start == end else ""

    def _is_said(self, before: str) -> bool:
        """Whether what was typed is the one thing that could be offered."""
        assert self._completion is not None
        offers = self._completion.suggestions
        return len(offers) == 1 and before.endswith(offers[0].insert) and bool(offers[0].insert)

    def _show_offers(self) -> None:
        if self._completion is None or not self.is_open:
            return
        self.clear_options()
        offers = self._completion.suggestions
        room = self.app.size.width - _FRAME
        note = max(len(offer.note) for offer in offers)
        label = min(max(len(offer.label) for offer in offers), room)
        if note <= _SHORT_NOTE and room >= _ROOM_FOR_NOTES:
            label = min(label, room - note - _GAP)  # a size is worth more than the head of a path
        self.add_options(Option(self._line(offer, label, room - label - _GAP)) for offer in offers)
        self.highlighted = 0

    def _line(self, offer: Suggestion, width: int, room: int) -> Content:
        """The label, `width` wide, with its matched letters; the note where it has `room`."""
        place = self.get_visual_style("completion--place", partial=True)
        muted = self.get_visual_style("completion--note", partial=True)
        label = Content(displayable(offer.label))
        for index in offer.places:
            label = label.stylize(place, index, index + 1)
        if label.cell_length > width and "/" in offer.label[1:]:
            label = Content.assemble("…", label[len(label) - width + 1 :])  # its end says more
        label = label.truncate(width, ellipsis=True)
        if room < _SHORT_NOTE:
            return label
        note = Content.styled(displayable(offer.note), muted).truncate(room, ellipsis=True)
        return Content.assemble(label.pad_right(max(0, width - label.cell_length) + _GAP), note)

    def _move(self, steps: int) -> None:
        count = self.option_count
        now = self.highlighted or 0
        if abs(steps) == 1:
            self.highlighted = (now + steps) % count
        else:
            self.highlighted = min(max(0, now + steps), count - 1)

    def _choose(self, key: str) -> bool:
        """Puts the chosen offer into the box; says whether the key has done its work."""
        if self._completion is None or self._box is None or self.highlighted is None:
            return False
        offer = self._completion.suggestions[self.highlighted]
        typed = self._completion.typed
        row, column = self._box.cursor_location
        self._typing = False
        self._box.replace(offer.insert, (row, column - typed), (row, column))
        self.close()
        if offer.insert.endswith(("/", "@")) or (offer.insert.endswith(" ") and key == "tab"):
            self._go_on()
        return not (key == "enter" and offer.runs)

    def _go_on(self) -> None:
        """Offers what may follow, in a folder or after a command that needs a word."""
        self._typing = True
        self._follow()
        self._typing = False
