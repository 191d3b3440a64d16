"""The terminal around the chat: its background color, text widths, clipboard, editor and driver."""

from __future__ import annotations

import asyncio
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len, split_graphemes

from akunu_py.text import on_one_line, typeable
from akunu_py.tui.themes import Background
from akunu_py.workarounds.textual_driver import SteadyDriver

_QUERY = b"\x1b]11;?\x1b\\\x1b[c"
_COLOUR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
_ATTRIBUTES = re.compile(rb"\x1b\[\?[0-9;]*c")
# Only a terminal that answers nothing at all takes so long; a slow connection may need it.
_ANSWER_TIMEOUT_S = 1.0
_MUTE = ("", "dumb", "linux", "unknown")


def background(environ: Mapping[str, str] = os.environ) -> Background | None:
    """Whether the terminal is dark or light; None where that cannot be found out.

    Asks with OSC 11, followed by a query that every terminal answers (primary device attributes),
    so that one that does not know the first costs no waiting. It must be called before the program
    draws; where something was typed already it does not ask, as the answer would come after it.
    """
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
    """The background in a terminal's answer: light above half of the luma."""
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
        os.write(terminal, _QUERY)
        return _read(terminal, time.monotonic() + _ANSWER_TIMEOUT_S)
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


# Terminals disagree on the width of emoji joined by a zero-width joiner, skin tones, variation
# selectors and Indic vowel signs. One such cluster would shift the rest of its line.

# What every terminal gives the same width: the scripts and symbols that stand in the tables of all
# of them for years. Whatever is not here costs some bytes, and is as right.
_AGREED = (
    "\x20-\x7e\xa0-\xac\xae-\u05ff\u0606-\u061b\u061d-\u06dc\u06de-\u06ff"
    "\u0e00-\u0e32\u0e34-\u0e7f\u10a0-\u10ff\u1e00-\u1fff"
    "\u2010-\u2027\u202f-\u205e\u2070-\u209c\u20a0-\u20bf\u2100-\u262f\u2638-\u2689\u2690-\u2bff"
    "\u2c60-\u2c7f\u2e80-\u3029\u3030-\u3098\u309b-\u3163\u3165-\u3247\u3250-\u4dbf\u4e00-\ua4cf"
    "\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff9f\uffe0-\uffe6\ufffc-\ufffd"
    "\U00020000-\U0002fffd"
)
_DISPUTED = re.compile(f"[^{_AGREED}\\s\x00-\x1f]")
_TOKEN = re.compile(
    r"\x1b\[(?P<row>\d+);(?P<column>\d+)H"
    r"|\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
    r"|(?P<text>[^\x00-\x1f]+)"
    r"|(?P<control>[\x00-\x1f])"
)


def keep_columns(data: str) -> str:
    """`data` for a terminal, with the cursor put in its place around each disputed cluster.

    Only what follows a move to a row and column (CUP) is changed, as all does that Textual draws.
    A cluster is drawn over spaces, since it may be narrower than its place.
    """
    if not _DISPUTED.search(data):
        return data
    parts: list[str] = []
    place: tuple[int, int] | None = None  # row and column from 1, where they are known
    for token in _TOKEN.finditer(data):
        if token["row"]:
            place = int(token["row"]), int(token["column"])
        elif token["control"]:
            place = None
        elif token["text"] and place is not None:
            row, column = place
            place = row, column + cell_len(token["text"])
            parts.append(_kept(token["text"], row, column))
            continue
        parts.append(token[0])
    return "".join(parts)


def _kept(text: str, row: int, column: int) -> str:
    if not _DISPUTED.search(text):
        return text
    parts: list[str] = []
    for cluster, width in _clusters(text):
        after = column + width
        if not _DISPUTED.search(cluster):
            parts.append(cluster)
        elif width:  # else nothing of it would be seen
            blank = f"{' ' * width}\x1b[{row};{column}H"
            parts.append(f"{blank}{cluster}\x1b[{row};{after}H")
        column = after
    return "".join(parts)


def _clusters(text: str) -> Iterator[tuple[str, int]]:
    """What is drawn as one, with its columns; two regional indicators are a flag."""
    half: tuple[str, int] | None = None
    while text.startswith("\u200d"):
        text = text[2:]  # laid out as nothing: a joiner hides what follows it
    for start, end, width in split_graphemes(text)[0]:
        cluster = text[start:end]
        is_half = len(cluster) == 1 and "\U0001f1e6" <= cluster <= "\U0001f1ff"
        if half and is_half:
            yield half[0] + cluster, half[1] + width
            half = None
            continue
        if half:
            yield half
        half = (cluster, width) if is_half else None
        if not is_half:
            yield cluster, width
    if half:
        yield half


_CLIPBOARD_TIMEOUT_S = 2.0
_ON_WAYLAND = (["wl-copy"],)
_ON_X11 = (["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"])
_TMUX = ["tmux", "load-buffer", "-w", "-"]  # -w: and to the clipboard of the terminal outside

Which = Callable[[str], str | None]


def find_program(
    environ: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    which: Which = shutil.which,
) -> list[str] | None:
    """The command that copies its standard input to the user's clipboard; None: only the terminal
    can (OSC 52, which the app writes).

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
    """Passes `text` to a command of `find_program`; False where that failed. Blocks, at most two
    seconds."""
    try:
        done = subprocess.run(
            command,
            input=text.encode(errors="replace"),
            stdout=subprocess.DEVNULL,  # xclip stays, and would keep a pipe open
            stderr=subprocess.DEVNULL,
            timeout=_CLIPBOARD_TIMEOUT_S,
            env={**os.environ, "LC_CTYPE": "UTF-8"},  # pbcopy takes the bytes for what this says
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def editor(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command of the user's editor."""
    return shlex.split(environ.get("VISUAL") or environ.get("EDITOR") or "vi") or ["vi"]


async def edit_text(text: str, command: Sequence[str] | None = None) -> str:
    """What the user makes of `text` in the editor, which has the terminal meanwhile; `text` where
    it fails. Who stops waiting ends the editor. Raises OSError where it cannot be started."""
    with tempfile.TemporaryDirectory(prefix="akunu-") as directory:
        path = Path(directory, "prompt.md")
        path.write_text(text, "utf-8", "replace")
        process = await asyncio.create_subprocess_exec(*(command or editor()), str(path))
        try:
            failed = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
        return text if failed else typeable(path.read_text("utf-8", "replace"))


# XTWINOPS of xterm; who does not know it leaves the last title there.
_PUSH_TITLE, _POP_TITLE = "\x1b[22;2t", "\x1b[23;2t"


def has_title(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal takes a title (OSC 2)."""
    return environ.get("TERM", "") not in _MUTE


class ChatDriver(SteadyDriver):
    """The chat's driver: aligns wide characters and sets the terminal's title."""

    _title = ""

    def write(self, data: str) -> None:
        if not self.is_suspended:  # else the terminal is another program's
            super().write(keep_columns(data))

    def start_application_mode(self) -> None:
        super().start_application_mode()
        if has_title():
            self.write(_PUSH_TITLE)
            self.show_title(self._title)

    def stop_application_mode(self) -> None:
        if has_title():
            self.write(_POP_TITLE)
        super().stop_application_mode()

    def show_title(self, title: str) -> None:
        """Names the terminal's window or tab."""
        self._title = title
        if title and has_title():
            self.write(f"\x1b]2;{on_one_line(title)}\x07")
            self.flush()
