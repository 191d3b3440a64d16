"""`akunu complete --print-config EDITOR`: what to paste so that the editor completes with akunu.

The snippets are templates beside the plugins they configure. @FOLDER@ stands for the folder of
both and @COMMAND@ for the command, as literals of the editor's language or of the shell's.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "editors"


@dataclass(frozen=True, slots=True)
class _Editor:
    """template: in the editor's folder. quote: a string literal of its language, folder_quote
    where the folder is written in another one, between: what stands between two strings."""

    template: str
    quote: Callable[[str], str]
    folder_quote: Callable[[str], str]
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

    The program is named by its whole path: editors that a desktop starts know no PATH.
    """
    its = _EDITORS[editor]
    template = (_FOLDER / editor / its.template).read_text()
    command = its.between.join(map(its.quote, [*_program(), "complete", *options]))
    folder = its.folder_quote(str(_FOLDER / editor))
    for name, value in (
        ("@FOLDER@", folder),
        ("@PYTHON@", shlex.quote(sys.executable)),
        ("@COMMAND@", command),
    ):
        template = template.replace(name, value)
    return template


def _program() -> list[str]:
    """How this very akunu is started from anywhere."""
    script = Path(sys.executable).with_name("akunu")
    return [str(script)] if script.exists() else [sys.executable, "-m", "akunu_py"]
