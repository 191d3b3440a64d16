"""`akunu complete --print-config EDITOR`: what to paste so that the editor completes with akunu.

The snippets are templates beside the plugins they configure. @DIRECTORY@ stands for the directory
of both and @COMMAND@ for the command, as literals of the editor's language or of the shell's.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = Path(__file__).parents[1] / "editors"


@dataclass(frozen=True, slots=True)
class _Editor:
    """template: in the editor's directory. quote: a string literal of its language, directory_quote
    where the directory is written in another one, between: what stands between two strings."""

    template: str
    quote: Callable[[str], str]
    directory_quote: Callable[[str], str]
    between: str = ", "


def _vim_string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _lua_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _lisp_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_EDITORS = {
    "vim": _Editor("vimrc.in", _vim_string, _vim_string),
    "neovim": _Editor("init.lua.in", _lua_string, _lua_string),
    "emacs": _Editor("init.el.in", _lisp_string, _lisp_string, between=" "),
    "vscode": _Editor("settings.json.in", json.dumps, shlex.quote),
}
EDITORS = tuple(_EDITORS)


def editor_config(editor: str, options: Sequence[str] = ()) -> str:
    """The snippet for one of EDITORS; `options` go to `akunu complete` each time it is started.

    The program is named by its absolute path: editors that a desktop starts have another PATH.
    """
    config = _EDITORS[editor]
    template = (_DIRECTORY / editor / config.template).read_text()
    command = config.between.join(map(config.quote, [*_program(), "complete", *options]))
    directory = config.directory_quote(str(_DIRECTORY / editor))
    for name, value in (
        ("@DIRECTORY@", directory),
        ("@PYTHON@", shlex.quote(sys.executable)),
        ("@COMMAND@", command),
    ):
        template = template.replace(name, value)
    return template


def _program() -> list[str]:
    """How this very akunu is started from anywhere."""
    script = Path(sys.executable).with_name("akunu")
    return [str(script)] if script.exists() else [sys.executable, "-m", "akunu_py"]
