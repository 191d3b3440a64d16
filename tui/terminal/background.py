"""Asks the terminal for the colour of its background, before the program draws on it.

Owns one question and its answer: OSC 11, followed by a question that every terminal answers
(primary device attributes), so that one that does not know the first costs no waiting. Leaves the
terminal as it was. Does not ask where something was typed already: the answer would come after it.
"""

from __future__ import annotations

import os
import re
import select
import termios
import time
import tty
from collections.abc import Mapping

from akunu_py.tui.terminal.themes import Background

_QUESTION = b"\x1b]11;?\x1b\\\x1b[c"
_COLOUR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_ATTRIBUTES = re.compile(rb"\x1b\[\?[0-9;]*c")
# Only a terminal that answers nothing at all makes us wait so long; a slow line may need it.
_PATIENCE_S = 1.0
_MUTE = ("", "dumb", "linux", "unknown")


def background(environ: Mapping[str, str] = os.environ) -> Background | None:
    """Whether the terminal is dark or light; None where nothing tells."""
    if environ.get("TERM", "") in _MUTE:
        return None
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return parse_answer(_ask(terminal)) or _from_environment(environ)
    except (OSError, termios.error):
        return _from_environment(environ)
    finally:
        os.close(terminal)


def parse_answer(answer: bytes) -> Background | None:
    """What the terminal's answer means: light above the middle of perceived brightness."""
    found = _COLOUR.search(answer)
    if found is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return "light" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "dark"  # BT.601


def _ask(terminal: int) -> bytes:
    if select.select([terminal], [], [], 0)[0]:
        return b""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        os.write(terminal, _QUESTION)
        return _read(terminal, time.monotonic() + _PATIENCE_S)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read(terminal: int, end: float) -> bytes:
    answer = b""
    while not _ATTRIBUTES.search(answer):
        left = end - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            break
        answer += os.read(terminal, 1024)
    return answer


def _from_environment(environ: Mapping[str, str]) -> Background | None:
    """COLORFGBG, "15;0" for one, is set by a few terminals: the last number is the background."""
    last = environ.get("COLORFGBG", "").rpartition(";")[2]
    if not last.isdecimal():
        return None
    return "light" if int(last) in (7, *range(9, 16)) else "dark"
