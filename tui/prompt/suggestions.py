"""What may follow in the prompt: files after an @, commands after a slash, and their words.

Owns where in the text a completion applies and what it offers. Knows nothing of widgets;
`completion_popup` shows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.errors import AkunuError
from akunu_py.models import store
from akunu_py.settings import load_settings
from akunu_py.text import human_size
from akunu_py.tui.prompt.files import FileIndex, Match, best
from akunu_py.tui.prompt.slash import COMMANDS
from akunu_py.tui.terminal import themes

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


def model_names() -> Iterable[str]:
    """The models that are here."""
    return [model.name for model in store.list_models() if not model.damaged]


def persona_names() -> Iterable[str]:
    """The personas of the settings."""
    return load_settings().personas


WORDS: Mapping[str, Callable[[], Iterable[str]]] = {
    "model": model_names,
    "persona": persona_names,
    "theme": themes.choices,
}
"""What may follow a command, by its name."""


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
        if command not in WORDS:
            return []
        try:
            words = list(WORDS[command]())
        except AkunuError:
            return []  # whoever carries the command out says what is wrong
        return [
            Suggestion(match.path, match.path, match.places, runs=True)
            for match in best(typed, words, _MOST)
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
