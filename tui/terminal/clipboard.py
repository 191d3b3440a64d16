"""Putting text on the clipboard of the person who sits at the screen.

Owns which way leads there: a program of the system's where the screen is this machine's, tmux
where it knows the terminal, else the terminal's own OSC 52, which the app writes. Refuses to wait:
a program that does not come back within two seconds is given up on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

_PATIENCE_S = 2.0
_ON_WAYLAND = (["wl-copy"],)
_ON_X11 = (["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"])
_TMUX = ["tmux", "load-buffer", "-w", "-"]  # -w: and to the clipboard of the terminal outside

Which = Callable[[str], str | None]


def find_program(
    environ: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    which: Which = shutil.which,
) -> list[str] | None:
    """The command that takes the text on its input; None: only the terminal can be asked.

    On a Mac it is pbcopy, since Terminal.app ignores OSC 52. Over ssh the programs of this machine
    would fill a clipboard that nobody sees, so there it is tmux or the terminal.
    """
    candidates: list[list[str]] = []
    if not (environ.get("SSH_CONNECTION") or environ.get("SSH_TTY")):
        if platform == "darwin":
            candidates.append(["pbcopy"])
        if environ.get("WAYLAND_DISPLAY"):
            candidates += _ON_WAYLAND
        if environ.get("DISPLAY"):
            candidates += _ON_X11
    if environ.get("TMUX"):
        candidates.append(_TMUX)
    return next((command for command in candidates if which(command[0])), None)


def run_program(command: Sequence[str], text: str) -> bool:
    """Hands `text` to a command of `find_program`; False where that failed. Blocks."""
    try:
        done = subprocess.run(
            command,
            input=text.encode(errors="replace"),
            stdout=subprocess.DEVNULL,  # xclip stays, and would keep a pipe open
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            env={**os.environ, "LC_CTYPE": "UTF-8"},  # pbcopy takes the bytes for what this says
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
